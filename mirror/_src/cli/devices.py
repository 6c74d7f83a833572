"""What `mirror devices` tells: the devices, what is configured of them and why, versions."""

import importlib.metadata
import os
import platform
from typing import Any

from mirror._src.devices import backend, settings
from mirror._src.devices.jax_options import PLATFORMS, names_gpus
from mirror._src.devices.memory import memory_info
from mirror._src.devices.names import LogicalDevice, PhysicalDevice
from mirror._src.devices.physical import driver_version, gpu_of, list_physical_devices
from mirror._src.devices.resolve import canonicalize_device
from mirror._src.explain.placement_table import physical_name
from mirror._src.utils.errors import bytes_in_words
from mirror._src.utils.tables import Table
from mirror._version import __version__

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-ml-py")
_OF_JAX = {"memory growth": "False", "memory fraction": "0.75"}  # where nobody said
_CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"


def inventory() -> dict[str, Any]:
    """Everything, as values for JSON. Starts JAX's backend.

    Returns:
        `"physical"` and `"logical"` devices, each a list of dicts with memory in bytes;
        `"configuration"`, a list of dicts of setting, value and why; `"versions"`, a dict;
        `"notes"`, a list of sentences on what looks wrong.
    """
    physical = [_physical(device) for device in list_physical_devices()]
    configuration = _configuration()
    logical = [_logical(device) for device in backend.list_logical_devices()]
    return {
        "physical": physical,
        "logical": logical,
        "configuration": configuration,
        "versions": _versions(),
        "notes": _notes(physical, logical, PLATFORMS.value),
    }


def in_words(found: dict[str, Any]) -> str:
    """The inventory as text for a terminal."""
    physical = Table(
        ("physical device", "what", "memory", "visible"),
        (
            (d["name"], d["what"], _total(d["memory_bytes"]), "yes" if d["visible"] else "no")
            for d in found["physical"]
        ),
    )
    logical = Table(
        ("logical device", "on", "memory taken"),
        ((d["name"], d["physical"], _taken(d)) for d in found["logical"]),
    )
    configuration = Table(
        ("setting", "value", "why"),
        ((c["setting"], c["value"], c["why"]) for c in found["configuration"]),
    )
    versions = Table(("package", "version"), list(found["versions"].items()))
    notes = "\n".join(f"Note: {note}" for note in found["notes"])
    parts = [repr(physical), repr(logical), repr(configuration), repr(versions), notes]
    return "\n\n".join(filter(None, parts))


def _physical(device: PhysicalDevice) -> dict[str, Any]:
    if device.device_type == "CPU":
        what = f"{platform.machine()}, {os.cpu_count()} cores"
        num_bytes: int | None = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        gpu = gpu_of(device)
        version = ".".join(map(str, gpu.compute_capability or ()))
        what = f"{gpu.name}, compute capability {version or 'unknown'}"
        num_bytes = gpu.memory_bytes or None
    return {
        "name": device.name,
        "device_type": device.device_type,
        "what": what,
        "memory_bytes": num_bytes,
        "visible": device in settings.get_visible_devices(),
    }


def _logical(device: LogicalDevice) -> dict[str, Any]:
    found = canonicalize_device(device)
    memory = memory_info(found.memory_stats()) or {}
    return {
        "name": device.name,
        "device_type": device.device_type,
        "physical": physical_name(found),
        "memory_current": memory.get("current"),
        "memory_peak": memory.get("peak"),
        "memory_limit": memory.get("limit"),
    }


def _configuration() -> list[dict[str, str]]:
    rows = settings.in_words()
    if _CUDA_VISIBLE in os.environ:
        rows.append((_CUDA_VISIBLE, os.environ[_CUDA_VISIBLE] or "none", "set by you"))
    found = []
    for name, value, why in rows:
        shown = _OF_JAX.get(name, value) if value == "default" else value
        found.append({"setting": name, "value": shown, "why": why})
    return found


def _versions() -> dict[str, str]:
    versions = {"mirror": __version__, "python": platform.python_version()}
    for name in (*_PACKAGES, *_PLUGINS):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = driver_version()
    if driver is not None:
        versions["NVIDIA driver"] = driver
    default = backend.default_devices()[0]
    lines = str(default.client.platform_version).split("\n")
    versions["backend"] = ", ".join(filter(None, map(str.strip, lines)))
    return versions


def _notes(
    physical: list[dict[str, Any]], logical: list[dict[str, Any]], platforms: str | None
) -> list[str]:
    listed = [d["name"] for d in physical if d["device_type"] == "GPU"]
    unused = [d["name"] for d in physical if d["device_type"] == "GPU" and d["visible"]]
    has_gpus = any(d["device_type"] == "GPU" for d in logical)
    if unused and not has_gpus:
        left_out = platforms and not names_gpus(platforms)
        why = (
            f"JAX_PLATFORMS={platforms} leaves {'them' if len(unused) > 1 else 'it'} out."
            if left_out
            else 'it has no CUDA that works. Install it: pip install "mirror-jax[cuda12]", or '
            '"mirror-jax[cuda13]".'
        )
        return [f"JAX does not use {', '.join(unused)}: {why}"]
    if has_gpus and not listed:
        return [
            "JAX has GPUs that mirror.config cannot list, because NVIDIA's driver cannot be asked. "
            "Install what asks it: pip install nvidia-ml-py"
        ]
    return []


def _total(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else bytes_in_words(num_bytes)


def _taken(device: dict[str, Any]) -> str:
    if device["memory_limit"] is None:
        return "not counted" if device["device_type"] == "CPU" else "unknown"
    return f"{bytes_in_words(device['memory_current'])} of {_total(device['memory_limit'])}"
