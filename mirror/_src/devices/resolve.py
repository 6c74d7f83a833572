"""Resolves device names to `jax.Device`s, and warns about GPUs that JAX does not use."""

import functools
import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import jax

from mirror._src.base.errors import InvalidDeviceError, counted, describe, expected
from mirror._src.devices.backend import (
    default_devices,
    find_device,
    names,
    require_logical,
    spec_of,
    type_of,
)
from mirror._src.devices.jax_options import PLATFORMS, names_gpus, visible_gpus
from mirror._src.devices.names import SPELLINGS, DeviceSpec, LogicalDevice, PhysicalDevice
from mirror._src.devices.physical import Gpu, gpu_of

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


_MODEL = (
    "A strategy does not wrap a model: the model is an argument of the step, "
    "mirror.MirroredStrategy().run(step, (model, batch)), or of mirror.Trainer."
)
DeviceLike: TypeAlias = str | LogicalDevice | jax.Device


def canonicalize_device(device: DeviceLike) -> jax.Device:
    """Returns the `jax.Device` for a name, a `LogicalDevice`, or a `jax.Device`.

    A name without an index means the first device of its type.

    Raises:
        TypeError: If `device` is of another type.
        ValueError: If `device` is a string that is not a device name.
        InvalidDeviceError: If the device does not exist or is hidden.
    """
    return _resolve(device)[1]


def canonicalize_replica_devices(
    devices: Iterable[DeviceLike] | int | None,
) -> tuple[jax.Device, ...]:
    """Returns the devices of the replicas, in replica order.

    None means all accelerators, or all CPUs on a machine without accelerators. A GPU that is split
    into several logical devices appears once for each of them. A number is for `first_devices`.

    Raises:
        TypeError: If `devices` is not a list, or an element is not a device.
        ValueError: If the list is empty, or a device is repeated.
        InvalidDeviceError: If a device does not exist.
    """
    if devices is None:
        chosen = default_devices()
        warn_about_gpus()
        return chosen
    if isinstance(devices, str | LogicalDevice | jax.Device):
        fix = f"Pass a list: MirroredStrategy([{_shown(devices)}])."
        kind = devices.strip("/").upper() if isinstance(devices, str) else ""
        if kind in ("CPU", "GPU", "TPU"):
            fix = (
                f"For all of them: MirroredStrategy(mirror.config.list_logical_devices({kind!r}))."
            )
        raise ValueError(f"`devices` must be a list, got {_shown(devices)}. {fix}")
    is_model = callable(devices) and not inspect.isroutine(devices)
    if is_model or not isinstance(devices, Iterable):
        example = "For example ['/gpu:0', '/gpu:1']; None selects all devices, and "
        example += "MirroredStrategy(4) the first four."
        fix = _MODEL if is_model else example
        raise TypeError(expected("devices", devices, "a list of devices", fix))
    requested = list(devices)
    try:
        resolved = [_resolve(device) for device in requested]
    except InvalidDeviceError as error:
        shown = ", ".join(map(_shown, requested))
        raise InvalidDeviceError(f"devices=[{shown}]: {error}") from None
    jax_devices = tuple(device for _, device in resolved)
    if not jax_devices:
        kind = type_of(default_devices()[0])
        raise ValueError(
            "`devices` must not be empty, got []. mirror.config.list_logical_devices('GPU') is "
            f"empty if JAX finds no GPU; here, it finds {kind}s. Pass None, or "
            "nothing, to use all of them: mirror.MirroredStrategy()."
        )
    if len({spec for spec, _ in resolved}) < len(resolved):
        raise ValueError(
            f"devices={requested!r} contains a device more than once: {names(jax_devices)}. List "
            "each device once."
        )
    return jax_devices


def _shown(device: DeviceLike) -> str:
    return str(device) if isinstance(device, jax.Device) else repr(device)


def _resolve(device: DeviceLike) -> tuple[DeviceSpec, jax.Device]:
    """Returns the logical device's spec and its JAX device."""
    if isinstance(device, jax.Device):
        return spec_of(require_logical(device)), device
    if not isinstance(device, str | LogicalDevice):
        hint = ""
        if isinstance(device, PhysicalDevice):
            hint = " Computations run on logical devices, not on physical devices."
        elif type(device) is int:
            hint = f" Name it: '/{type_of(default_devices()[0]).lower()}:{device}'."
        raise TypeError(
            f"Expected a device, got {describe(device)}.{hint} Pass one of "
            f"mirror.config.list_logical_devices(), a jax.Device, or a name such as {SPELLINGS}."
        )
    parsed = DeviceSpec.parse(device if isinstance(device, str) else device.name)
    spec = DeviceSpec(parsed.device_type, parsed.index or 0)
    return spec, find_device(spec)
