"""What is configured before the backend starts: visible devices, parts of devices, memory.

Each setter checks everything first, then applies the whole to the settings that JAX reads when it
starts (`state`, `jax_options`), so that it holds whoever starts the backend; then it is remembered.
What the user set by other means stays: a smaller set of devices is chosen from it, of other values
it wins and a warning says so (`user_settings`).
"""

import logging
from collections.abc import Iterable, Sequence

from mirror._src.devices import state
from mirror._src.devices.jax_options import MEMORY_FRACTION, PLATFORMS, PREALLOCATE, VISIBLE_GPUS
from mirror._src.devices.names import PhysicalDevice
from mirror._src.devices.physical import (
    CPU,
    gpu_of,
    list_physical_devices,
    of_type,
    require_physical,
)
from mirror._src.devices.startup import lock, started, startup_cause
from mirror._src.devices.state import MIB, LogicalDeviceConfiguration
from mirror._src.devices.user_settings import (
    host_devices_of_user,
    require_host_devices,
    require_within_users,
)
from mirror._src.utils.errors import InvalidDeviceError, describe

_logger = logging.getLogger("mirror")
_soft = False


def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The physical devices that have, or will have, logical devices.

    Args:
        device_type: `"CPU"` or `"GPU"`; `None` means both.

    >>> get_visible_devices("CPU")
    [PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')]
    """
    return of_type((CPU, *state.visible_gpus()), device_type)


def set_visible_devices(
    devices: PhysicalDevice | Iterable[PhysicalDevice], device_type: str | None = None
) -> None:
    """Chooses the physical devices that get logical devices; the others stay untouched.

    The order of the logical devices is that of the physical ones, whatever order is passed.

    Args:
        devices: of those that `list_physical_devices` lists; one alone need not be in a list.
        device_type: replace only those of this type. `None`: the visible devices become exactly
            these.

    Raises:
        TypeError: no list.
        ValueError: no physical device of this machine, or not of this type.
        InvalidDeviceError: the CPU would be hidden; JAX always has it.
        RuntimeError: the backend has started, or a setting of the user's hides what is asked for.

    >>> set_visible_devices(get_visible_devices("GPU"), "GPU")  # the same again is no error
    """
    if isinstance(devices, PhysicalDevice | str):
        devices = [devices]
    if not isinstance(devices, Iterable):
        raise TypeError(
            f"{describe(devices)} is no list of physical devices. Pass some of "
            "mirror.config.list_physical_devices(), or [] for none."
        )
    asked = list(devices)
    if device_type not in (None, "CPU", "GPU"):
        raise ValueError(f"device_type={device_type!r} is neither 'CPU' nor 'GPU'.")
    chosen = [require_physical(device, device_type) for device in asked]
    if device_type != "GPU" and CPU not in chosen:
        raise InvalidDeviceError(
            f"set_visible_devices({asked!r}, {device_type!r}) would hide the CPU, which JAX always "
            "has. To choose among the GPUs, say so: set_visible_devices(gpus[:1], 'GPU')."
        )
    if device_type == "CPU":
        return
    every = list_physical_devices("GPU")
    visible = tuple(gpu for gpu in every if gpu in chosen)
    with lock:
        if visible == state.visible_gpus() and (visible or state.hidden_for_good()):
            return
        _require_not_started("Visible devices")
        require_within_users(every, visible)
        state.change(visible_gpus=visible)


def get_logical_device_configuration(
    device: PhysicalDevice,
) -> list[LogicalDeviceConfiguration] | None:
    """How a physical device is split: what was set for it, `None` if nothing was.

    Raises:
        ValueError: no physical device of this machine.

    >>> (cpu,) = list_physical_devices("CPU")
    >>> parts = get_logical_device_configuration(cpu)
    """
    configured = state.current().logical.get(require_physical(device))
    return None if configured is None else list(configured)


def set_logical_device_configuration(
    device: PhysicalDevice, logical_devices: Sequence[LogicalDeviceConfiguration]
) -> None:
    """Splits a physical device into logical devices, one for each configuration.

    The CPU becomes that many host devices. Parts of one GPU share it: XLA cannot split it, so they
    are several replicas on it, and the memory of the process is limited to the sum of the limits.
    XLA knows one limit for all GPUs, as a part of each one's memory.

    Args:
        device: of those that `list_physical_devices` lists.
        logical_devices: at least one; one alone sets a limit and splits nothing.

    Raises:
        ValueError: no physical device of this machine; no configurations; a limit for the CPU, for
            some parts only or beyond the GPU's memory; memory growth is set for the GPU.
        TypeError: something that is no `LogicalDeviceConfiguration`.
        RuntimeError: the backend has started, or a setting of the user's allows fewer host devices.

    >>> (cpu,) = list_physical_devices("CPU")
    >>> set_logical_device_configuration(cpu, [LogicalDeviceConfiguration()] * 3)  # too late
    Traceback (most recent call last):
        ...
    RuntimeError: Virtual devices cannot be modified after being initialized: JAX's backend has ...
    """
    device = require_physical(device)
    parts = tuple(logical_devices) if isinstance(logical_devices, Iterable) else (None,)
    for part in parts:
        if not isinstance(part, LogicalDeviceConfiguration):
            raise TypeError(
                f"{describe(logical_devices)} is no list of configurations. Pass one "
                "mirror.config.LogicalDeviceConfiguration() for each logical device, in a list."
            )
    if not parts:
        raise ValueError(
            f"{device.name} cannot be split into no logical devices. Pass one "
            "mirror.config.LogicalDeviceConfiguration() for each."
        )
    limits = [part.memory_limit for part in parts]
    on_cpu = device.device_type == "CPU"
    with lock:
        logical = state.current().logical
        if logical.get(device) == parts:
            return
        (_require_no_limits if on_cpu else _require_limits)(device, limits)
        _require_not_started("Virtual devices")
        if on_cpu:
            require_host_devices(len(parts))
        elif any(limits) and MEMORY_FRACTION.of_user is not None:
            _logger.warning("%s is set, and wins over memory_limit.", MEMORY_FRACTION)
        state.change(logical={**logical, device: parts})


def get_memory_growth(device: PhysicalDevice) -> bool | None:
    """Whether memory is allocated as it is needed; `None` where nobody said so.

    Raises:
        ValueError: the CPU, or no physical device of this machine.

    >>> growing = [get_memory_growth(gpu) for gpu in list_physical_devices("GPU")]
    """
    device = _require_gpu(require_physical(device), "Memory growth")
    of_user = PREALLOCATE.of_user
    if of_user is not None:
        return _grows(of_user)
    return state.current().growth.get(device)


def set_memory_growth(device: PhysicalDevice, enable: bool) -> None:
    """Allocates a GPU's memory as it is needed, instead of most of it when the backend starts.

    XLA knows one way for all GPUs, so it must be set alike on all that are visible.

    Args:
        device: a GPU, of those that `list_physical_devices` lists.
        enable: whether memory grows.

    Raises:
        ValueError: the CPU, a device that is split or limited, or no physical device of this
            machine. Where it differs between GPUs, `list_logical_devices` and strategies raise.
        TypeError: `enable` is no bool.
        RuntimeError: the backend has started.

    >>> for device in list_physical_devices("CPU"):
    ...     set_memory_growth(device, True)
    Traceback (most recent call last):
        ...
    ValueError: Memory growth cannot be set on /physical_device:CPU:0, nor asked of it: ...
    """
    device = _require_gpu(require_physical(device), "Memory growth")
    _require_bool("enable", enable)
    with lock:
        configured = state.current()
        if device in configured.logical:
            raise ValueError(
                f"Memory growth cannot be set on {device.name}, which has logical devices "
                "configured. Set one of the two: growth, or parts and limits."
            )
        of_user = PREALLOCATE.of_user
        if of_user is not None and _grows(of_user) != enable:
            _logger.warning("%s is set, and wins over set_memory_growth(%s).", PREALLOCATE, enable)
        if of_user is not None or configured.growth.get(device) == enable:
            return
        _require_not_started("Physical devices")
        state.change(growth={**configured.growth, device: enable})


def get_soft_device_placement() -> bool:
    """Whether `mirror.device` falls back to a device that exists; off by default.

    >>> get_soft_device_placement()
    False
    """
    return _soft


def set_soft_device_placement(enabled: bool) -> None:
    """Lets `mirror.device` fall back where there is no such device, with a line in the log.

    It may be set at any time, and holds for all threads. Strategies never fall back: a replica
    that is not there is an error.

    Raises:
        TypeError: no bool.

    >>> set_soft_device_placement(True)
    >>> with mirror.device("/cpu:99"):
    ...     print(jnp.ones(2).devices())
    {CpuDevice(id=0)}
    >>> set_soft_device_placement(False)
    """
    global _soft
    _require_bool("enabled", enabled)
    _soft = enabled


def in_words() -> list[tuple[str, str, str]]:
    """What is configured, as rows of setting, value and why."""
    parts, forced = state.num_parts(CPU), host_devices_of_user()
    if parts is not None and (forced is None or parts <= forced[0]):
        hosts = (str(parts), "set by mirror.config")
    elif forced is not None:
        hosts = (str(forced[0]), f"{forced[1]}, set by you")
    else:
        hosts = ("1", "default")
    chosen = state.current().visible_gpus is not None
    growth = "default" if PREALLOCATE.value is None else str(_grows(PREALLOCATE.value))
    return [
        ("host devices", *hosts),
        ("platforms", str(PLATFORMS.value or "all"), PLATFORMS.source),
        (
            "visible GPUs",
            state.ids(state.visible_gpus()) or "none",
            "set by mirror.config" if chosen else VISIBLE_GPUS.source,
        ),
        ("memory growth", growth, PREALLOCATE.source),
        ("memory fraction", str(MEMORY_FRACTION.value or "default"), MEMORY_FRACTION.source),
        ("soft placement", str(_soft), "set by mirror.config" if _soft else "default"),
    ]


def _require_no_limits(device: PhysicalDevice, limits: Sequence[float | None]) -> None:
    if any(limit is not None for limit in limits):
        raise ValueError(
            f"memory_limit={limits} on {device.name}: XLA cannot limit the memory of the CPU. "
            "Leave memory_limit out."
        )


def _require_limits(gpu: PhysicalDevice, limits: Sequence[float | None]) -> None:
    given = [limit for limit in limits if limit is not None]
    if given and len(given) < len(limits):
        raise ValueError(
            f"memory_limit={limits} on {gpu.name}: XLA limits the sum. Set the limit of every "
            "part, or of none."
        )
    total = gpu_of(gpu).memory_bytes
    if given and not total:
        raise ValueError(
            f"memory_limit={given} MiB on {gpu.name}: the driver does not say how much memory it "
            "has, and XLA limits a part of it. Set XLA_CLIENT_MEM_FRACTION=0.5, for instance."
        )
    if sum(given) * MIB > total:
        raise ValueError(
            f"memory_limit={given} MiB on {gpu.name} is {sum(given):g} MiB in all, more than the "
            f"{total / MIB:.0f} MiB it has. Ask for less."
        )
    if state.current().growth.get(gpu):
        raise ValueError(
            f"{gpu.name} cannot be split or limited, because memory growth is set on it. Set one "
            "of the two: set_memory_growth(gpu, False) takes it back."
        )


def _require_not_started(what: str) -> None:
    if started():
        raise RuntimeError(
            f"{what} cannot be modified after being initialized: {startup_cause()} Call "
            "mirror.config before that line, right after the imports; in a notebook, restart the "
            "kernel first."
        )


def _require_gpu(device: PhysicalDevice, what: str) -> PhysicalDevice:
    if device.device_type != "GPU":
        raise ValueError(
            f"{what} cannot be set on {device.name}, nor asked of it: only a GPU has it. Loop over "
            "mirror.config.list_physical_devices('GPU')."
        )
    return device


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={describe(value)} is neither True nor False. Pass one of them.")


def _grows(preallocate: str) -> bool:
    """What `XLA_PYTHON_CLIENT_PREALLOCATE` means, as jaxlib reads it."""
    return preallocate in ("false", "False", "0")
