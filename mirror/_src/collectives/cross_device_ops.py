"""`CrossDeviceOps`, the base class: who carries a collective out, in steps and by hand."""

import abc
from collections.abc import Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.collectives.by_hand import (
    devices_of,
    replica_devices,
    require_array,
    require_reducible,
)
from mirror._src.collectives.in_step import bind_all_reduce
from mirror._src.collectives.on_host import fold
from mirror._src.collectives.reduce_op import ReduceOp, accumulator, prepare, result_dtype
from mirror._src.devices.backend import names
from mirror._src.devices.resolve import DeviceLike, canonicalize_device
from mirror._src.devices.transfer import is_tracing, move
from mirror._src.utils.errors import describe
from mirror._src.utils.modules import set_module
from mirror._src.utils.types import Array, ArrayLike, PyTree
from mirror._src.values.per_replica import PerReplica, is_per_replica

_HOST_PACK_BYTES = 32 * 1024


class LostValueError(RuntimeError):
    """A replica's value for a collective cannot be read."""


@set_module("mirror")
class CrossDeviceOps(abc.ABC):
    """Carries out the collectives of a step; `MirroredStrategy(cross_device_ops=...)` takes one.

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
        """Reduces the replicas' values of one collective, once for all of them.

        Args:
            op: `SUM`, `MIN` or `MAX`; a mean is a sum that is divided afterwards.
            values: each replica's array, in replica order, all of one shape and dtype; read-only,
                and there as soon as the replica has computed it. Keep one total, not all of them.

        Returns:
            An array of the same shape and dtype, which nothing changes afterwards.
        """
        return fold(op, values)

    @final
    def carry_out(
        self,
        op: ReduceOp,
        values: Iterator[np.ndarray],
        shape: tuple[int, ...],
        dtype: Any,
        collective: str,
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
                f"{who} raised {type(error).__name__} in the {collective}, for {op.value!r} of "
                f"{describe(wanted)}: {error}"
            ) from error
        if not isinstance(result, jax.Array):
            result = np.asarray(result)
        fits = result.dtype == dtype or np.can_cast(result.dtype, dtype, "same_kind")
        if result.shape != shape or not fits:
            raise ValueError(
                f"{who} returned {describe(result)} in the {collective}. Each replica brought "
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
        return [bind_all_reduce(op, prepare(op, leaf)) for leaf in leaves]

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
        places = None if destinations is None else replica_devices(destinations)
        if places is not None and places.are_mixed:
            raise ValueError(
                f"destinations={names(places.devices)}: no array spans devices of several types. "
                "Name devices of one; broadcast(x, destinations) copies the result to others."
            )

        def reduce_leaf(leaf: Any) -> Array:
            value = leaf if is_per_replica(leaf) else PerReplica([leaf])
            found = self._reduced(op, require_reducible(value))
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
        array = require_array(value)
        places = replica_devices(devices)
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
        places = devices_of(value)
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


def require_pack_bytes(pack_bytes: int | None) -> int | None:
    """The number itself; refuses what is no number of bytes."""
    if pack_bytes is None:
        return None
    if isinstance(pack_bytes, bool) or not isinstance(pack_bytes, int):
        raise TypeError(
            f"pack_bytes={describe(pack_bytes)} is no int. Pass bytes, or leave it out."
        )
    if pack_bytes < 0:
        raise ValueError(f"pack_bytes={pack_bytes} is negative. Pass 0 for no packing, or bytes.")
    return pack_bytes
