"""Devices of JAX's backend and their logical names, and what has started the backend.

The only module that asks JAX for its devices, and therefore the only one that starts its backend,
which fixes the device configuration. JAX has no public API for whether it has started. But an
option that must be set before the start cannot be updated after it (JAX 0.10.2 to 0.12.0.1), and
the events that JAX records while it traces and compiles have the user's line on the stack.
`tests/devices/test_config.py` fails if either no longer holds.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator

import jax

from mirror._src.base.errors import InvalidDeviceError
from mirror._src.base.tracebacks import line_of_user
from mirror._src.devices import jax_options
from mirror._src.devices.described import topology_of
from mirror._src.devices.jax_options import GPU_PLATFORMS, PLATFORMS
from mirror._src.devices.names import DeviceSpec, LogicalDevice, PhysicalDevice
from mirror._src.devices.physical import CPU, in_capitals, list_physical_devices

_PROBE = "jax_cpu_get_local_topology_timeout_minutes"  # only clusters read it
_NO_COMPUTATION = "a call that computes nothing, such as jax.devices() or jax.device_put"
lock = threading.RLock()


def started() -> bool:
    """Whether JAX's backend has started. Does not start it."""
    with lock:
        value = jax.config.values[_PROBE]
        try:
            jax.config.update(_PROBE, value + 1)
        except RuntimeError:
            return True
        jax.config.update(_PROBE, value)
        return False


class _StartupListener:
    """Records which line of the user's code starts the backend.

    JAX records the first event of a program's first computation before the backend starts, and the
    next event after it. If both come from the same line, this line started the backend.
    """

    def __init__(self) -> None:
        self.is_registered = False
        self.cause = ""
        self._line_before = ""

    def __call__(self, event: str, duration_secs: float, **details: str | int) -> None:
        del event, duration_secs, details
        if self.cause:
            return
        line = line_of_user()
        if not started():
            self._line_before = line
        elif self._line_before == line:
            self.cause = f"JAX was initialized by {line}."
        else:
            after = self._line_before and f"after {self._line_before} and "
            self.cause = f"JAX was initialized {after}before {line}, by {_NO_COMPUTATION}."


_listener = _StartupListener()


def watch_startup() -> None:
    """Records from now on what starts the backend.

    Called by the first setter of `mirror.config` that changes something, not when `mirror` is
    imported: an import must not register listeners.
    """
    with lock:
        if not _listener.is_registered:
            jax.monitoring.register_event_duration_secs_listener(_listener)
            _listener.is_registered = True


def startup_cause(first_call: str = "mirror.config was first used") -> str:
    """Returns a sentence that says what started the backend.

    Args:
        first_call: What started it unless it had happened earlier.
    """
    if _listener.cause:
        return _listener.cause
    if _listener.is_registered:
        return f"JAX was initialized by {_NO_COMPUTATION}."
    return (
        f"JAX was initialized before {first_call}, for example by creating an array or by "
        "jax.devices()."
    )


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Context manager around code that may start the backend; records the user's line.

    Raises:
        ValueError: If memory growth or memory limits differ between GPUs.
    """
    with lock:
        was_started = started()
        if not was_started:
            jax_options.require_consistent()
        try:
            yield
        finally:
            if not was_started and not _listener.cause and started():
                _listener.cause = f"JAX was initialized by {line_of_user()}."


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """Returns the devices that computations can run on.

    Starts JAX's backend, after which the configuration can no longer be changed.

    Args:
        device_type: `"CPU"`, `"GPU"`, or another JAX platform, in capitals or not. An unknown type
            returns an empty list. None returns devices of all types.

    Raises:
        TypeError: If `device_type` is neither a string nor None.
        ValueError: If memory growth or memory limits differ between GPUs.

    >>> list_logical_devices("CPU")[0]
    LogicalDevice(name='/device:CPU:0', device_type='CPU')
    """
    device_type, default = in_capitals(device_type), default_devices()
    kinds = dict.fromkeys(["CPU", "GPU", *map(type_of, default)])
    return [
        LogicalDevice(str(DeviceSpec(kind, i)), kind)
        for kind in kinds
        if device_type in (None, kind)
        for i in range(len(devices_of_type(kind)))
    ]


def type_of(device: jax.Device) -> str:
    """Returns `"CPU"`, `"GPU"` (CUDA or ROCm), or another platform's name in capitals."""
    return "GPU" if device.platform in GPU_PLATFORMS else device.platform.upper()


def devices_of_type(device_type: str) -> tuple[jax.Device, ...]:
    """Returns the JAX device of each logical device of one type, or () without such a platform.

    Logical devices that share a GPU have the same JAX device.
    """
    with starting():
        try:
            devices = jax.local_devices(backend=device_type.lower())
        except RuntimeError:
            return ()
    return logical_partitions(devices, device_type)


def default_devices() -> tuple[jax.Device, ...]:
    """Returns all logical devices of JAX's default platform: accelerators if any, else CPUs.

    Hidden accelerators are ignored.

    Raises:
        InvalidDeviceError: If the backend fails to start, or all of its devices are hidden.
        ValueError: If memory growth or memory limits differ between GPUs.
    """
    with starting():
        try:
            devices = jax.local_devices()
        except (RuntimeError, AssertionError) as error:  # AssertionError: no device, and no text
            raise InvalidDeviceError(
                f"JAX failed to initialize: {str(error) or 'no device was found'}. "
                f"{PLATFORMS} selects the platforms that JAX tries; JAX_PLATFORMS=cpu always works."
            ) from error
    kind = type_of(devices[0])
    visible = logical_partitions(devices, kind) or devices_of_type("CPU")
    if not visible:
        raise InvalidDeviceError(
            f"No devices are available: mirror.config hides every {kind}, and {PLATFORMS} excludes "
            "the CPU. Add the CPU: JAX_PLATFORMS=cuda,cpu."
        )
    return visible


def logical_partitions(devices: Iterable[jax.Device], kind: str) -> tuple[jax.Device, ...]:
    """Returns the JAX device of each logical device, according to the configuration."""
    devices = tuple(devices)
    if kind == "CPU":
        return devices[: jax_options.num_partitions(CPU)]
    if kind != "GPU":
        return devices
    physical = _physical_gpus(len(devices))
    return tuple(d for d, p in zip(devices, physical, strict=True) for _ in range(_partitions(p)))


def physical_of(device: jax.Device) -> PhysicalDevice | None:
    """Returns the physical device of a JAX device, or None if the driver does not list it."""
    kind = type_of(device)
    if kind != "GPU":
        return CPU if kind == "CPU" else None
    gpus = jax.local_devices(backend="gpu")
    return _physical_gpus(len(gpus))[gpus.index(device)]


def _partitions(gpu: PhysicalDevice | None) -> int:
    """Returns the number of logical devices on one of JAX's GPUs; 0 if it is hidden."""
    if gpu is None:
        return int(jax_options.unknown_gpus_are_visible())
    return (jax_options.num_partitions(gpu) or 1) if gpu in jax_options.visible_gpus() else 0


def _physical_gpus(count: int) -> list[PhysicalDevice | None]:
    """Returns the physical device of each of JAX's GPUs; None for GPUs not listed by the driver."""
    listed = list_physical_devices("GPU")
    known: list[PhysicalDevice | None] = [
        listed[i] for i in jax_options.ordinals_of_backend() if i < len(listed)
    ]
    return [*known[:count], *([None] * (count - len(known)))]


def find_device(spec: DeviceSpec) -> jax.Device:
    """Returns the device with this name.

    Raises:
        ValueError: If the spec has no type or no index.
        InvalidDeviceError: If the device does not exist; the message lists the available devices.
    """
    if spec.device_type is None or spec.index is None:
        raise ValueError(
            f"The device name {str(spec)!r} does not identify a device. Add a type and an index, "
            "for example '/cpu:0'."
        )
    candidates = devices_of_type(spec.device_type)
    if spec.index < len(candidates):
        return candidates[spec.index]
    raise InvalidDeviceError(
        f"Unknown device {spec}. Available devices: {_available()}. "
        f"{_how_to_get(spec.device_type, spec.index, len(candidates))}"
    )


def _how_to_get(device_type: str, index: int, found: int) -> str:
    """Returns a sentence that says how to get a device that does not exist."""
    if device_type == "CPU":
        return (
            f"To get more host devices, call mirror.config.set_num_cpu_devices({index + 1}) before "
            "creating the first array."
        )
    if found:
        last = f"/{device_type.lower()}:{found - 1}"
        return f"The last {device_type} is {last!r}; mirror.MirroredStrategy() uses all of them."
    return (
        f"JAX found no {device_type}: `mirror doctor` shows why, and mirror.MirroredStrategy() "
        "uses the devices that JAX finds. For mirror.device, "
        "mirror.config.set_soft_device_placement(True) selects another device instead."
    )


def require_logical(device: jax.Device) -> jax.Device:
    """Returns the device if it is a visible device of this process, or exists only to compile for.

    Raises:
        InvalidDeviceError: If the device belongs to another process or is hidden.
    """
    if topology_of(device) or device in devices_of_type(type_of(device)):
        return device
    raise InvalidDeviceError(
        f"{device} is not available to this process: it belongs to another process, or "
        f"mirror.config hides it. Available devices: {_available()}."
    )


def logical_name(device: jax.Device) -> str:
    """Returns a name like `/device:GPU:1`; the index counts the process's devices of the type.

    The name of a device of another process starts with `/job:worker/replica:0/task:1`.
    """
    if device.process_index == jax.process_index():
        return str(spec_of(device))
    task = f"/job:worker/replica:0/task:{device.process_index}"
    return f"{task}{DeviceSpec(type_of(device), _index_in_process(device))}"


def devices_by_id(kind: str) -> dict[int, jax.Device]:
    """Returns the devices of one type of all processes."""
    return {device.id: device for device in jax.devices(kind.lower())}


def _index_in_process(device: jax.Device) -> int:
    everywhere = topology_of(device) or jax.devices(device.platform)
    devices = [d for d in everywhere if d.process_index == device.process_index]
    return devices.index(device)


def spec_of(device: jax.Device) -> DeviceSpec:
    """Returns the spec of a device; the first one if several logical devices share it."""
    kind = type_of(device)
    candidates = devices_of_type(kind)
    return DeviceSpec(kind, candidates.index(device) if device in candidates else device.id)


def names(devices: Iterable[jax.Device]) -> str:
    """Returns the logical names in parentheses, for messages and log lines."""
    return f"({', '.join(map(logical_name, devices))})"


def place(devices: Iterable[jax.Device]) -> str:
    """Returns `device /job:localhost/.../device:GPU:1` or `devices (...)`, for log lines."""
    devices = list(devices)
    if len(devices) == 1:
        return f"device {spec_of(devices[0]).full_name}"
    return f"devices {names(devices)}"


def _available() -> str:
    return f"({', '.join(device.name for device in list_logical_devices())})"
