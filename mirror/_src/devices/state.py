"""The device configuration as one value, and the JAX options that follow from it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mirror._src.base.errors import expected
from mirror._src.base.modules import set_module
from mirror._src.devices.host_devices import host_devices_of_flags
from mirror._src.devices.jax_options import (
    HOST_DEVICES,
    MEMORY_FRACTION,
    PLATFORMS,
    PREALLOCATE,
    VISIBLE_GPUS,
)
from mirror._src.devices.names import PhysicalDevice
from mirror._src.devices.physical import (
    CPU,
    gpu_of,
    list_physical_devices,
    ordinal,
    unlisted_platforms,
)

MIB = 2**20


@set_module("mirror.config")
@dataclass(frozen=True)
class LogicalDeviceConfiguration:
    """Configuration of a logical device, a partition of a physical device.

    Attributes:
        memory_limit: Memory limit in MiB, for GPUs only. None sets no limit. The limits of a GPU's
            partitions are added: XLA limits the memory of the process on the whole GPU.

    Raises:
        ValueError: If the limit is not a positive number.

    >>> LogicalDeviceConfiguration(memory_limit=1024)
    LogicalDeviceConfiguration(memory_limit=1024)
    """

    memory_limit: float | None = None

    def __post_init__(self) -> None:
        limit = self.memory_limit
        if limit is None:
            return
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < 1e12:
            what = "a positive number of MiB"
            raise ValueError(expected("memory_limit", limit, what, "For example: 1024."))


@dataclass(frozen=True)
class State:
    """The validated configuration, an immutable value.

    Attributes:
        visible_gpus: Visible GPUs in the driver's order, or None if not configured.
        logical: Logical devices of each physical device that was configured.
        growth: Whether memory growth is enabled, for each GPU that was configured.
    """

    visible_gpus: tuple[PhysicalDevice, ...] | None = None
    logical: Mapping[PhysicalDevice, tuple[LogicalDeviceConfiguration, ...]] = field(
        default_factory=dict
    )
    growth: Mapping[PhysicalDevice, bool] = field(default_factory=dict)


_state = State()


def current() -> State:
    """Returns the current configuration."""
    return _state


def change(**changes: object) -> None:
    """Changes the configuration, and sets the JAX options that follow from it.

    The option that JAX rejects after the start is set first, so that an error changes nothing.
    """
    global _state
    new = replace(_state, **changes)  # type: ignore[arg-type]
    visible, hosts = _visible(new), new.logical.get(CPU)
    if hosts is not None and (host_devices_of_flags() is None or HOST_DEVICES.value is not None):
        HOST_DEVICES.set(len(hosts))
    hides_some = 0 < len(visible) < len(list_physical_devices("GPU"))
    VISIBLE_GPUS.set(ids(visible) if hides_some and new.visible_gpus is not None else None)
    PLATFORMS.set("cpu" if new.visible_gpus == () else None)
    PREALLOCATE.set("false" if any(new.growth.get(gpu) for gpu in visible) else None)
    fractions = [f for gpu in visible if (f := _fraction(gpu, new)) is not None]
    MEMORY_FRACTION.set(f"{min(fractions):.17g}" if fractions else None)
    _state = new


def visible_gpus() -> tuple[PhysicalDevice, ...]:
    """Returns the GPUs that have, or will have, logical devices."""
    return _visible(_state)


def unknown_gpus_are_visible() -> bool:
    """Whether GPUs not listed by the driver have, or will have, logical devices."""
    return _state.visible_gpus != ()


def has_no_gpu_to_hide() -> bool:
    """Whether JAX will find no GPU in any case."""
    return not visible_gpus() and (not unknown_gpus_are_visible() or not unlisted_platforms())


def ordinals_of_backend() -> list[int]:
    """Returns the ordinals of the physical GPUs of JAX's backend, in its order."""
    set_by_mirror = VISIBLE_GPUS.value if VISIBLE_GPUS.of_user is None else None
    if set_by_mirror is not None:
        return [int(i) for i in set_by_mirror.split(",")]
    return ordinals_of_user(len(list_physical_devices("GPU")))


def ordinals_of_user(count: int) -> list[int]:
    """Returns the ordinals, out of `count`, that the user's `jax_cuda_visible_devices` selects."""
    of_user = VISIBLE_GPUS.of_user
    if of_user is None:
        return list(range(count))
    chosen = {int(entry) for entry in of_user.split(",") if entry.strip().isdecimal()}
    return sorted(i for i in chosen if i < count)


def num_partitions(device: PhysicalDevice) -> int | None:
    """Returns the number of logical devices on a physical device, or None if not configured."""
    partitions = _state.logical.get(device)
    return None if partitions is None else len(partitions)


def require_consistent() -> None:
    """Checks the settings that XLA applies to all GPUs alike.

    Raises:
        ValueError: If memory growth or memory limits differ between GPUs.
    """
    gpus = visible_gpus()
    growth = {gpu: _state.growth.get(gpu, False) for gpu in gpus}
    if len(set(growth.values())) > 1:
        raise ValueError(
            f"Memory growth cannot differ between GPU devices: {_format(growth)}. Set the same "
            "value on all: for gpu in mirror.config.list_physical_devices('GPU'): "
            "mirror.config.set_memory_growth(gpu, True)."
        )
    fractions = {gpu: _fraction(gpu, _state) for gpu in gpus}
    if len(set(fractions.values())) > 1:
        shares = {gpu: f"{fraction or 1:.1%}" for gpu, fraction in fractions.items()}
        raise ValueError(
            f"Memory limits cannot differ between GPU devices: {_format(shares)} of their memory. "
            "Set the same limit on all, or hide GPUs with mirror.config.set_visible_devices."
        )


def ids(gpus: Iterable[PhysicalDevice]) -> str:
    """Returns the CUDA ordinals of the GPUs, like `"0,2"`."""
    return ",".join(str(ordinal(gpu)) for gpu in gpus)


def _visible(state: State) -> tuple[PhysicalDevice, ...]:
    if state.visible_gpus is not None:
        return state.visible_gpus
    gpus = list_physical_devices("GPU")
    return tuple(gpus[i] for i in ordinals_of_user(len(gpus)))


def _fraction(gpu: PhysicalDevice, state: State) -> float | None:
    """Returns the fraction of the GPU's memory that its limits allow, or None without limits."""
    limits = [partition.memory_limit for partition in state.logical.get(gpu, ())]
    if not limits or limits[0] is None:
        return None
    return sum(filter(None, limits)) * MIB / gpu_of(gpu).memory_bytes


def _format(values: Mapping[PhysicalDevice, object]) -> str:
    return ", ".join(f"{gpu.name} {value}" for gpu, value in values.items())
