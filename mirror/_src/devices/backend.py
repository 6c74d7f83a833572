"""The one place that asks JAX for its devices, and so the one place that starts its backend."""

from collections.abc import Iterable

import jax

from mirror._src.devices import state
from mirror._src.devices.jax_options import GPU_PLATFORMS, PLATFORMS
from mirror._src.devices.names import DeviceSpec, LogicalDevice, PhysicalDevice
from mirror._src.devices.physical import CPU, list_physical_devices
from mirror._src.devices.startup import started, starting
from mirror._src.utils.errors import InvalidDeviceError


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """What computations are placed on. Starts JAX's backend; after it the configuration is fixed.

    Args:
        device_type: `"CPU"`, `"GPU"` or another platform of JAX in capitals, exactly; of one that
            is not there, there are none.

    Raises:
        ValueError: memory growth or limits differ between GPUs.

    >>> list_logical_devices("CPU")[0]
    LogicalDevice(name='/device:CPU:0', device_type='CPU')
    """
    default = default_devices()
    kinds = dict.fromkeys(["CPU", "GPU", *map(type_of, default)])
    return [
        LogicalDevice(str(DeviceSpec(kind, i)), kind)
        for kind in kinds
        if device_type in (None, kind)
        for i in range(len(devices_of_type(kind)))
    ]


def type_of(device: jax.Device) -> str:
    """`"CPU"`, `"GPU"` (CUDA or ROCm), or another platform's name in capitals."""
    return "GPU" if device.platform in GPU_PLATFORMS else device.platform.upper()


def devices_of_type(wanted: str) -> tuple[jax.Device, ...]:
    """The JAX device of each logical device of one type; none where JAX has no such platform.

    Logical devices that are parts of one GPU have one JAX device between them.
    """
    with starting():
        _check_before_start()
        try:
            found = jax.local_devices(backend=wanted.lower())
        except RuntimeError:
            return ()
    return logical_parts(found, wanted)


def default_devices() -> tuple[jax.Device, ...]:
    """All logical devices of JAX's default platform: accelerators where there are any, else CPUs.

    Hidden accelerators do not count.

    Raises:
        InvalidDeviceError: the backend does not start, or all that it has is hidden.
        ValueError: memory growth or limits differ between GPUs.
    """
    with starting():
        _check_before_start()
        try:
            found = jax.local_devices()
        except (RuntimeError, AssertionError) as error:  # without a text where nothing is found
            raise InvalidDeviceError(
                f"JAX's backend does not start: {str(error) or 'there is no device'}. "
                f"{PLATFORMS} says where it may look; JAX_PLATFORMS=cpu always works."
            ) from error
    kind = type_of(found[0])
    visible = logical_parts(found, kind) or devices_of_type("CPU")
    if not visible:
        raise InvalidDeviceError(
            f"No devices are available in this process: mirror.config hides every {kind}, and "
            f"{PLATFORMS} leaves out the CPU. Add it: JAX_PLATFORMS=cuda,cpu."
        )
    return visible


def logical_parts(found: Iterable[jax.Device], kind: str) -> tuple[jax.Device, ...]:
    """The JAX device of each logical device, as they are configured."""
    found = tuple(found)
    if kind == "CPU":
        return found[: state.num_parts(CPU)]
    if kind != "GPU":
        return found
    physical = _physical_gpus(len(found))
    return tuple(d for d, p in zip(found, physical, strict=True) for _ in range(_parts(p)))


def physical_of(device: jax.Device) -> PhysicalDevice | None:
    """The physical device that a JAX device is on; `None` where the driver does not list it."""
    kind = type_of(device)
    if kind != "GPU":
        return CPU if kind == "CPU" else None
    found = jax.local_devices(backend="gpu")
    return _physical_gpus(len(found))[found.index(device)]


def _parts(gpu: PhysicalDevice | None) -> int:
    """How many logical devices are on one of JAX's GPUs; none where it is hidden."""
    if gpu is None:
        return int(state.unknown_gpus_are_visible())
    return (state.num_parts(gpu) or 1) if gpu in state.visible_gpus() else 0


def _physical_gpus(count: int) -> list[PhysicalDevice | None]:
    """The physical device of each of JAX's GPUs; `None` for those that the driver does not list."""
    every = list_physical_devices("GPU")
    known: list[PhysicalDevice | None] = [
        every[i] for i in state.ordinals_of_backend() if i < len(every)
    ]
    return [*known[:count], *([None] * (count - len(known)))]


def _check_before_start() -> None:
    if not started():
        state.require_consistent()


def find_device(spec: DeviceSpec) -> jax.Device:
    """The device of that name.

    Raises:
        ValueError: the spec leaves type or index open.
        InvalidDeviceError: there is none; the message lists those that there are.
    """
    if spec.device_type is None or spec.index is None:
        raise ValueError(
            f"The device name {str(spec)!r} leaves the device open. Say which, as in '/cpu:0'."
        )
    candidates = devices_of_type(spec.device_type)
    if spec.index < len(candidates):
        return candidates[spec.index]
    raise InvalidDeviceError(
        f"There is no device {spec}. The devices are {_listed()}. Name one of them; for more host "
        "devices, split the CPU with mirror.config.set_logical_device_configuration, or call "
        'jax.config.update("jax_num_cpu_devices", n), before the first array.'
    )


def require_logical(device: jax.Device) -> jax.Device:
    """The device itself, where it is one of this process that is visible.

    Raises:
        InvalidDeviceError: it is of another process, or hidden.
    """
    if device in devices_of_type(type_of(device)):
        return device
    raise InvalidDeviceError(
        f"{device} is no logical device of this process, which has {_listed()}: it is of another "
        "process, or mirror.config leaves it out. Name one of these."
    )


def logical_name(device: jax.Device) -> str:
    """`/device:GPU:1`: the device's type and its place among this process's of that type."""
    return str(spec_of(device))


def spec_of(device: jax.Device) -> DeviceSpec:
    """The name of a device; of several logical devices on it, the first one's."""
    kind = type_of(device)
    candidates = devices_of_type(kind)
    return DeviceSpec(kind, candidates.index(device) if device in candidates else device.id)


def names(devices: Iterable[jax.Device]) -> str:
    """The logical names, in parentheses, as they stand in log lines and messages."""
    return f"({', '.join(map(logical_name, devices))})"


def place(devices: Iterable[jax.Device]) -> str:
    """`device /job:localhost/.../device:GPU:1`, or `devices (...)`, as it stands in log lines."""
    devices = list(devices)
    if len(devices) == 1:
        return f"device {spec_of(devices[0]).full_name}"
    return f"devices {names(devices)}"


def _listed() -> str:
    return f"({', '.join(device.name for device in list_logical_devices())})"
