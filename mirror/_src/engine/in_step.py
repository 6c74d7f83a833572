"""The collectives that a replica executes in a step, and the stack of the replicas of a thread.

`replica_context` defines the frames of the stack.
"""

import threading
from typing import Any

import jax
import jax.numpy as jnp

from mirror._src.base.types import REPLICA_AXIS, Array, accumulator
from mirror._src.engine.reduce_op import ReduceOp


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Any] = []


stack = _Stack()


def current_axis() -> str:
    """Returns the name of the replica axis in the step that this thread traces."""
    replica = stack.frames[-1].replica if stack.frames else None
    return REPLICA_AXIS if replica is None else replica._axis_name


def bind_all_reduce(op: ReduceOp, leaf: Array, *, narrow: bool = False) -> Array:
    """Returns a leaf all-reduced over the whole replica axis.

    The leaf must have been converted by `prepare`. For `MIN` and `MAX`, the executors make the
    result NaN if any replica's value is NaN.

    Args:
        op: The reduction.
        leaf: This replica's array.
        narrow: Whether half precision is summed as it is.
    """
    # XLA sums half precision in float32 on host devices, but not on GPUs: from one GPU to the next,
    # 256 + 1 is 256 in bfloat16.
    dtype = leaf.dtype if narrow else accumulator(leaf.dtype)
    match op:
        case ReduceOp.SUM if dtype == leaf.dtype:  # without a conversion it keeps a weak type
            return jax.lax.psum(leaf, current_axis())
        case ReduceOp.SUM | ReduceOp.MEAN:
            reduce_sum = jax.lax.psum if op is ReduceOp.SUM else jax.lax.pmean
            return reduce_sum(leaf.astype(dtype), current_axis()).astype(leaf.dtype)
        case ReduceOp.MIN | ReduceOp.MAX:
            reduce = jax.lax.pmin if op is ReduceOp.MIN else jax.lax.pmax
            if leaf.dtype == jnp.bool_:
                return reduce(leaf.astype(jnp.uint8), current_axis()).astype(jnp.bool_)
            return reduce(leaf, current_axis())


def gather(leaf: Array, axis: int) -> Array:
    """Returns the replicas' leaves, concatenated along an axis in replica order.

    Args:
        leaf: This replica's array.
        axis: Axis to concatenate along.
    """
    axis %= leaf.ndim
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        bits = gather(jax.random.key_data(leaf), axis)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
    if leaf.size:
        return jax.lax.all_gather(leaf, current_axis(), axis=axis, tiled=True)
    # JAX 0.12 cannot lower a collective of an empty array.
    shape = list(leaf.shape)
    shape[axis] *= jax.lax.axis_size(current_axis())
    return jnp.zeros(shape, leaf.dtype)
