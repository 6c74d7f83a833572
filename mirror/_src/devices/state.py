"""What is configured, as one value, and what it means for the settings that JAX reads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mirror._src.devices.jax_options import (
    HOST_DEVICES,
    MEMORY_FRACTION,
    PLATFORMS,
    PREALLOCATE,
    VISIBLE_GPUS,
)
from mirror._src.devices.names import PhysicalDevice
from mirror._src.devices.physical import CPU, gpu_of, list_physical_devices, may_have_gpus, ordinal
from mirror._src.devices.startup import forced_host_devices
from mirror._src.utils.modules import set_module

MIB = 2**20


@set_module("mirror.config")
@dataclass(frozen=True)
class LogicalDeviceConfiguration:
    """One part of a physical device that is split into several logical devices.

    Attributes:
        memory_limit: in MiB, for a part of a GPU; `None` sets no limit. The limits of the parts are
            added up: XLA limits the memory of the process on the whole GPU.

    Raises:
        ValueError: the limit is not a positive number.

    >>> LogicalDeviceConfiguration(memory_limit=1024)
    LogicalDeviceConfiguration(memory_limit=1024)
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


@dataclass(frozen=True)
class State:
    """What was configured, checked; replaced as a whole.

    Attributes:
        visible_gpus: in the driver's order; `None` where nobody said.
        logical: the parts of each device that was split.
        growth: whether memory grows, of each GPU of which somebody said.
    """

    visible_gpus: tuple[PhysicalDevice, ...] | None = None
    logical: Mapping[PhysicalDevice, tuple[LogicalDeviceConfiguration, ...]] = field(
        default_factory=dict
    )
    growth: Mapping[PhysicalDevice, bool] = field(default_factory=dict)


_state = State()


def current() -> State:
    """What is configured now."""
    return _state


def change(**changes: object) -> None:
    """Sets the knobs to what the changed state means, and remembers it.

    The option that JAX itself refuses after the start comes first: then nothing is half applied.
    """
    global _state
    new = replace(_state, **changes)  # type: ignore[arg-type]
    visible, parts = _visible(new), new.logical.get(CPU)
    if parts is not None and (forced_host_devices() is None or HOST_DEVICES.value is not None):
        HOST_DEVICES.set(len(parts))
    fewer = 0 < len(visible) < len(list_physical_devices("GPU"))
    VISIBLE_GPUS.set(ids(visible) if fewer and new.visible_gpus is not None else None)
    PLATFORMS.set("cpu" if new.visible_gpus == () else None)
    PREALLOCATE.set("false" if any(new.growth.get(gpu) for gpu in visible) else None)
    fractions = [part for gpu in visible if (part := _fraction(gpu, new)) is not None]
    MEMORY_FRACTION.set(f"{min(fractions):.17g}" if fractions else None)
    _state = new


def visible_gpus() -> tuple[PhysicalDevice, ...]:
    """The GPUs that have, or will have, logical devices."""
    return _visible(_state)


def unknown_gpus_are_visible() -> bool:
    """Whether GPUs that the driver does not list have, or will have, logical devices."""
    return _state.visible_gpus != ()


def hidden_for_good() -> bool:
    """Whether JAX will find no GPU, so that there is nothing left to hide."""
    return not visible_gpus() and (not unknown_gpus_are_visible() or not may_have_gpus())


def ordinals_of_backend() -> list[int]:
    """Which of the physical GPUs JAX's backend has, in its order."""
    ours = VISIBLE_GPUS.value if VISIBLE_GPUS.of_user is None else None
    if ours is not None:
        return [int(i) for i in ours.split(",")]
    return ordinals_of_user(len(list_physical_devices("GPU")))


def ordinals_of_user(count: int) -> list[int]:
    """Which of so many GPUs the user's own setting of `jax_cuda_visible_devices` leaves."""
    of_user = VISIBLE_GPUS.of_user
    if of_user is None:
        return list(range(count))
    chosen = {int(part) for part in of_user.split(",") if part.strip().isdecimal()}
    return sorted(i for i in chosen if i < count)


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
        shares = {gpu: f"{part or 1:.1%}" for gpu, part in fractions.items()}
        raise ValueError(
            f"Memory limits cannot differ between GPU devices: {_listed(shares)} of their memory. "
            "Limit all of them alike, or hide the others with mirror.config.set_visible_devices."
        )


def ids(gpus: Iterable[PhysicalDevice]) -> str:
    """The GPUs as CUDA numbers them: `"0,2"`."""
    return ",".join(str(ordinal(gpu)) for gpu in gpus)


def _visible(state: State) -> tuple[PhysicalDevice, ...]:
    if state.visible_gpus is not None:
        return state.visible_gpus
    every = list_physical_devices("GPU")
    return tuple(every[i] for i in ordinals_of_user(len(every)))


def _fraction(gpu: PhysicalDevice, state: State) -> float | None:
    """The part of the GPU's memory that its limits allow, if there are limits."""
    limits = [part.memory_limit for part in state.logical.get(gpu, ())]
    if not limits or limits[0] is None:
        return None
    return sum(filter(None, limits)) * MIB / gpu_of(gpu).memory_bytes


def _listed(values: Mapping[PhysicalDevice, object]) -> str:
    return ", ".join(f"{gpu.name} {value}" for gpu, value in values.items())
