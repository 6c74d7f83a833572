"""The physical devices of this machine, found without starting JAX's backend."""

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mirror._src.devices.names import PhysicalDevice

_logger = logging.getLogger("mirror")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = "/proc/driver/nvidia/version"
_DRIVER_OF_ROCM = "/dev/kfd"

CPU = PhysicalDevice("/physical_device:CPU:0", "CPU")


@dataclass(frozen=True)
class Gpu:
    """What the driver says of a GPU.

    Attributes:
        uuid: such as `"GPU-5a0f..."`, or `"MIG-..."` for a part that the driver has split off.
        name: the product's.
        compute_capability: major and minor; `None` where the driver does not say.
        memory_bytes: all its memory; 0 where the driver does not say, as where the CPU shares it.
    """

    uuid: str
    name: str
    compute_capability: tuple[int, int] | None
    memory_bytes: int


def physical_devices() -> tuple[PhysicalDevice, ...]:
    """The CPU, then the GPUs that CUDA will show this process, in the order in which it will."""
    gpus = range(len(gpus_of_process()))
    return (CPU, *(PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in gpus))


def gpus_of_process() -> tuple[Gpu, ...]:
    """What the driver says of the GPUs that `CUDA_VISIBLE_DEVICES` leaves, in its order."""
    return _visible(os.environ.get(_VISIBLE))


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The CPU and the GPUs of this machine. Does not start JAX's backend.

    GPUs are those that NVIDIA's driver shows for `CUDA_VISIBLE_DEVICES`, by index and by UUID;
    without a driver, or without the package `nvidia-ml-py`, there are none. One CPU is one device.

    Args:
        device_type: `"CPU"` or `"GPU"`, exactly; of any other there are none.

    >>> list_physical_devices("CPU")
    [PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')]
    """
    return of_type(physical_devices(), device_type)


def get_device_details(device: PhysicalDevice) -> dict[str, Any]:
    """What is known of a physical device.

    Returns:
        For a GPU `"device_name"` and, where the driver says it, `"compute_capability"`, a pair of
        ints; for the CPU nothing.

    Raises:
        ValueError: no physical device of this machine.

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
    """The index in the device's name: for a GPU, CUDA's."""
    return int(device.name.rpartition(":")[2])


def gpu_of(device: PhysicalDevice) -> Gpu:
    """What the driver says of a GPU."""
    return gpus_of_process()[ordinal(device)]


def may_have_gpus() -> bool:
    """Whether there may be GPUs that are not known of, because NVML cannot be asked."""
    with _nvml() as nvml:
        return nvml is None and any(map(os.path.exists, (_DRIVER, _DRIVER_OF_ROCM)))


def of_type(devices: Iterable[PhysicalDevice], wanted: object) -> list[PhysicalDevice]:
    """Those of one type, exactly; `None` means all."""
    return [device for device in devices if wanted is None or device.device_type == wanted]


def require_physical(device: object, device_type: str | None = None) -> PhysicalDevice:
    """The physical device that is meant by a `PhysicalDevice` or its name.

    Raises:
        ValueError: there is none, or it is not of this type.
    """
    for known in physical_devices() if isinstance(device, PhysicalDevice | str) else ():
        if device in (known, known.name) and device_type in (None, known.device_type):
            return known
    wanted = "" if device_type is None else f" of type {device_type}"
    names = ", ".join(known.name for known in physical_devices())
    raise ValueError(
        f"Unrecognized device: {device!r} is no physical device{wanted} of this machine, which has "
        f"{names}. Pass one of mirror.config.list_physical_devices()."
    )


def driver_version() -> str | None:
    """The NVIDIA driver's version, `None` where there is no driver."""
    with _nvml() as nvml:
        return None if nvml is None else nvml.nvmlSystemGetDriverVersion()


@functools.cache
def _visible(wanted: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows for a value of `CUDA_VISIBLE_DEVICES`; `None` means all.

    CUDA reads indices and (beginnings of) UUIDs up to the first that names no GPU, and shows none
    where one is named twice. It counts the fastest GPU first unless `CUDA_DEVICE_ORDER` is
    `PCI_BUS_ID`; the driver's own order, which is used here, is that of the bus. The two are the
    same where all GPUs are of one kind.
    """
    with _nvml() as nvml:
        if nvml is None:
            return ()
        every = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(int(nvml.nvmlDeviceGetCount()))]
        if wanted is None:
            return tuple(_describe(nvml, handle) for handle in every)
        chosen: list[Gpu] = []
        for entry in map(str.strip, wanted.split(",")):
            handle = _find(nvml, every, entry)
            if handle is None:
                break
            chosen.append(_describe(nvml, handle))
        twice = len({gpu.uuid for gpu in chosen}) < len(chosen)
        return () if twice else tuple(chosen)


def _find(nvml: Any, every: list[Any], entry: str) -> Any:
    """The GPU that an entry names, `None` where it names none."""
    if entry.isascii() and entry.isdigit():
        return every[int(entry)] if int(entry) < len(every) else None
    if entry.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(entry)
        except nvml.NVMLError:
            return None
    if not entry.startswith("GPU-"):
        return None
    matches = [h for h in every if nvml.nvmlDeviceGetUUID(h).startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _describe(nvml: Any, handle: Any) -> Gpu:
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = (int(major), int(minor))
    except nvml.NVMLError:  # old drivers, and parts of a split GPU
        capability = None
    try:
        num_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        num_bytes = 0
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    return Gpu(uuid, name, capability, num_bytes)


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, the driver's own library, while inside; `None` without a driver or `nvidia-ml-py`."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        _say_what_is_missing()
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
def _say_what_is_missing() -> None:
    """Warns, once, where there is a driver but no package to ask it with."""
    if os.path.exists(_DRIVER):
        _logger.warning(
            "There is an NVIDIA driver, but the package nvidia-ml-py is not installed, so "
            "mirror.config knows of no GPU. Install it: pip install nvidia-ml-py"
        )
