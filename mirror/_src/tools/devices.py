"""`mirror devices`: the devices, their settings, and the installed versions."""

import argparse
import json
import os
import platform
from collections.abc import Mapping
from typing import Any

from mirror._src.base.errors import bytes_in_words
from mirror._src.base.optional import install_command
from mirror._src.base.terminal import Table, wrap
from mirror._src.devices import backend, settings
from mirror._src.devices.jax_options import PLATFORMS, names_gpus
from mirror._src.devices.memory import memory_info
from mirror._src.devices.names import LogicalDevice, PhysicalDevice
from mirror._src.devices.physical import gpu_of, how_to_list, list_physical_devices
from mirror._src.devices.resolve import canonicalize_device
from mirror._src.inspection.placement_table import physical_name
from mirror._src.tools.doctor.environment import installed_versions
from mirror._src.tools.options import FAILED, report_error

_JAX_DEFAULTS = {"memory growth": "False", "memory fraction": "0.75"}
_CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        devices = inventory()
    except (RuntimeError, ValueError) as error:
        return report_error("devices", str(error), FAILED)
    print(json.dumps(devices, indent=2) if parsed.json else format_inventory(devices))
    return 0


def inventory() -> dict[str, Any]:
    """Returns the devices, settings and versions as values for JSON. Starts JAX's backend.

    Returns:
        `"physical"` and `"logical"`, lists of devices as dicts with memory in bytes;
        `"configuration"`, a list of dicts with setting, value and origin; `"versions"`, a dict;
        `"notes"`, a list of likely problems.
    """
    physical = [_physical(device) for device in list_physical_devices()]
    configuration = _configuration()
    logical = [_logical(device) for device in backend.list_logical_devices()]
    default = backend.default_devices()[0]
    lines = str(default.client.platform_version).split("\n")
    backend_version = ", ".join(filter(None, map(str.strip, lines)))
    return {
        "physical": physical,
        "logical": logical,
        "configuration": configuration,
        "versions": {**installed_versions(), "backend": backend_version},
        "notes": _notes(physical, logical, PLATFORMS.value),
    }


def tables(devices: Mapping[str, Any]) -> list[Table]:
    """Returns the tables of an inventory: physical devices, logical devices and settings."""
    physical = Table(
        ("physical device", "description", "memory", "visible"),
        (
            (d["name"], d["what"], _total(d["memory_bytes"]), "yes" if d["visible"] else "no")
            for d in devices["physical"]
        ),
    )
    logical = Table(
        ("logical device", "physical device", "memory used"),
        ((d["name"], d["physical"], _used(d)) for d in devices["logical"]),
    )
    configuration = Table(
        ("setting", "value", "origin"),
        ((c["setting"], c["value"], c["why"]) for c in devices["configuration"]),
    )
    return [physical, logical, configuration]


def format_inventory(devices: dict[str, Any]) -> str:
    """Returns the inventory as text for a terminal."""
    versions = Table(("package", "version"), list(devices["versions"].items()))
    notes = "\n".join(f"Note: {note}" for note in devices["notes"])
    parts = [*map(repr, tables(devices)), repr(versions), notes]
    return wrap("\n\n".join(filter(None, parts)))


def _physical(device: PhysicalDevice) -> dict[str, Any]:
    if device.device_type == "CPU":
        description = f"{platform.machine()}, {os.cpu_count()} cores"
        num_bytes: int | None = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        gpu = gpu_of(device)
        capability = ".".join(map(str, gpu.compute_capability or ()))
        description = f"{gpu.name}, compute capability {capability or 'unknown'}"
        num_bytes = gpu.memory_bytes or None
    return {
        "name": device.name,
        "device_type": device.device_type,
        "what": description,
        "memory_bytes": num_bytes,
        "visible": device in settings.get_visible_devices(),
    }


def _logical(device: LogicalDevice) -> dict[str, Any]:
    jax_device = canonicalize_device(device)
    memory = memory_info(jax_device.memory_stats()) or {}
    return {
        "name": device.name,
        "device_type": device.device_type,
        "physical": physical_name(jax_device),
        "memory_current": memory.get("current"),
        "memory_peak": memory.get("peak"),
        "memory_limit": memory.get("limit"),
    }


def _configuration() -> list[dict[str, str]]:
    rows = settings.in_words()
    if _CUDA_VISIBLE in os.environ:
        rows.append((_CUDA_VISIBLE, os.environ[_CUDA_VISIBLE] or "none", "set by you"))
    return [
        {
            "setting": name,
            "value": _JAX_DEFAULTS.get(name, value) if value == "default" else value,
            "why": origin,
        }
        for name, value, origin in rows
    ]


def _notes(
    physical: list[dict[str, Any]], logical: list[dict[str, Any]], platforms: str | None
) -> list[str]:
    gpus = [d for d in physical if d["device_type"] == "GPU"]
    visible_gpus = [d["name"] for d in gpus if d["visible"]]
    has_gpus = any(d["device_type"] == "GPU" for d in logical)
    if visible_gpus and not has_gpus:
        why = (
            f"JAX_PLATFORMS={platforms} excludes {'them' if len(visible_gpus) > 1 else 'it'}."
            if platforms and not names_gpus(platforms)
            else "no working CUDA installation was found. Install CUDA 13: "
            f"{install_command('cuda13')}. For drivers older than 580: {install_command('cuda12')}."
        )
        return [f"JAX does not use {', '.join(visible_gpus)}: {why}"]
    if has_gpus and not gpus:
        return [
            "JAX has GPUs that mirror.config cannot list, because the driver cannot be queried. "
            + how_to_list()
        ]
    return []


def _total(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else bytes_in_words(num_bytes)


def _used(device: dict[str, Any]) -> str:
    if device["memory_limit"] is None:
        return "not counted" if device["device_type"] == "CPU" else "unknown"
    return f"{bytes_in_words(device['memory_current'])} of {_total(device['memory_limit'])}"
