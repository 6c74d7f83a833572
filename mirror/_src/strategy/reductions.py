"""The steps behind `strategy.reduce` and `strategy.gather`, and the checks of their arguments."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.collectives.in_step import bind_all_reduce
from mirror._src.collectives.reduce_op import ReduceOp, accumulator, prepare
from mirror._src.context.scopes import current_frame
from mirror._src.utils.errors import describe
from mirror._src.utils.types import Array, PyTree
from mirror._src.values.per_replica import PerReplica, is_per_replica

Axes = tuple[int, ...] | None


@functools.cache
def reduction(op: ReduceOp, axis: Axes, masked: bool) -> Callable[..., PyTree]:
    """The step that reduces a tree over the replicas, and over `axis` of each replica's leaves."""

    def reduce_leaf(leaf: Array, mask: Array | None) -> Array:
        leaf = jnp.asarray(leaf)
        _require_axes(axis, leaf)
        if axis is None and mask is None:
            return bind_all_reduce(op, prepare(op, leaf))
        ready = prepare(op, leaf)
        keep = jnp.ones(leaf.shape, bool) if mask is None else _aligned(mask, leaf)
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            return bind_all_reduce(op, _extreme(op, leaf, keep, axis))
        kept = jnp.where(keep, ready, jnp.zeros((), ready.dtype))
        dtype = accumulator(ready.dtype) if op is ReduceOp.MEAN else ready.dtype
        total = bind_all_reduce(ReduceOp.SUM, _sum(kept, axis, dtype))
        if op is ReduceOp.SUM:
            return total
        count = bind_all_reduce(ReduceOp.SUM, _sum(keep, axis, jnp.int32))
        return (total / count.astype(total.dtype)).astype(ready.dtype)

    def reduce_tree(value: PyTree, where: Array | None) -> PyTree:
        return jax.tree.map(lambda leaf: reduce_leaf(leaf, where), value)

    def reduce_unmasked(value: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: reduce_leaf(leaf, None), value)

    step = reduce_tree if masked else reduce_unmasked
    step.__name__ = "reduce"  # in logs and profiles
    return step


@functools.cache
def gathering(axis: int) -> Callable[[PyTree], PyTree]:
    """The step that joins the replicas' leaves along an axis."""

    def gather_leaf(leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)
        _require_axes((axis,), leaf)
        frame = current_frame()
        assert frame is not None
        assert frame.replica is not None  # it is a step
        return frame.replica.all_gather(leaf, axis)

    def gather_tree(value: PyTree) -> PyTree:
        return jax.tree.map(gather_leaf, value)

    gather_tree.__name__ = "gather"
    return gather_tree


def canonical_axes(axis: Any) -> Axes:
    """The axes that are meant by `None`, an int, or several.

    Raises:
        TypeError: something else.
    """
    if axis is None:
        return None
    axes = tuple(axis) if isinstance(axis, list | tuple) else (axis,)
    if not all(isinstance(a, int | np.integer) and not isinstance(a, bool) for a in axes):
        raise TypeError(f"axis={axis!r} is no axis. Pass None, an int or a tuple of ints.")
    return tuple(map(int, axes))


def require_values(method: str, value: PyTree) -> None:
    """Refuses a tree without arrays, and leaves that are none."""
    leaves = jax.tree.leaves(value, is_leaf=is_per_replica)
    if not leaves:
        raise ValueError(f"{method} of {value!r}: there is no value in it. Pass arrays.")
    for leaf in leaves:
        number = jax.Array | np.ndarray | np.generic | int | float | complex
        if not isinstance(leaf, number | PerReplica):
            raise TypeError(
                f"{method} of {describe(leaf)}: it is no array and no number. Pass the results of "
                "strategy.run, or a mirror.PerReplica."
            )


def require_equal_shapes(value: PyTree) -> None:
    """Refuses a `PerReplica` whose replicas differ in shape."""
    for leaf in jax.tree.leaves(value, is_leaf=is_per_replica):
        if is_per_replica(leaf) and len(set(leaf.shapes)) > 1:
            raise ValueError(
                f"reduce of values that differ in shape, {', '.join(map(str, leaf.shapes))}. Say "
                "over which axis of each as well: strategy.reduce(op, x, axis=0)."
            )


def _require_axes(axes: Axes, leaf: Array) -> None:
    missing = [a for a in axes or () if not -leaf.ndim <= a < leaf.ndim]
    if missing:
        raise ValueError(
            f"There is no axis {missing[0]} in a replica's value of shape {leaf.shape}. Axes count "
            "within each replica's value, without the replica axis."
        )


def _aligned(mask: Array, leaf: Array) -> Array:
    """The mask in the leaf's shape: a mask of rows, `(B,)`, goes with a leaf `(B, ...)`."""
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"where= is {mask.dtype}, not bool. Compare first, weights > 0.")
    if mask.ndim > leaf.ndim or mask.shape != leaf.shape[: mask.ndim]:
        raise ValueError(
            f"where= of shape {mask.shape} does not go with a replica's value of shape "
            f"{leaf.shape}. Its axes must be the leading axes of the value."
        )
    return jnp.broadcast_to(mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim)), leaf.shape)


def _sum(value: Array, axis: Axes, dtype: Any) -> Array:
    return value.astype(dtype) if axis is None else jnp.sum(value, axis=axis, dtype=dtype)


def _extreme(op: ReduceOp, leaf: Array, keep: Array, axis: Axes) -> Array:
    least = op is ReduceOp.MIN
    if leaf.dtype == jnp.bool_:
        neutral: Any = least
    elif jnp.issubdtype(leaf.dtype, jnp.integer):
        info = jnp.iinfo(leaf.dtype)
        neutral = info.max if least else info.min
    else:
        neutral = jnp.inf if least else -jnp.inf
    kept = jnp.where(keep, leaf, jnp.asarray(neutral, leaf.dtype))
    if axis is None:
        return kept
    return (jnp.min if least else jnp.max)(
        kept, axis=axis, initial=jnp.asarray(neutral, leaf.dtype)
    )
