"""Options that JAX reads when its backend starts, and the device configuration that sets them.

Values set by the user are never overwritten.
"""

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import jax

from mirror._src.base.compile_cache import DIRECTORY, LEAST_SECS
from mirror._src.base.errors import expected
from mirror._src.base.public_names import set_module
from mirror._src.devices.names import PhysicalDevice
from mirror._src.devices.physical import (
    CPU,
    gpu_of,
    list_physical_devices,
    ordinal,
    unlisted_platforms,
)


@final
class JaxOption:
    """A process-wide option, in `jax.config` or in the environment.

    Args:
        name: Name of the `jax.config` option or environment variable.
        aliases: Other environment variables with the same meaning.
        unset: Values of a `jax.config` option that mean that it is not set.
    """

    def __init__(self, name: str, *aliases: str, unset: tuple[Any, ...] = (None,)) -> None:
        self._name = name
        self._aliases = aliases
        self._unset = unset
        self._is_option = name.startswith("jax_")
        self._set_by_mirror: Any = None

    @property
    def value(self) -> Any:
        """The current value, or None if it is not set."""
        if not self._is_option:
            values = (os.environ.get(name) for name in (self._name, *self._aliases))
            return next(filter(None, values), None)
        value = jax.config.values[self._name]
        return None if value in self._unset else value

    @property
    def of_user(self) -> Any:
        """The value that the user set, or None if mirror may set it."""
        return None if self.value == self._set_by_mirror else self.value

    @property
    def source(self) -> str:
        """A description of where the value comes from."""
        if self.value is None:
            return "default"
        return "set by mirror.config" if self.of_user is None else f"{self}, set by you"

    def set(self, value: Any) -> None:
        """Sets the value, or restores the default with None. Keeps a value set by the user."""
        if self.of_user is not None or value == self.value:
            return
        if self._is_option:
            jax.config.update(self._name, self._unset[0] if value is None else value)
        elif value is None:
            os.environ.pop(self._name, None)
        else:
            os.environ[self._name] = value
        self._set_by_mirror = value

    def __str__(self) -> str:
        """Returns the setting, like `XLA_CLIENT_MEM_FRACTION=0.5` or `jax_platforms='cpu'`."""
        if self._is_option:
            return f"{self._name}={self.value!r}"
        names = [name for name in (self._name, *self._aliases) if os.environ.get(name)]
        return f"{names[0] if names else self._name}={self.value}"


GPU_PLATFORMS = ("gpu", "cuda", "rocm")  # JAX's names


def names_gpus(platforms: str) -> bool:
    """Whether a value of `PLATFORMS` includes GPUs."""
    return not set(GPU_PLATFORMS).isdisjoint(platforms.split(","))


HOST_DEVICES = JaxOption("jax_num_cpu_devices", unset=(-1,))
VISIBLE_GPUS = JaxOption("jax_cuda_visible_devices", unset=("all",))
PLATFORMS = JaxOption("jax_platforms", unset=(None, ""))
HOST_THREADS = JaxOption("PJRT_NPROC")
PREALLOCATE = JaxOption("XLA_PYTHON_CLIENT_PREALLOCATE")
CACHE_DIRECTORY = JaxOption(DIRECTORY, unset=(None, ""))
CACHE_LEAST_SECS = JaxOption(LEAST_SECS, unset=(1.0,))
MEMORY_FRACTION = JaxOption("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


_NUMERIC = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


def numeric_options() -> dict[str, Any]:
    """Returns the options that change numbers, as they are in this thread."""
    return {name: getattr(jax.config, name) for name in _NUMERIC}


HOST_DEVICES_FLAG = "--xla_force_host_platform_device_count"


def host_devices_of_flags() -> int | None:
    """Returns the number of host devices in `XLA_FLAGS`; as in XLA, the last flag counts."""
    counts = re.findall(rf"{HOST_DEVICES_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else None


def fixed_host_devices() -> tuple[int, str] | None:
    """Returns the number of host devices and the setting that fixes it, or None.

    The option of JAX takes precedence over the flag of XLA.
    """
    count = HOST_DEVICES.value
    if count is not None:
        is_environment = os.environ.get("JAX_NUM_CPU_DEVICES") == str(count)
        return count, f"JAX_NUM_CPU_DEVICES={count}" if is_environment else str(HOST_DEVICES)
    count = host_devices_of_flags()
    return None if count is None else (count, f"XLA_FLAGS={HOST_DEVICES_FLAG}={count}")


def force_host_devices(count: int) -> str | None:
    """Creates host devices, unless their number is fixed.

    Call it before JAX's backend starts, because the number of host devices cannot change
    afterwards. Only a started backend knows whether there are GPUs, so host devices are created on
    machines with GPUs too, where the GPUs remain the default devices.

    Returns:
        What fixes their number, or None if `count` host devices were created.
    """
    fixed = fixed_host_devices()
    if fixed is not None:
        return fixed[1]
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return "a JAX backend that was already running"
    return None


def describe_conflict(count: int, fixed_count: int, fixed_by: str, fix: str) -> str:
    """Returns the message for a number of host devices that contradicts the fixed number."""
    return (
        f"Cannot create {count} host devices: {fixed_by} takes precedence and sets {fixed_count}. "
        f"Unset it, or {fix}."
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


_logger = logging.getLogger("mirror")


def require_within_users(gpus: Sequence[PhysicalDevice], visible: Sequence[PhysicalDevice]) -> None:
    """Checks the visible GPUs against the user's own choice of GPUs and platforms.

    Raises:
        RuntimeError: If the user's choice excludes a GPU in `visible`.
    """
    allowed = [gpus[i] for i in ordinals_of_user(len(gpus))]
    hidden = [gpu.name for gpu in visible if gpu not in allowed]
    if hidden:
        raise RuntimeError(
            f"{', '.join(hidden)} cannot be made visible: {VISIBLE_GPUS} takes precedence. Unset "
            f"it, or choose among {', '.join(gpu.name for gpu in allowed) or 'no GPUs'}."
        )
    platforms = PLATFORMS.of_user
    allows_gpus = platforms is None or names_gpus(platforms)
    if visible and not allows_gpus:
        _logger.warning("%s takes precedence: JAX uses no GPU.", PLATFORMS)
    elif visible and len(visible) < len(allowed) < len(gpus):
        _logger.warning(
            "%s takes precedence: JAX uses these GPUs; mirror uses %s of them.",
            VISIBLE_GPUS,
            ", ".join(gpu.name for gpu in visible),
        )
    elif not visible and platforms is not None and allows_gpus:
        _logger.warning("%s takes precedence: JAX uses GPUs; mirror uses none.", PLATFORMS)


def require_host_devices(count: int) -> None:
    """Checks that the user's own number of host devices is at least `count`.

    Raises:
        RuntimeError: If the user has set fewer.
    """
    fixed = host_devices_of_user()
    if fixed is None:
        return
    fixed_count, fixed_by = fixed
    if fixed_count < count:
        fix = f"split the CPU into {fixed_count}"
        raise RuntimeError(describe_conflict(count, fixed_count, fixed_by, fix))
    if fixed_count > count:
        _logger.warning(
            "%s takes precedence: JAX has %d host devices; mirror uses the first %d.",
            fixed_by,
            fixed_count,
            count,
        )


def host_devices_of_user() -> tuple[int, str] | None:
    """Returns the number of host devices that the user set, and the setting; None if not set."""
    is_set_by_mirror = HOST_DEVICES.value is not None and HOST_DEVICES.of_user is None
    return None if is_set_by_mirror else fixed_host_devices()
