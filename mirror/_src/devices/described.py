"""GPUs of a description, for which XLA compiles on a machine without them.

JAX's CUDA plugin compiles for devices that do not exist, given the sizes and clock rates of a GPU.
It needs neither a GPU nor a driver, CUDA, cuDNN or NCCL. Programs for them cannot run.
"""

import functools
import importlib.resources
import tomllib
from typing import Any

import jax
from jax.experimental import topologies

from mirror._src.base.optional import version_of

_CUDA = ("12", "13")  # versions of CUDA for which JAX has plugins


# The description of a GPU in XLA's text format `GpuTargetConfigProto` (JAX 0.10.2, 0.12.0.1).
_TARGET_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {core_memory} threads_per_core_limit: {core_threads}
  core_count: {cores} fpus_per_core: {core_width}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth} l2_cache_size: {cache}
  clock_rate_ghz: {clock} device_memory_size: {memory} shared_memory_per_block_optin: {block_memory}
  cuda_compute_capability {{
    major: {compute_capability[0]} minor: {compute_capability[1]} {features}
  }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_vendor: "NVIDIA Corporation" device_address_bits: 64
  pcie_bandwidth: 34359738368 ecc_enabled: true name: "{name}"
  driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {links} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


@functools.cache
def gpu_models() -> dict[str, dict[str, Any]]:
    """Returns the properties of the GPUs that can be described, by their short names."""
    text = importlib.resources.files(__package__).joinpath("gpus.toml").read_text("utf-8")
    return tomllib.loads(text)


# Devices of no process. A strategy accepts only the devices of its process, on which it can place
# arrays; `backend.require_logical` accepts these as well, because JAX can compile for them.
_topologies: dict[jax.Device, tuple[jax.Device, ...]] = {}


class GpuCompilerError(ValueError):
    """Error for a GPU that is not described, or for which this machine cannot compile."""


def described_gpus(name: str, count: int, hosts: int = 1) -> tuple[jax.Device, ...]:
    """Returns GPUs that need not exist, for programs that are compiled only.

    Args:
        name: A key of `gpu_models`, in any case, with or without spaces and hyphens.
        count: Number of GPUs of each host.
        hosts: Number of hosts.

    Raises:
        GpuCompilerError: If the name is unknown, or JAX's CUDA plugin is missing or of another
            version than jaxlib.
    """
    key = name.lower().translate({ord(c): None for c in " -_"})
    if key not in gpu_models():
        raise GpuCompilerError(f"Unknown GPU {name!r}. Pass one of {', '.join(gpu_models())}.")
    _require_compiler()
    devices = _devices(key, count, hosts)
    _topologies.update(dict.fromkeys(devices, devices))
    return devices


@functools.cache
def _devices(key: str, count: int, hosts: int) -> tuple[jax.Device, ...]:
    config = _TARGET_CONFIG.format_map(gpu_models()[key])
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=config, topology=f"1x{hosts}x{count}"
    )
    return tuple(topology.devices)


def memory_of(device: jax.Device) -> int | None:
    """Returns the bytes of memory of one of `described_gpus`; `None` for other devices."""
    names = {model["name"]: model["memory"] for model in gpu_models().values()}
    return names.get(device.device_kind) if topology_of(device) else None


def topology_of(device: jax.Device) -> tuple[jax.Device, ...]:
    """Returns the devices that were described together with a device; () for other devices."""
    return _topologies.get(device, ())


def _require_compiler() -> None:
    """Rejects an environment without a CUDA plugin of jaxlib's version.

    Raises:
        GpuCompilerError: If the plugin is missing or has another version.
    """
    wanted = version_of("jaxlib")
    packages = [(f"jax-cuda{v}-pjrt", f"jax-cuda{v}-plugin") for v in _CUDA]
    installed = [{package: version_of(package) for package in pair} for pair in packages]
    if any(set(each.values()) == {wanted} for each in installed):
        return
    nearest = next((each for each in installed if any(each.values())), installed[0])
    found = " and ".join(f"{p} {v}" if v else f"no {p}" for p, v in nearest.items())
    fix = " ".join(f"{package}=={wanted}" for package in nearest)
    raise GpuCompilerError(
        f"XLA's GPU compiler needs {' and '.join(nearest)} of the version of jaxlib, "
        f"{wanted}, but this environment has {found}: pip install --no-deps {fix}"
    )
