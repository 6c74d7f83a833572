"""What is configured before the backend starts: visible devices, parts of devices, memory.

Each setter checks everything first, then applies the whole to the settings that JAX reads when it
starts (`knobs`), so that it holds whoever starts the backend; then it is remembered. What the user
set by other means stays: a smaller set of devices is chosen from it, of other values it wins and a
warning says so.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mirror._errors import InvalidDeviceError, describe
from mirror.devices.knobs import (
    HOST_DEVICES,
    MEMORY_FRACTION,
    PLATFORMS,
    PREALLOCATE,
    VISIBLE_GPUS,
)
from mirror.devices.physical import (
    CPU,
    gpu_of,
    list_physical_devices,
    of_type,
    ordinal,
    require_physical,
)
from mirror.devices.spec import PhysicalDevice
from mirror.devices.start import culprit, forced_host_devices, lock, started

_logger = logging.getLogger("mirror")
_MIB = 2**20


@dataclass(frozen=True)
class LogicalDeviceConfiguration:
    """One part of a physical device that is split into several logical devices.

    Attributes:
        memory_limit: in MiB, for a part of a GPU; `None` sets no limit. The limits of the parts are
            added up: XLA limits the memory of the process on the whole GPU.

    Raises:
        ValueError: the limit is not a positive number.
    """

    memory_limit: float | None = None

    def __post_init__(self) -> None:
        limit = self.memory_limit
        if limit is None:
            return
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < 1e12:
            raise ValueError(
                f"memory_limit={limit!r} is no positive number of MiB. Pass e.g. 1024."
            )


Configurations = tuple[LogicalDeviceConfiguration, ...]


@dataclass(frozen=True)
class _State:
    """What was configured, checked; replaced as a whole."""

    visible_gpus: tuple[PhysicalDevice, ...] | None = None
    logical: Mapping[PhysicalDevice, Configurations] = field(default_factory=dict)
    growth: Mapping[PhysicalDevice, bool] = field(default_factory=dict)


_state = _State()
_soft = False


def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The physical devices that have, or will have, logical devices.

    Args:
        device_type: `"CPU"` or `"GPU"`; `None` means both.
    """
    return of_type((CPU, *visible_gpus()), device_type)


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
        ValueError: no physical device of this machine, or not of this type.
        InvalidDeviceError: the CPU would be hidden; JAX always has it.
        RuntimeError: the backend has started, or a setting of the user's hides what is asked for.
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
        if visible == visible_gpus():
            return
        _require_not_started("Visible devices")
        _require_within_users(every, visible)
        _apply(replace(_state, visible_gpus=visible))


def get_logical_device_configuration(
    device: PhysicalDevice,
) -> list[LogicalDeviceConfiguration] | None:
    """How a physical device is split: what was set for it, `None` if nothing was.

    Raises:
        ValueError: no physical device of this machine.
    """
    configured = _state.logical.get(require_physical(device))
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
    with lock:
        if _state.logical.get(device) == parts:
            return
        if device.device_type == "CPU":
            if any(limit is not None for limit in limits):
                raise ValueError(
                    f"memory_limit={limits} on {device.name}: XLA cannot limit the memory of the "
                    "CPU. Leave memory_limit out."
                )
        else:
            _require_limits(device, limits)
        _require_not_started("Virtual devices")
        if device.device_type == "CPU":
            _require_host_devices(len(parts))
        elif any(limits) and MEMORY_FRACTION.of_user is not None:
            _logger.warning("%s is set, and wins over memory_limit.", MEMORY_FRACTION)
        _apply(replace(_state, logical={**_state.logical, device: parts}))


def get_memory_growth(device: PhysicalDevice) -> bool | None:
    """Whether memory is allocated as it is needed; `None` where nobody said so.

    Raises:
        ValueError: the CPU, or no physical device of this machine.
    """
    device = _require_gpu(require_physical(device), "Memory growth")
    of_user = PREALLOCATE.of_user
    if of_user is not None:
        return _grows(of_user)
    return _state.growth.get(device)


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
    """
    device = _require_gpu(require_physical(device), "Memory growth")
    _require_bool("enable", enable)
    with lock:
        if device in _state.logical:
            raise ValueError(
                f"Memory growth cannot be set on {device.name}, which has logical devices "
                "configured: their memory limits say how much it may take."
            )
        of_user = PREALLOCATE.of_user
        if of_user is not None and _grows(of_user) != enable:
            _logger.warning("%s is set, and wins over set_memory_growth(%s).", PREALLOCATE, enable)
        if of_user is not None or _state.growth.get(device) == enable:
            return
        _require_not_started("Physical devices")
        _apply(replace(_state, growth={**_state.growth, device: enable}))


def get_soft_device_placement() -> bool:
    """Whether `mirror.device` falls back to a device that exists; off by default."""
    return _soft


def set_soft_device_placement(enabled: bool) -> None:
    """Lets `mirror.device` fall back where there is no such device, with a line in the log.

    It may be set at any time, and holds for all threads. Strategies never fall back: a replica
    that is not there is an error.

    Raises:
        TypeError: no bool.
    """
    global _soft
    _require_bool("enabled", enabled)
    _soft = enabled


def visible_gpus() -> tuple[PhysicalDevice, ...]:
    """The GPUs that have, or will have, logical devices."""
    every = list_physical_devices("GPU")
    if _state.visible_gpus is not None:
        return _state.visible_gpus
    return tuple(every[i] for i in _ordinals_of_user(len(every)))


def ordinals_of_backend() -> list[int]:
    """Which of the physical GPUs JAX's backend has, in its order."""
    every = list_physical_devices("GPU")
    ours = VISIBLE_GPUS.value if VISIBLE_GPUS.of_user is None else None
    if ours is not None:
        return [int(i) for i in ours.split(",")]
    return _ordinals_of_user(len(every))


def num_parts(device: PhysicalDevice) -> int | None:
    """Into how many logical devices a physical one is split; `None` where nobody said."""
    parts = _state.logical.get(device)
    return None if parts is None else len(parts)


def require_consistent() -> None:
    """Refuses settings that XLA knows only for all GPUs, where they differ between them.

    Raises:
        ValueError: memory growth or limits differ.
    """
    gpus = visible_gpus()
    growth = {gpu: _state.growth.get(gpu, False) for gpu in gpus}
    if len(set(growth.values())) > 1:
        raise ValueError(
            f"Memory growth cannot differ between GPU devices: {_listed(growth)}. Set it alike on "
            "all: for gpu in mirror.config.list_physical_devices('GPU'): "
            "mirror.config.set_memory_growth(gpu, True)."
        )
    fractions = {gpu: _fraction(gpu, _state) for gpu in gpus}
    if len(set(fractions.values())) > 1:
        raise ValueError(
            f"Memory limits cannot differ between GPU devices: {_listed(fractions)} of their "
            "memory. Limit all of them alike, or hide the others with set_visible_devices."
        )


def in_words() -> list[tuple[str, str, str]]:
    """What is configured, as rows of setting, value and why."""
    flags = forced_host_devices()
    cpu_parts = num_parts(CPU)
    if cpu_parts is not None:
        hosts = (str(cpu_parts), "set by mirror.config")
    elif HOST_DEVICES.value is not None:
        hosts = (str(HOST_DEVICES.value), HOST_DEVICES.source)
    elif flags is not None:
        hosts = (str(flags), f"XLA_FLAGS=--xla_force_host_platform_device_count={flags}")
    else:
        hosts = ("1", "default")
    growth = "default" if PREALLOCATE.value is None else str(_grows(PREALLOCATE.value))
    return [
        ("host devices", *hosts),
        ("platforms", str(PLATFORMS.value or "all"), PLATFORMS.source),
        ("visible GPUs", _ids(visible_gpus()) or "none", _why_visible()),
        ("memory growth", growth, PREALLOCATE.source),
        ("memory fraction", str(MEMORY_FRACTION.value or "default"), MEMORY_FRACTION.source),
        ("soft placement", str(_soft), "set by mirror.config" if _soft else "default"),
    ]


def _apply(new: _State) -> None:
    """Sets the knobs to what the new state means, and remembers it.

    The option that JAX itself refuses after the start comes first: then nothing is half applied.
    """
    global _state
    every = list_physical_devices("GPU")
    parts, visible = new.logical.get(CPU), new.visible_gpus
    if parts is not None and forced_host_devices() is None:
        HOST_DEVICES.set(len(parts))
    VISIBLE_GPUS.set(_ids(visible) if visible and len(visible) < len(every) else None)
    PLATFORMS.set("cpu" if visible == () else None)
    grows = any(new.growth.get(gpu) for gpu in (every if visible is None else visible))
    PREALLOCATE.set("false" if grows else None)
    fractions = [part for gpu in every if (part := _fraction(gpu, new)) is not None]
    MEMORY_FRACTION.set(f"{min(fractions):.17g}" if fractions else None)
    _state = new


def _fraction(gpu: PhysicalDevice, state: _State) -> float | None:
    """The part of the GPU's memory that its limits allow, if there are limits."""
    limits = [part.memory_limit for part in state.logical.get(gpu, ())]
    if not limits or limits[0] is None:
        return None
    return sum(filter(None, limits)) * _MIB / gpu_of(gpu).memory_bytes


def _require_limits(gpu: PhysicalDevice, limits: Sequence[float | None]) -> None:
    given = [limit for limit in limits if limit is not None]
    if given and len(given) < len(limits):
        raise ValueError(
            f"memory_limit={list(limits)} on {gpu.name}: XLA limits the sum. Set the limit of "
            "every part, or of none."
        )
    total = gpu_of(gpu).memory_bytes
    if sum(given) * _MIB > total:
        raise ValueError(
            f"memory_limit={given} MiB on {gpu.name} is {sum(given):g} MiB in all, more than the "
            f"{total / _MIB:.0f} MiB it has. Ask for less."
        )
    if _state.growth.get(gpu):
        raise ValueError(
            f"{gpu.name} cannot be split or limited, because memory growth is set on it. Set one "
            f"of the two: set_memory_growth(gpu, False) takes it back."
        )


def _require_not_started(what: str) -> None:
    if started():
        raise RuntimeError(
            f"{what} cannot be modified after being initialized: JAX's backend has started, and "
            f"the configuration is fixed. {culprit()} Move the call of mirror.config before it, "
            "right after the imports; in a notebook, restart the kernel first."
        )


def _require_within_users(
    every: Sequence[PhysicalDevice], visible: Sequence[PhysicalDevice]
) -> None:
    """Says what wins where the user has chosen GPUs by other means."""
    allowed = [every[i] for i in _ordinals_of_user(len(every))]
    hidden = [gpu.name for gpu in visible if gpu not in allowed]
    if hidden:
        raise RuntimeError(
            f"{VISIBLE_GPUS} is set, and leaves out {', '.join(hidden)}. Take it back, or choose "
            f"among {', '.join(gpu.name for gpu in allowed)}."
        )
    if len(allowed) < len(every) and len(visible) < len(allowed):
        _logger.warning(
            "%s is set, and wins: JAX has those GPUs; mirror uses %s of them.",
            VISIBLE_GPUS,
            ", ".join(gpu.name for gpu in visible) or "none",
        )
    elif PLATFORMS.of_user not in (None, "cpu") and not visible:
        _logger.warning("%s is set, and wins: JAX has GPUs; mirror uses none.", PLATFORMS)


def _require_host_devices(count: int) -> None:
    """Says what wins where the user has forced host devices by other means.

    Raises:
        RuntimeError: there are fewer than are asked for.
    """
    flags = forced_host_devices()
    of_user = HOST_DEVICES.of_user
    if of_user is None and flags is None:
        return
    forced = of_user if of_user is not None else flags
    assert forced is not None
    by = (
        str(HOST_DEVICES)
        if of_user is not None
        else f"XLA_FLAGS=--xla_force_host_platform_device_count={flags}"
    )
    if forced < count:
        raise RuntimeError(
            f"{by} is set, and wins: there are {forced} host devices, fewer than the {count} asked "
            f"for. Take it back, or split the CPU in {forced}."
        )
    if forced > count:
        _logger.warning(
            "%s is set, and wins: JAX has %d host devices; mirror uses the first %d.",
            by,
            forced,
            count,
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
        raise TypeError(f"{name}={describe(value)} is neither True nor False.")


def _grows(preallocate: str) -> bool:
    """What `XLA_PYTHON_CLIENT_PREALLOCATE` means, as jaxlib reads it."""
    return preallocate in ("false", "False", "0")


def _ordinals_of_user(count: int) -> list[int]:
    """Which of so many GPUs the user's own setting of `jax_cuda_visible_devices` leaves."""
    of_user = VISIBLE_GPUS.of_user
    if of_user is None:
        return list(range(count))
    chosen = {int(part) for part in of_user.split(",") if part.strip().isdigit()}
    return sorted(i for i in chosen if i < count)


def _why_visible() -> str:
    if _state.visible_gpus is not None:
        return "set by mirror.config"
    return VISIBLE_GPUS.source


def _ids(gpus: Iterable[PhysicalDevice]) -> str:
    return ",".join(str(ordinal(gpu)) for gpu in gpus)


def _listed(values: Mapping[PhysicalDevice, object]) -> str:
    return ", ".join(f"{gpu.name} {value}" for gpu, value in values.items())
