"""Cross-device ops: who carries an exchange out, and how small leaves travel together."""

import abc
import enum
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from mirror._types import REPLICA_AXIS, Array

_HOST_PACK_BYTES = 32 * 1024


class ReduceOp(enum.Enum):
    """How the replicas' values become one."""

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


class CrossDeviceOps(abc.ABC):
    """Carries out the exchanges of a step; `MirroredStrategy(cross_device_ops=...)` takes one."""

    @abc.abstractmethod
    def all_reduce(self, op: ReduceOp, leaves: Sequence[Array], *, on_host: bool) -> list[Array]:
        """Reduces each leaf over the replica axis; every replica gets the result.

        Args:
            op: the reduction. The mean of integers and booleans is float32, that of half
                precision is summed in float32; the sum of booleans is their int32 count.
            leaves: this replica's arrays, of any shapes and dtypes.
            on_host: whether the exchange is among several forced host devices.
        """


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
    """

    def __init__(self, pack_bytes: int | None = None) -> None:
        if pack_bytes is not None and pack_bytes < 0:
            raise ValueError(
                f"pack_bytes={pack_bytes} is negative. Pass 0 for no packing, or bytes."
            )
        self.pack_bytes = pack_bytes

    def all_reduce(self, op: ReduceOp, leaves: Sequence[Array], *, on_host: bool) -> list[Array]:
        """See `CrossDeviceOps.all_reduce`."""
        limit = self.pack_bytes
        if limit is None:
            limit = _HOST_PACK_BYTES if on_host and num_replicas() > 1 else 0
        return _packed(op, leaves, limit)

    def __repr__(self) -> str:
        return f"AllReduce(pack_bytes={self.pack_bytes})"


def prepare(op: ReduceOp, leaf: Array) -> Array:
    """The leaf in the dtype in which it is reduced, which is that of the result."""
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(
            "A PRNG key cannot be reduced. Draw with it first, or reduce jax.random.key_data(key)."
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX) and jnp.iscomplexobj(leaf):
        raise TypeError(
            f"{op.value!r} of {leaf.dtype}: complex numbers have no order. Reduce abs(x), or real "
            "and imaginary parts."
        )
    exact = jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == jnp.bool_
    if op is ReduceOp.MEAN and exact:
        return leaf.astype(jnp.float32)
    if op is ReduceOp.SUM and leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.int32)
    return leaf


def exchange(op: ReduceOp, leaf: Array) -> Array:
    """One exchange over the whole replica axis, of a leaf that `prepare` has made ready."""
    match op:
        case ReduceOp.SUM:
            return jax.lax.psum(leaf, REPLICA_AXIS)
        case ReduceOp.MEAN:
            return jax.lax.pmean(leaf.astype(accumulator(leaf.dtype)), REPLICA_AXIS).astype(
                leaf.dtype
            )
        case ReduceOp.MIN | ReduceOp.MAX:
            reduce = jax.lax.pmin if op is ReduceOp.MIN else jax.lax.pmax
            if leaf.dtype == jnp.bool_:
                return reduce(leaf.astype(jnp.uint8), REPLICA_AXIS).astype(jnp.bool_)
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                return reduce(leaf, REPLICA_AXIS)
            # XLA's own exchange of extremes loses a NaN on one replica, or does not.
            spoilt = jax.lax.pmax(jnp.isnan(leaf).astype(jnp.uint8), REPLICA_AXIS) > 0
            return jnp.where(spoilt, jnp.asarray(jnp.nan, leaf.dtype), reduce(leaf, REPLICA_AXIS))


def num_replicas() -> int:
    """How many replicas run the step that is being traced."""
    return jax.lax.axis_size(REPLICA_AXIS)


def gather(leaf: Array, axis: int) -> Array:
    """The replicas' leaves joined along an axis; every replica gets the result."""
    axis %= leaf.ndim
    if leaf.size:
        return jax.lax.all_gather(leaf, REPLICA_AXIS, axis=axis, tiled=True)
    # JAX 0.12 cannot lower the exchange of nothing.
    shape = list(leaf.shape)
    shape[axis] *= num_replicas()
    return jnp.zeros(shape, leaf.dtype)


def accumulator(dtype: Any) -> Any:
    """The dtype in which a mean is summed up: half precision would overflow, or lose."""
    half = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.float32 if half else dtype


def _packed(op: ReduceOp, leaves: Sequence[Array], limit: int) -> list[Array]:
    """Exchanges leaves of at most `limit` bytes as one flat buffer for each dtype."""
    ready = [prepare(op, leaf) for leaf in leaves]
    packs: dict[jnp.dtype, list[int]] = {}
    for i, leaf in enumerate(ready):
        if 0 < leaf.nbytes <= limit:
            packs.setdefault(leaf.dtype, []).append(i)
    results: dict[int, Array] = {}
    for members in packs.values():
        if len(members) > 1:
            # The barriers keep XLA from fusing the packing with what is before and behind it, which
            # takes twice as long to compile (JAX 0.12) and is no faster.
            pack = jax.lax.optimization_barrier([ready[i] for i in members])
            flat = exchange(op, jnp.concatenate([leaf.ravel() for leaf in pack]))
            parts = jax.lax.optimization_barrier(_split(flat, pack))
            results.update(zip(members, parts, strict=True))
    return [results[i] if i in results else exchange(op, leaf) for i, leaf in enumerate(ready)]


def _split(flat: Array, like: Sequence[Array]) -> list[Array]:
    parts, start = [], 0
    for leaf in like:
        parts.append(jax.lax.slice(flat, (start,), (start + leaf.size,)).reshape(leaf.shape))
        start += leaf.size
    return parts
