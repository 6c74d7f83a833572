"""Cross-device ops: who carries an exchange out, and how small leaves travel together."""

import abc
import enum
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirror._errors import describe
from mirror._types import Array, ArrayLike, PyTree
from mirror.devices.backend import logical_name, names, type_of
from mirror.devices.canonical import DeviceLike, canonicalize_device, canonicalize_replica_devices
from mirror.devices.replicas import ReplicaDevices, any_deleted, is_tracing, move, one_by_one
from mirror.devices.spec import DeviceSpec, LogicalDevice
from mirror.executors.launch import is_needed, launch
from mirror.parts import Parts
from mirror.program.axis import axis_name
from mirror.values import PerReplica, held_by, is_numeric, is_per_replica

_HOST_PACK_BYTES = 32 * 1024


class ReduceOp(enum.Enum):
    """How the replicas' values become one.

    >>> ReduceOp.canonicalize("mean")
    <ReduceOp.MEAN: 'mean'>
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"

    @classmethod
    def canonicalize(cls, op: "ReduceOp | str") -> "ReduceOp":
        """The op that is meant by an op or its name, in capitals or not.

        Raises:
            ValueError: a string that names no op.
            TypeError: neither a string nor a `ReduceOp`.
        """
        if isinstance(op, cls):
            return op
        known = ", ".join(repr(member.value) for member in cls)
        if not isinstance(op, str):
            raise TypeError(f"op={op!r} ({type(op).__name__}) is no reduction. Pass {known}.")
        try:
            return cls(op.lower())
        except ValueError:
            raise ValueError(f"op={op!r} is no reduction. Pass one of {known}.") from None


class LostValueError(RuntimeError):
    """A replica's value for an exchange cannot be read."""


class CrossDeviceOps(abc.ABC):
    """Carries out the exchanges of a step; `MirroredStrategy(cross_device_ops=...)` takes one.

    A subclass of your own, to compress what travels, say, defines `reduce_implementation`: it
    reduces on the host, in every step that `strategy.run` runs, in `strategy.reduce`, and by hand.

    >>> class InHalfPrecision(CrossDeviceOps):
    ...     def reduce_implementation(self, op, values):
    ...         halves = (value.astype("float16").astype(value.dtype) for value in values)
    ...         return super().reduce_implementation(op, halves)
    """

    pack_bytes: int | None = 0
    """Leaves of at most this many bytes travel together; `None`: whatever suits."""

    @property
    def device(self) -> jax.Device:
        """Where values are reduced: the host."""
        return canonicalize_device("/cpu:0")

    @abc.abstractmethod
    def reduce_implementation(
        self, op: ReduceOp, values: Iterator[np.ndarray]
    ) -> Array | np.ndarray:
        """Reduces the replicas' values of one exchange, once for all of them.

        Args:
            op: `SUM`, `MIN` or `MAX`; a mean is a sum that is divided afterwards.
            values: each replica's array, in replica order, all of one shape and dtype; read-only,
                and there as soon as the replica has computed it. Keep one total, not all of them.

        Returns:
            An array of the same shape and dtype, which nothing changes afterwards.
        """
        return _fold(op, values)

    @final
    def carry_out(
        self,
        op: ReduceOp,
        values: Iterator[np.ndarray],
        shape: tuple[int, ...],
        dtype: Any,
        exchange: str,
    ) -> Array | np.ndarray:
        """Calls `reduce_implementation` and looks at what it returns.

        Raises:
            RuntimeError: it raised.
            ValueError: it returned an array of another shape, or of a dtype that does not fit.
        """
        who = f"{type(self).__name__}.reduce_implementation"
        wanted = jax.ShapeDtypeStruct(shape, dtype)
        try:
            result = self.reduce_implementation(op, values)
        except LostValueError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"{who} raised {type(error).__name__} in the {exchange}, for {op.value!r} of "
                f"{describe(wanted)}: {error}"
            ) from error
        if not isinstance(result, jax.Array):
            result = np.asarray(result)
        fits = result.dtype == dtype or np.can_cast(result.dtype, dtype, "same_kind")
        if result.shape != shape or not fits:
            raise ValueError(
                f"{who} returned {describe(result)} in the {exchange}. Each replica brought "
                f"{describe(wanted)}: return an array of that shape and dtype."
            )
        return result if result.dtype == dtype else result.astype(dtype)

    @final
    def all_reduce(self, op: ReduceOp, leaves: Sequence[Array]) -> list[Array]:
        """The collectives of leaves inside a replica, while a step is traced; all get the results.

        Which of them travel together is decided when the whole step is known.

        Args:
            op: the reduction. The mean of integers and booleans is float32, that of half
                precision is summed in float32; the sum of booleans is their int32 count.
            leaves: this replica's arrays, of any shapes and dtypes.
        """
        return [exchange(op, prepare(op, leaf)) for leaf in leaves]

    def packed_bytes(self, *, on_host: bool) -> int:
        """Leaves of at most this many bytes travel together in programs over the devices.

        Args:
            on_host: whether the devices are several forced host devices.
        """
        if self.pack_bytes is not None:
            return self.pack_bytes
        return _HOST_PACK_BYTES if on_host else 0

    @final
    def reduce(
        self,
        op: ReduceOp | str,
        value: PyTree,
        destinations: DeviceLike | Sequence[DeviceLike] | None = None,
    ) -> PyTree:
        """Reduces per-replica values by hand, outside `run`.

        Args:
            op: `"sum"`, `"mean"`, `"min"`, `"max"`, or a `ReduceOp`.
            value: a `PerReplica`, or a tree of them; any other array is that of a lone replica.
            destinations: the devices to put the result on; `None`: those of the value.

        Returns:
            The same tree of arrays, mirrored over the destinations. Dtypes as of
            `ReplicaContext.all_reduce`.

        Raises:
            ValueError: an unknown `op`, unequal shapes, a deleted array, destinations of several
                types.
            TypeError: a leaf that is no array, or `op` of a wrong type.
            RuntimeError: called inside a replica, or under a JAX transformation.
        """
        return self.batch_reduce(op, [value], destinations)[0]

    @final
    def batch_reduce(
        self,
        op: ReduceOp | str,
        values: Sequence[PyTree],
        destinations: DeviceLike | Sequence[DeviceLike] | None = None,
    ) -> list[PyTree]:
        """Reduces several values by hand; see `reduce`."""
        op = ReduceOp.canonicalize(op)
        self._require_untraced("reduce", "Use mirror.get_replica_context().all_reduce there.")
        if not isinstance(values, list | tuple):
            raise TypeError(f"batch_reduce of {describe(values)}. Pass a list of values.")
        places = None if destinations is None else _places(destinations)
        if places is not None and places.are_mixed:
            raise ValueError(
                f"destinations={names(places.devices)}: no array spans devices of several types. "
                "Name devices of one; broadcast(x, destinations) copies the result to others."
            )

        def reduce_leaf(leaf: Any) -> Array:
            value = leaf if is_per_replica(leaf) else PerReplica([leaf])
            found = self._reduced(op, _require_reducible(value))
            return found if places is None else places.broadcast(found)

        return [jax.tree.map(reduce_leaf, value, is_leaf=is_per_replica) for value in values]

    @final
    def broadcast(
        self, value: ArrayLike, devices: DeviceLike | Sequence[DeviceLike]
    ) -> Array | PerReplica:
        """A copy of an array on each device.

        Args:
            value: an array or number.
            devices: where to: names, `LogicalDevice`s or `jax.Device`s, or one of those.

        Returns:
            A mirrored array; a `PerReplica` of copies where the devices are of several types, which
            no array spans.

        Raises:
            ValueError: devices that are unknown or repeated, or a deleted array.
            TypeError: no array and no number.
            OverflowError: a number that JAX's default integer cannot hold.
            RuntimeError: called inside a replica, or under a JAX transformation.
        """
        self._require_untraced("broadcast", "What a replica uses is on its device already.")
        array = _require_array(value)
        places = _places(devices)
        if places.are_mixed:
            return PerReplica([move(array, device) for device in places.devices])
        return places.broadcast(array)

    def _require_untraced(self, method: str, instead: str) -> None:
        if is_tracing():
            raise RuntimeError(
                f"{type(self).__name__}.{method} was called inside a replica, or another function "
                f"that JAX traces. {instead}"
            )

    def _reduced(self, op: ReduceOp, value: PerReplica) -> Array:
        """One value reduced by hand, on the devices it was on."""
        parts = value.values
        dtype = result_dtype(op, value.dtype)
        ready = (np.asarray(part).astype(dtype, copy=False) for part in parts)
        found = self._total(op, ready, value.shapes[0], dtype, len(parts))
        places = _homes(value)
        return jnp.asarray(np.asarray(found)) if places is None else places.broadcast(found)

    def _total(
        self,
        op: ReduceOp,
        ready: Iterator[np.ndarray],
        shape: tuple[int, ...],
        dtype: Any,
        count: int,
    ) -> Array | np.ndarray:
        by_hand = "reduction by hand"
        if op is not ReduceOp.MEAN:
            return self.carry_out(op, ready, shape, dtype, by_hand)
        wide = np.dtype(accumulator(dtype))
        values = (value.astype(wide, copy=False) for value in ready)
        total = self.carry_out(ReduceOp.SUM, values, shape, wide, by_hand)
        with np.errstate(all="ignore"):
            return (np.asarray(total) / np.asarray(count, wide)).astype(dtype)


@final
class AllReduce(CrossDeviceOps):
    """All-reduce among the devices: XLA's own, through NCCL on GPUs.

    Args:
        pack_bytes: leaves of at most this many bytes travel together, one buffer for each dtype.
            `None`: 32 KiB on host devices, where one all-reduce for each small leaf is several
            times slower; 0, which is no packing, on accelerators, where XLA combines exchanges by
            itself.

    Raises:
        ValueError: `pack_bytes` is negative.
        TypeError: it is no int.

    >>> AllReduce().reduce("sum", mirror.PerReplica([1.0, 2.0]))
    Array(3., dtype=float32)
    >>> mirror.MirroredStrategy(["/cpu:0", "/cpu:1"], AllReduce(pack_bytes=0)).cross_device_ops
    AllReduce(pack_bytes=0)
    """

    def __init__(self, pack_bytes: int | None = None) -> None:
        self.pack_bytes = _require_bytes(pack_bytes)

    def reduce_implementation(
        self, op: ReduceOp, values: Iterator[np.ndarray]
    ) -> Array | np.ndarray:
        """What devices cannot do among themselves, as where shapes differ, the host does."""
        return super().reduce_implementation(op, values)

    def _reduced(self, op: ReduceOp, value: PerReplica) -> Array:
        places = _homes(value)
        if places is None or places.are_mixed or len(places.distinct) == 1:
            return super()._reduced(op, value)
        outputs: list[Array] = []
        leaves = [value.stacked if isinstance(value.stacked, jax.Array) else np.stack(value.values)]
        program = _all_reduce_program(op, places.devices)
        with one_by_one():  # a scope's mesh may be of other devices
            launch(program, leaves, outputs, bounded=places.on_host and is_needed())
        return outputs[0]

    def __repr__(self) -> str:
        return f"AllReduce(pack_bytes={self.pack_bytes})"


@final
class ReductionToOneDevice(CrossDeviceOps):
    """Reduces on one device, the host if nothing else is said, and broadcasts from there.

    For devices that have no all-reduce among them: of several types, or where NCCL fails. Each
    replica's values come through the host's memory; they are added up in replica order, as they
    arrive.

    Args:
        device: where to reduce: a name, a `LogicalDevice` or a `jax.Device`.
        pack_bytes: leaves of at most this many bytes travel together, one buffer for each dtype.
            `None`: 256 KiB.

    Raises:
        ValueError: no device name, or `pack_bytes` is negative.
        TypeError: `device` is of another type, or `pack_bytes` is no int.
        InvalidDeviceError: there is no such device; from the first use on.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"], ReductionToOneDevice())
    >>> strategy.reduce("max", mirror.PerReplica([1.0, 2.0]))
    Array(2., dtype=float32)
    """

    def __init__(self, device: DeviceLike = "/CPU:0", pack_bytes: int | None = None) -> None:
        if isinstance(device, str):
            DeviceSpec.parse(device)
        elif not isinstance(device, LogicalDevice | jax.Device):
            raise TypeError(
                f"device={describe(device)} is no device. Pass a name such as '/cpu:0', or leave "
                "it out."
            )
        self._device = device
        self.pack_bytes = _require_bytes(pack_bytes)

    @functools.cached_property
    def device(self) -> jax.Device:
        """Where values are reduced."""
        return canonicalize_device(self._device)

    def reduce_implementation(
        self, op: ReduceOp, values: Iterator[np.ndarray]
    ) -> Array | np.ndarray:
        """See `CrossDeviceOps.reduce_implementation`."""
        if type_of(self.device) == "CPU":
            return super().reduce_implementation(op, values)
        total = move(next(values), self.device)
        dtype = total.dtype
        with one_by_one():  # the mesh that is set is that of all replicas
            total = total.astype(accumulator(dtype))
            for value in values:
                total = _ON_DEVICE[op](total, move(value, self.device))
            return total.astype(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._name, self.pack_bytes)

    @property
    def _name(self) -> str:
        if isinstance(self._device, jax.Device):
            return logical_name(self._device)
        return self._device if isinstance(self._device, str) else self._device.name

    def __repr__(self) -> str:
        return f"ReductionToOneDevice({self._name!r})"


_ON_HOST: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}
_ON_DEVICE = {
    ReduceOp.SUM: jax.jit(jnp.add, donate_argnums=0),
    ReduceOp.MIN: jax.jit(jnp.minimum, donate_argnums=0),
    ReduceOp.MAX: jax.jit(jnp.maximum, donate_argnums=0),
}


def _fold(op: ReduceOp, values: Iterable[np.ndarray]) -> np.ndarray:
    """Reduces arrays one after the other into one buffer.

    Args:
        op: `SUM`, `MIN` or `MAX`.
        values: arrays of one shape and dtype, one at least. Half precision is summed in float32.
    """
    values = iter(values)
    first = next(values)
    dtype = first.dtype
    wide = accumulator(dtype) if op is ReduceOp.SUM else dtype
    total = aligned(first.shape, wide)
    total[...] = first
    del first  # one total, and one replica's value at a time
    with np.errstate(all="ignore"):  # infinity and NaN are values, as on the devices
        for value in values:
            _ON_HOST[op](total, value.astype(wide, copy=False), out=total)
        return total.astype(dtype, copy=False)


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that begins at a multiple of 64 bytes, as XLA wants host memory to be."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + 64, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _require_bytes(pack_bytes: int | None) -> int | None:
    if pack_bytes is None:
        return None
    if isinstance(pack_bytes, bool) or not isinstance(pack_bytes, int):
        raise TypeError(
            f"pack_bytes={describe(pack_bytes)} is no int. Pass bytes, or leave it out."
        )
    if pack_bytes < 0:
        raise ValueError(f"pack_bytes={pack_bytes} is negative. Pass 0 for no packing, or bytes.")
    return pack_bytes


def _require_array(value: ArrayLike) -> Array | np.ndarray:
    number = np.ndarray | np.generic | int | float | complex
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise ValueError(
                f"broadcast of {describe(value)}, which has been deleted: a step gave up its "
                "buffer. Use the array that the step returned."
            )
        return value
    if not isinstance(value, number) or not is_numeric(np.asarray(value).dtype):
        raise TypeError(
            f"broadcast of {describe(value)}: it is no array and no number. Pass one; of a tree, "
            "each leaf by itself."
        )
    return np.array(value, jnp.result_type(value))


def _require_reducible(value: PerReplica) -> PerReplica:
    if len(set(value.shapes)) > 1:
        raise ValueError(
            f"{value!r}: the values differ in shape, {', '.join(map(str, value.shapes))}. Reduce "
            "each over its own axis first: strategy.reduce(op, x, axis=0)."
        )
    held = held_by(value)
    parts = held.arrays if isinstance(held, Parts) else [held]
    if any_deleted([part for part in parts if isinstance(part, jax.Array)]):
        raise ValueError(
            f"reduce of {value!r}: a step gave up its buffer. Use what the step returned."
        )
    return value


def _places(devices: DeviceLike | Sequence[DeviceLike]) -> ReplicaDevices:
    several = list(devices) if isinstance(devices, list | tuple) else [devices]
    return ReplicaDevices(canonicalize_replica_devices(several))


def _homes(value: PerReplica) -> ReplicaDevices | None:
    """The devices a value is on; `None`: on the host, or all on one device."""
    parts = value.values
    arrays = [part for part in parts if isinstance(part, jax.Array) and len(part.devices()) == 1]
    if len(arrays) < len(parts):
        return None
    devices = tuple(device for array in arrays for device in array.devices())
    return ReplicaDevices(devices) if len(set(devices)) in (1, len(devices)) else None


@functools.lru_cache(64)
def _all_reduce_program(
    op: ReduceOp, devices: tuple[jax.Device, ...]
) -> Callable[..., list[Array]]:
    """A program that reduces the rows of a stacked array, which XLA does by an all-reduce."""
    places = ReplicaDevices(devices)

    def all_reduce(stacked: Array) -> list[Array]:
        ready = prepare(op, stacked)
        if op is ReduceOp.SUM:
            return [jnp.sum(ready, 0, dtype=accumulator(ready.dtype)).astype(ready.dtype)]
        if op is ReduceOp.MEAN:
            return [jnp.mean(ready, 0, dtype=accumulator(ready.dtype)).astype(ready.dtype)]
        extreme = (jnp.min if op is ReduceOp.MIN else jnp.max)(ready, 0)
        if not jnp.issubdtype(ready.dtype, jnp.inexact):
            return [extreme]
        # XLA's own exchange of extremes loses a NaN on one replica, or does not.
        return [jnp.where(jnp.isnan(ready).any(0), jnp.asarray(jnp.nan, ready.dtype), extreme)]

    return jax.jit(all_reduce, in_shardings=places.stacked, out_shardings=places.mirrored)


def prepare(op: ReduceOp, leaf: Array) -> Array:
    """The leaf in the dtype in which it is reduced, which is that of the result."""
    leaf = jnp.asarray(leaf)
    dtype = result_dtype(op, leaf.dtype)
    return leaf if dtype == leaf.dtype else leaf.astype(dtype)


def result_dtype(op: ReduceOp, dtype: Any) -> Any:
    """The dtype of what a leaf of that dtype is reduced to.

    Raises:
        TypeError: it cannot be reduced.
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            "A PRNG key cannot be reduced. Draw with it first, or reduce jax.random.key_data(key)."
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX) and jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{op.value!r} of {dtype}: complex numbers have no order. Reduce abs(x), or real and "
            "imaginary parts."
        )
    exact = jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_
    if op is ReduceOp.MEAN and exact:
        return jnp.dtype(jnp.float32)
    if op is ReduceOp.SUM and dtype == jnp.bool_:
        return jnp.dtype(jnp.int32)
    return dtype


def exchange(op: ReduceOp, leaf: Array) -> Array:
    """One collective over the whole replica axis, of a leaf that `prepare` has made ready.

    Executors see to it that an extreme is NaN where one replica's value is.
    """
    match op:
        case ReduceOp.SUM:
            return jax.lax.psum(leaf, axis_name())
        case ReduceOp.MEAN:
            wide = leaf.astype(accumulator(leaf.dtype))
            return jax.lax.pmean(wide, axis_name()).astype(leaf.dtype)
        case ReduceOp.MIN | ReduceOp.MAX:
            reduce = jax.lax.pmin if op is ReduceOp.MIN else jax.lax.pmax
            if leaf.dtype == jnp.bool_:
                return reduce(leaf.astype(jnp.uint8), axis_name()).astype(jnp.bool_)
            return reduce(leaf, axis_name())


def num_replicas() -> int:
    """How many replicas run the step that is being traced."""
    return jax.lax.axis_size(axis_name())


def gather(leaf: Array, axis: int, lengths: Sequence[int] | None = None) -> Array:
    """The replicas' leaves joined along an axis; every replica gets the result.

    Args:
        leaf: this replica's array.
        axis: the axis to join along.
        lengths: each replica's length along it; `None`: all have this one's. What travels is
            padded to the longest.
    """
    axis %= leaf.ndim
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        bits = gather(jax.random.key_data(leaf), axis, lengths)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
    if lengths is not None and len(set(lengths)) > 1:
        widths = [(0, 0)] * leaf.ndim
        widths[axis] = (0, max(lengths) - leaf.shape[axis])
        every = jax.lax.all_gather(jnp.pad(leaf, widths), axis_name(), axis=0)
        parts = [
            jax.lax.slice_in_dim(every[i], 0, length, axis=axis) for i, length in enumerate(lengths)
        ]
        return jnp.concatenate(parts, axis)
    if leaf.size:
        return jax.lax.all_gather(leaf, axis_name(), axis=axis, tiled=True)
    # JAX 0.12 cannot lower the exchange of nothing.
    shape = list(leaf.shape)
    shape[axis] *= num_replicas()
    return jnp.zeros(shape, leaf.dtype)


def accumulator(dtype: Any) -> Any:
    """The dtype in which a mean is summed up: half precision would overflow, or lose."""
    half = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.float32 if half else dtype
