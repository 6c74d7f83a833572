"""Physical devices of this machine, listed without starting JAX's backend."""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mirror._src.devices.names import PhysicalDevice

_logger = logging.getLogger("mirror")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# JAX looks for the device files. gVisor and WSL2 have no file with the version of the driver.
_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/nvidiactl")
_GPU_IN_WSL = "/dev/dxg"  # of any vendor
_DRIVER_OF_ROCM = "/dev/kfd"

CPU = PhysicalDevice("/physical_device:CPU:0", "CPU")


@dataclass(frozen=True)
class Gpu:
    """A GPU as reported by the driver.

    Attributes:
        uuid: UUID, such as `"GPU-5a0f..."`, or `"MIG-..."` for a MIG partition.
        name: Product name.
        compute_capability: Major and minor version, or None if unknown.
        memory_bytes: Total memory; 0 if unknown, for example if the CPU shares it.
    """

    uuid: str
    name: str
    compute_capability: tuple[int, int] | None
    memory_bytes: int


def physical_devices() -> tuple[PhysicalDevice, ...]:
    """Returns the CPU, then the GPUs that CUDA exposes to this process, in CUDA's order."""
    gpus = range(len(gpus_of_process()))
    return (CPU, *(PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in gpus))


def gpus_of_process() -> tuple[Gpu, ...]:
    """Returns the GPUs that `CUDA_VISIBLE_DEVICES` selects, in its order."""
    return _visible(os.environ.get(_VISIBLE))


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Returns the CPU and the GPUs of this machine. Does not start JAX's backend.

    GPUs are listed through NVIDIA's driver and filtered by `CUDA_VISIBLE_DEVICES` (indices or
    UUIDs). Without a driver or the package `nvidia-ml-py`, only the CPU is listed.

    Args:
        device_type: `"CPU"` or `"GPU"`, in capitals or not. Any other type returns an empty list.
            None returns all devices.

    Raises:
        TypeError: If `device_type` is neither a string nor None.

    >>> list_physical_devices("CPU")
    [PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')]
    """
    return of_type(physical_devices(), device_type)


def in_capitals(device_type: str | None) -> str | None:
    """Returns the type of a device as its name has it.

    Raises:
        TypeError: If it is neither a string nor None.
    """
    if not isinstance(device_type, str | None):
        raise TypeError(f"`device_type` must be 'CPU', 'GPU' or None, got {device_type!r}.")
    return device_type and device_type.upper()


def get_device_details(device: PhysicalDevice) -> dict[str, Any]:
    """Returns details about a physical device.

    Returns:
        For a GPU, a dict with `"device_name"` and, if the driver reports it,
        `"compute_capability"`, a pair of ints. For the CPU, an empty dict.

    Raises:
        ValueError: If `device` is not a physical device of this machine.

    >>> names = [get_device_details(gpu)["device_name"] for gpu in list_physical_devices("GPU")]
    >>> get_device_details(list_physical_devices("CPU")[0])
    {}
    """
    device = require_physical(device)
    if device.device_type == "CPU":
        return {}
    gpu = gpu_of(device)
    details: dict[str, Any] = {"device_name": gpu.name}
    if gpu.compute_capability is not None:
        details["compute_capability"] = gpu.compute_capability
    return details


def ordinal(device: PhysicalDevice) -> int:
    """Returns the index in the device's name; for a GPU, the CUDA ordinal."""
    return int(device.name.rpartition(":")[2])


def gpu_of(device: PhysicalDevice) -> Gpu:
    """Returns what the driver reports about a GPU."""
    return gpus_of_process()[ordinal(device)]


def unlisted_platforms() -> list[str]:
    """Returns the platforms whose GPUs JAX may have, if NVML cannot list them."""
    drivers = {"cuda": _has_driver(), "rocm": os.path.exists(_DRIVER_OF_ROCM)}
    with _nvml() as nvml:
        is_listed = nvml is not None
    return [name for name, is_there in drivers.items() if is_there and not is_listed]


def _has_driver() -> bool:
    """Whether there is an NVIDIA driver; in WSL2, a GPU that JAX has the plugin for."""
    if any(map(os.path.exists, _DRIVERS)):
        return True
    if not os.path.exists(_GPU_IN_WSL):
        return False
    return any("cuda" in p.name for p in importlib.metadata.entry_points(group="jax_plugins"))


def how_to_list() -> str:
    """Returns the advice for GPUs that cannot be listed."""
    if not _has_driver() and os.path.exists(_DRIVER_OF_ROCM):
        return "Select AMD GPUs with HIP_VISIBLE_DEVICES. mirror does not list them."
    if importlib.util.find_spec("pynvml") is None:
        return "Install NVIDIA's Python bindings: pip install nvidia-ml-py"
    nvml, cause = importlib.import_module("pynvml"), ""
    try:
        nvml.nvmlInit()
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        cause = f" ({error})"
    return (
        f"NVIDIA's library libnvidia-ml cannot be loaded{cause}. In a container, set "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility when it starts."
    )


def of_type(devices: Iterable[PhysicalDevice], device_type: str | None) -> list[PhysicalDevice]:
    """Returns the devices of this type; None returns all."""
    device_type = in_capitals(device_type)
    return [d for d in devices if device_type is None or d.device_type == device_type]


def require_physical(device: object, device_type: str | None = None) -> PhysicalDevice:
    """Returns the physical device for a `PhysicalDevice` or a name.

    Raises:
        ValueError: If the device does not exist, or is of another type.
    """
    for known in physical_devices() if isinstance(device, PhysicalDevice | str) else ():
        if device in (known, known.name) and device_type in (None, known.device_type):
            return known
    required = "" if device_type is None else f" A {device_type} is required."
    names = ", ".join(known.name for known in physical_devices())
    raise ValueError(
        f"Unrecognized device: {device!r}.{required} This machine has {names}. Pass a device "
        "returned by mirror.config.list_physical_devices()."
    )


def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver, or None without a driver."""
    with _nvml() as nvml:
        return None if nvml is None else nvml.nvmlSystemGetDriverVersion()


@functools.cache
def _visible(selection: str | None) -> tuple[Gpu, ...]:
    """Returns the GPUs that CUDA exposes for a value of `CUDA_VISIBLE_DEVICES`; None means all.

    CUDA reads indices and UUIDs (or prefixes of UUIDs) up to the first invalid entry, and exposes
    nothing if an entry is repeated. It lists the fastest GPU first unless `CUDA_DEVICE_ORDER` is
    `PCI_BUS_ID`. NVML, used here, lists GPUs in bus order. Both orders are equal if all GPUs are of
    the same model.
    """
    with _nvml() as nvml:
        if nvml is None:
            _warn_missing_nvml()
            return ()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        if selection is None:
            return tuple(_describe(nvml, _partition(nvml, handle)) for handle in handles)
        found = (_find(nvml, handles, entry.strip()) for entry in selection.split(","))
        valid = itertools.takewhile(lambda handle: handle is not None, found)
        chosen = [_describe(nvml, handle) for handle in valid]
        has_repeats = len({gpu.uuid for gpu in chosen}) < len(chosen)
        return () if has_repeats else tuple(chosen)


def _find(nvml: Any, handles: list[Any], entry: str) -> Any:
    """Returns the handle of the GPU that an entry selects, or None if the entry is invalid."""
    if entry.isascii() and entry.isdigit():
        return _partition(nvml, handles[int(entry)]) if int(entry) < len(handles) else None
    if entry.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(entry)
        except nvml.NVMLError:
            return None
    if not entry.startswith("GPU-") or entry == "GPU-":  # CUDA 13 needs more than that
        return None
    matches = [h for h in handles if nvml.nvmlDeviceGetUUID(h).startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _partition(nvml: Any, handle: Any) -> Any:
    """Returns the handle of what CUDA uses of a GPU: in MIG mode, its first partition."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] == 0:
            return handle
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:  # GPUs and drivers without MIG
        return handle
    for i in range(count):  # there may be gaps
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
    return handle


def _describe(nvml: Any, handle: Any) -> Gpu:
    capability, num_bytes = None, 0
    with contextlib.suppress(nvml.NVMLError):  # old drivers, and MIG partitions
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = (int(major), int(minor))
    with contextlib.suppress(nvml.NVMLError):
        num_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    return Gpu(uuid, name, capability, num_bytes)


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Context manager that yields NVML, or None without a driver or `nvidia-ml-py`."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        yield None
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


@functools.cache
def _warn_missing_nvml() -> None:
    """Warns once if an NVIDIA driver is present but `nvidia-ml-py` is not installed."""
    if _has_driver() and importlib.util.find_spec("pynvml") is None:
        _logger.warning(
            "An NVIDIA driver was found, but mirror.config cannot list GPUs because the package "
            "nvidia-ml-py is not installed. Install it: pip install nvidia-ml-py"
        )
