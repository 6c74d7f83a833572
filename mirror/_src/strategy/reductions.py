"""Programs that implement `strategy.init`, `strategy.reduce` and `strategy.gather`, and checks."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.errors import describe, expected
from mirror._src.base.naming import keys, name_of
from mirror._src.base.tracebacks import line_of
from mirror._src.base.types import ARRAY_LIKE, Array, PyTree, accumulator
from mirror._src.devices.launch import is_needed, launch, wait_for
from mirror._src.devices.launches import Described
from mirror._src.devices.replicas import Kind, ReplicaDevices
from mirror._src.devices.transfer import ENABLE_64_BITS, any_deleted, require_fits
from mirror._src.engine.arguments import hoist_nested
from mirror._src.engine.in_step import bind_all_reduce
from mirror._src.engine.per_replica import PerReplica, is_per_replica
from mirror._src.engine.reduce_op import ReduceOp, prepare, wrapped
from mirror._src.engine.replica_context import current_replica
from mirror._src.inspection.measurement import with_objects


def _split(tree: Any) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
    """Returns the arrays of a tree, first the ones in nnx objects, and how to put in others.

    The function makes new nnx objects.
    """
    objects, ((tree,), _) = hoist_nested((tree,), {})
    graphdef, state = nnx.split(tuple(objects))
    of_state: Any
    treedef: Any
    inner, of_state = jax.tree.flatten(state)
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]
    arrays = [*inner, *(leaves[i] for i in places)]
    count, fixed = len(inner), [None if i in places else x for i, x in enumerate(leaves)]

    def joined(arrays: Sequence[Any]) -> Any:
        new = list(fixed)
        for i, array in zip(places, arrays[count:], strict=True):
            new[i] = array
        objects = nnx.merge(graphdef, of_state.unflatten(arrays[:count]))
        return with_objects(treedef.unflatten(new), list(objects))

    return joined, arrays


def create(
    replicas: ReplicaDevices, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Implements `Strategy.init`."""
    join_given, arrays = _split((tuple(args), dict(kwargs)))
    made: list[Callable[[Sequence[Any]], Any]] = []

    def build(*arrays: Any) -> list[Any]:
        args, kwargs = join_given(arrays)
        join_made, results = _split(fn(*args, **kwargs))
        advanced = _split((args, kwargs))[1]  # random streams among the arguments
        made[:] = [join_made]
        token = jnp.zeros((), jnp.int32)  # an output that is never donated
        return [*results, *advanced[: len(arrays)], token]

    for array in arrays:
        require_fits(f"An argument of {name_of(fn)}", array)
    placed = list(map(replicas.store, arrays))
    types = jax.eval_shape(build, *placed)
    kinds = [Kind(axis=replicas.stored_axis(t)) for t in types]
    program = jax.jit(build, out_shardings=list(map(replicas.sharding, kinds)))
    described = Described(name_of(fn), line_of(fn), replicas.devices, range(len(replicas)))
    outputs: list[Any] = []
    bounded = replicas.on_host and is_needed()
    launch(program, placed, outputs, described, bounded=bounded, compiles=True)
    wait_for(outputs)
    count = len(outputs) - len(arrays) - 1
    new = hoist_nested(*join_given(outputs[count:-1])).objects
    for old, advanced in zip(hoist_nested(args, dict(kwargs)).objects, new, strict=True):
        nnx.update(old, nnx.state(advanced))
    return made[0](outputs[:count])


Axes = tuple[int, ...] | None


@functools.cache
def reduction(op: ReduceOp, axis: Axes, is_checked: bool) -> Callable[..., PyTree]:
    """Returns a step that reduces a tree over the replicas, and over `axis` of every leaf.

    Its arguments are the tree, a mask for all leaves or None, and one for each leaf or None. It
    returns the results and, if it is checked, estimates of the sums of integers for
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

    def reduce_tree(
        value: PyTree, where: Array | None, masks: list[Array | None] | None
    ) -> tuple[PyTree, list[Array | None]]:
        leaves, treedef = jax.tree.flatten(value)
        pairs = list(zip(leaves, masks or [where] * len(leaves), strict=True))
        estimates = list(itertools.starmap(estimate, pairs))
        return jax.tree.unflatten(treedef, itertools.starmap(reduce_leaf, pairs)), estimates

    reduce_tree.__name__ = "reduce"  # in logs and profiles
    return reduce_tree


@functools.cache
def gathering(axis: int) -> Callable[..., PyTree]:
    """Returns a step that concatenates the replicas' leaves along an axis.

    Its arguments are a tree and, for each leaf, the positions to select of the result or None.
    """

    def gather_leaf(leaf: Array, selected: Array | None) -> Array:
        leaf = jnp.asarray(leaf)
        _require_axes((axis,), leaf)
        replica = current_replica()
        assert replica is not None  # `strategy.run` calls this
        joined = replica.all_gather(leaf, axis)
        return joined if selected is None else jnp.take(joined, selected, axis)

    def gather_tree(value: PyTree, selected: list[Array | None]) -> PyTree:
        leaves, treedef = jax.tree.flatten(value)
        return jax.tree.unflatten(treedef, map(gather_leaf, leaves, selected))

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
        lost = wrapped(total, estimate)
        if lost.size:
            raise OverflowError(
                f"The sum of value{keys(path)} is about {lost[0]:.3g}, which does not fit "
                f"{total.dtype}. Reduce floats, jax.tree.map(lambda x: x.astype('float32'), "
                f"value), or enable 64-bit types: {ENABLE_64_BITS}."
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


def reduced_arguments(value: PyTree, where: Any, axes: Axes) -> tuple[Any, Any, Any]:
    """Returns the arguments of a `reduction`, of which no value differs in shape.

    Raises:
        ValueError: If the shapes of a value differ along other axes than `axes`, or `where` does
            not match it.
    """
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
    if not any(map(_is_unequal, leaves)):
        return value, where, None
    masks = [
        _padded(PerReplica(_masks(leaf, where))) if _is_unequal(leaf) else where for leaf in leaves
    ]
    fix = "Reduce over the axis that differs as well: strategy.reduce(op, x, axis=0)."
    padded = [_padded_along("reduce", leaf, axes or (), fix) for leaf in leaves]
    return jax.tree.unflatten(treedef, padded), None, masks


def _masks(value: PerReplica, where: Any) -> list[np.ndarray]:
    """Returns the mask of each value; without `where`, all elements are included."""
    if where is None:
        return [np.ones(shape, bool) for shape in value.shapes]
    masks = where.values if is_per_replica(where) else [where] * value.num_replicas
    if len(masks) != value.num_replicas:
        raise ValueError(
            f"`where` must have one mask per replica, got {len(masks)} masks for "
            f"{value.num_replicas} values. Pass a PerReplica like the value."
        )
    rows = zip(masks, value.values, strict=True)
    return [np.asarray(_broadcast_mask(mask, row)) for mask, row in rows]


def gathered_arguments(value: PyTree, axis: int) -> tuple[PyTree, list[np.ndarray | None]]:
    """Returns the arguments of `gathering`, of which no value differs in shape.

    Raises:
        ValueError: If the shapes of a value differ along other axes.
    """
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
    fix = f"Pad them, except along axis {axis}, or use another axis: strategy.gather(x, axis=0)."
    padded = [_padded_along("gather", leaf, (axis,), fix) for leaf in leaves]
    selected = [_examples(leaf, axis) if _is_unequal(leaf) else None for leaf in leaves]
    return jax.tree.unflatten(treedef, padded), selected


def _examples(value: PerReplica, axis: int) -> np.ndarray:
    """Returns the positions that are not padding in the padded values, joined along an axis."""
    lengths = [shape[axis] for shape in value.shapes]
    most = max(lengths)
    starts = (np.arange(length) + i * most for i, length in enumerate(lengths))
    return np.concatenate(list(starts)).astype(np.int32)


def _is_unequal(value: object) -> bool:
    return isinstance(value, PerReplica) and len(set(value.shapes)) > 1


def _padded_along(method: str, value: Any, axes: Sequence[int], fix: str) -> Any:
    """Returns a value padded along some axes, the only ones along which its shapes may differ."""
    if not _is_unequal(value):
        return value
    _require_axes(tuple(axes), value.values[0])
    own = {axis % len(value.shapes[0]) for axis in axes}
    others = {tuple(n for i, n in enumerate(shape) if i not in own) for shape in value.shapes}
    if len(others) > 1:
        raise ValueError(
            f"Cannot {method} per-replica values of different shapes: "
            f"{', '.join(map(str, value.shapes))}. {fix}"
        )
    return _padded(value)


def _padded(value: PerReplica) -> PerReplica:
    """Returns a value of different shapes, on the host, padded by zeros to the largest."""
    if any_deleted([row for row in value.values if isinstance(row, jax.Array)]):
        return value  # `run` names it
    shape = tuple(map(max, zip(*value.shapes, strict=True)))
    return PerReplica([_pad(row, shape) for row in value.values])


def _pad(row: Array | np.ndarray, shape: tuple[int, ...]) -> Array | np.ndarray:
    if jnp.issubdtype(row.dtype, jax.dtypes.prng_key):
        bits = jax.random.key_data(row)
        padded = jnp.asarray(_pad(bits, (*shape, *bits.shape[len(shape) :])))
        return jax.random.wrap_key_data(padded, impl=jax.random.key_impl(row))
    return np.pad(np.asarray(row), [(0, m - n) for m, n in zip(shape, row.shape, strict=True)])


def _require_axes(axes: Axes, leaf: Array | np.ndarray) -> None:
    missing = [a for a in axes or () if not -leaf.ndim <= a < leaf.ndim]
    if missing:
        raise ValueError(
            f"axis {missing[0]} is out of range for a replica's value of shape {leaf.shape}. Count "
            "the axes of one replica's value, without the replica axis."
        )


def _broadcast_mask(mask: Any, leaf: Array | np.ndarray) -> Array:
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
        neutral = np.asarray(np.inf if least else -np.inf, leaf.dtype)
        if np.isnan(neutral):  # a float of 8 bits without infinities
            neutral = jnp.finfo(leaf.dtype).max if least else jnp.finfo(leaf.dtype).min
    kept = jnp.where(keep, leaf, jnp.asarray(neutral, leaf.dtype))
    if axis is None:
        return kept
    return (jnp.min if least else jnp.max)(
        kept, axis=axis, initial=jnp.asarray(neutral, leaf.dtype)
    )
