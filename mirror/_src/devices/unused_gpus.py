"""Warnings about GPUs that the driver lists and JAX uses otherwise, or not at all."""

import functools
import logging
from collections.abc import Sequence

import jax

from mirror._src.base.errors import counted
from mirror._src.devices.backend import default_devices, type_of
from mirror._src.devices.jax_options import PLATFORMS, names_gpus
from mirror._src.devices.physical import Gpu, gpu_of
from mirror._src.devices.state import visible_gpus

_logger = logging.getLogger("mirror")


@functools.cache
def warn_about_gpus() -> None:
    """Warns once per process if JAX does not use the GPUs that the driver lists."""
    platforms = PLATFORMS.value
    if platforms is not None and not names_gpus(platforms):
        return
    gpus = [gpu_of(gpu) for gpu in visible_gpus()]
    if not gpus:
        return
    default = default_devices()
    kind = type_of(default[0])
    # In a job, a process may use only some of the GPUs of its machine.
    if kind == "CPU" or (kind == "GPU" and jax.process_count() == 1):
        devices = [] if kind == "CPU" else list(dict.fromkeys(default))
        problem = problem_with(gpus, devices)
        if problem is not None:
            _logger.warning(problem)


def problem_with(gpus: Sequence[Gpu], devices: Sequence[jax.Device]) -> str | None:
    """Returns why JAX's GPUs are not those that the driver lists, or None if they are.

    Args:
        gpus: The visible GPUs, in the driver's order.
        devices: JAX's GPUs.
    """
    if not devices:
        return (
            f"The driver lists {counted(len(gpus), 'GPU')}, but JAX found none and uses the CPU. "
            "To see why, run: mirror doctor. To use the CPU without this warning, set "
            "JAX_PLATFORMS=cpu."
        )
    if len(devices) < len(gpus) and any(gpu.uuid.startswith("MIG-") for gpu in gpus):
        return (
            f"The driver lists {counted(len(gpus), 'GPU')}, but JAX found {len(devices)}: in MIG "
            "mode, CUDA shows one partition to a process. To use several GPUs, turn MIG mode off: "
            "nvidia-smi -mig 0"
        )
    # Only names of other GPUs count: CUDA could name the same model in another way.
    known = {gpu.name for gpu in gpus}
    for i, (gpu, device) in enumerate(zip(gpus, devices, strict=False)):
        if device.device_kind != gpu.name and device.device_kind in known:
            return (
                f"GPU {i} is {device.device_kind!r} for JAX, but {gpu.name!r} for mirror.config, "
                "because CUDA sorts GPUs by speed. Memory limits and visible devices may apply to "
                "other GPUs. Set CUDA_DEVICE_ORDER=PCI_BUS_ID before the program starts."
            )
    return None
