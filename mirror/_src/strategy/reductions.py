"""Steps that implement `strategy.reduce` and `strategy.gather`, and checks of their arguments."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import describe, expected
from mirror._src.base.naming import keys
from mirror._src.base.types import ARRAY_LIKE, Array, PyTree
from mirror._src.devices.narrowing import ENABLE_64_BITS
from mirror._src.engine.in_step import bind_all_reduce
from mirror._src.engine.per_replica import PerReplica, is_per_replica
from mirror._src.engine.reduce_op import ReduceOp, accumulator, prepare
from mirror._src.engine.scopes import current_frame

Axes = tuple[int, ...] | None


@functools.cache
def reduction(op: ReduceOp, axis: Axes, masked: bool, is_checked: bool) -> Callable[..., PyTree]:
    """Returns a step that reduces a tree over the replicas, and over `axis` of every leaf.

    The step returns the results and, if it is checked, estimates of the sums of integers for
    `require_exact`.
    """

    def estimate(leaf: Array, mask: Array | None) -> Array | None:
        if not is_checked or not jnp.issubdtype(prepare(op, leaf).dtype, jnp.integer):
            return None
        return reduce_leaf(jnp.asarray(leaf).astype(jnp.float32), mask)

    def reduce_leaf(leaf: Array, mask: Array | None) -> Array:
        leaf = jnp.asarray(leaf)
        _require_axes(axis, leaf)
        if axis is None and mask is None:
            return bind_all_reduce(op, prepare(op, leaf))
        operand = prepare(op, leaf)
        keep = jnp.ones(leaf.shape, bool) if mask is None else _broadcast_mask(mask, leaf)
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            return bind_all_reduce(op, _extreme(op, leaf, keep, axis))
        kept = jnp.where(keep, operand, jnp.zeros((), operand.dtype))
        total = bind_all_reduce(ReduceOp.SUM, _sum(kept, axis, accumulator(operand.dtype)))
        if op is ReduceOp.SUM:
            return total.astype(operand.dtype)
        count = bind_all_reduce(ReduceOp.SUM, _sum(keep, axis, jnp.int32))
        return (total / count.astype(total.dtype)).astype(operand.dtype)

    def reduce_tree(value: PyTree, where: Array | None) -> tuple[PyTree, list[Array | None]]:
        estimates = [estimate(leaf, where) for leaf in jax.tree.leaves(value)]
        return jax.tree.map(lambda leaf: reduce_leaf(leaf, where), value), estimates

    def reduce_unmasked(value: PyTree) -> tuple[PyTree, list[Array | None]]:
        return reduce_tree(value, None)

    step = reduce_tree if masked else reduce_unmasked
    step.__name__ = "reduce"  # in logs and profiles
    return step


@functools.cache
def gathering(axis: int) -> Callable[[PyTree], PyTree]:
    """Returns a step that concatenates the replicas' leaves along an axis."""

    def gather_leaf(leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)
        _require_axes((axis,), leaf)
        frame = current_frame()
        assert frame is not None
        assert frame.replica is not None  # `strategy.run` calls this
        return frame.replica.all_gather(leaf, axis)

    def gather_tree(value: PyTree) -> PyTree:
        return jax.tree.map(gather_leaf, value)

    gather_tree.__name__ = "gather"
    return gather_tree


def require_exact(value: PyTree, sums: PyTree, estimates: Sequence[Array | None]) -> None:
    """Checks that sums of integers have not wrapped.

    Args:
        value: The values that were reduced.
        sums: Their sums.
        estimates: The sums in float32; None for other dtypes.

    Raises:
        OverflowError: If a sum does not fit its dtype.
    """
    if all(estimate is None for estimate in estimates):
        return
    paths = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_per_replica)[0]
    for (path, _), total, estimate in zip(paths, jax.tree.leaves(sums), estimates, strict=True):
        if estimate is None:
            continue
        exact, rough = np.asarray(total), np.asarray(estimate, np.float64)
        wrapped = np.abs(exact.astype(np.float64) - rough) > 2.0 ** (8 * exact.itemsize - 2)
        if wrapped.any():
            raise OverflowError(
                f"The sum of value{keys(path)} is about {rough[wrapped].flat[0]:.3g}, which does "
                f"not fit {exact.dtype}. Reduce floats, strategy.reduce('sum', "
                f"x.astype('float32')), or enable 64-bit types: {ENABLE_64_BITS}."
            )


def canonical_axes(axis: Any) -> Axes:
    """Converts the `axis` argument to a tuple of ints, or `None`.

    Raises:
        TypeError: If it is neither `None`, nor an int, nor a sequence of ints.
    """
    if axis is None:
        return None
    axes = tuple(axis) if isinstance(axis, list | tuple) else (axis,)
    if not all(isinstance(a, int | np.integer) and not isinstance(a, bool) for a in axes):
        fix = "Pass axis=0 for the batch axis, or omit it."
        raise TypeError(expected("axis", axis, "None, an int or a tuple of ints", fix))
    return tuple(map(int, axes))


def require_values(method: str, value: PyTree) -> None:
    """Checks that a tree has leaves, and that all of them are arrays or numbers.

    Raises:
        ValueError: If the tree has no leaves.
        TypeError: If a leaf is neither an array nor a number.
    """
    leaves = jax.tree.leaves(value, is_leaf=is_per_replica)
    if not leaves:
        raise ValueError(f"`value` of {method} must contain an array, got {value!r}.")
    for leaf in leaves:
        if not isinstance(leaf, (*ARRAY_LIKE, PerReplica)):
            raise TypeError(
                f"{method} expects arrays or numbers, got {describe(leaf)}. Pass results of "
                "strategy.run, or a mirror.PerReplica."
            )


def require_equal_shapes(value: PyTree) -> None:
    """Checks that every `PerReplica` has the same shape on all replicas.

    Raises:
        ValueError: If one has different shapes.
    """
    for leaf in jax.tree.leaves(value, is_leaf=is_per_replica):
        if is_per_replica(leaf) and len(set(leaf.shapes)) > 1:
            raise ValueError(
                "Cannot reduce per-replica values of different shapes: "
                f"{', '.join(map(str, leaf.shapes))}. Reduce over the axis that differs as well: "
                "strategy.reduce(op, x, axis=0)."
            )


def _require_axes(axes: Axes, leaf: Array) -> None:
    missing = [a for a in axes or () if not -leaf.ndim <= a < leaf.ndim]
    if missing:
        raise ValueError(
            f"axis {missing[0]} is out of range for a replica's value of shape {leaf.shape}. Count "
            "the axes of one replica's value, without the replica axis."
        )


def _broadcast_mask(mask: Array, leaf: Array) -> Array:
    """Broadcasts a mask to the shape of a leaf, from the leading axes: `(B,)` to `(B, ...)`."""
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"`where` must be a boolean mask, got {mask.dtype}. Compare first, for example "
            "weights > 0."
        )
    if mask.ndim > leaf.ndim or mask.shape != leaf.shape[: mask.ndim]:
        raise ValueError(
            f"`where` has shape {mask.shape}, but a replica's value has shape {leaf.shape}. Pass a "
            "mask whose axes are the leading axes of the value."
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
