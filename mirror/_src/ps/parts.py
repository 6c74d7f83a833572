"""The parts that the global batch of a synchronous step is cut into, and their joined result."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import describe
from mirror._src.base.naming import leaf_names, name_of
from mirror._src.base.types import PyTree
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.per_replica import PerReplica, is_per_replica, per_replica
from mirror._src.ps.joins import Join
from mirror._src.ps.replies import PerReplicaResult, Result


def num_rows(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Returns the number of rows of a batch; None without an array that has rows.

    Args:
        fn: The step, for the names of its arguments.
        args: Its positional arguments; None stands for model and optimizer.
        kwargs: Its keyword arguments.

    Raises:
        ValueError: If the leaves differ in it, or it is 0.
        TypeError: If a leaf is a `PerReplica` or a random key.
    """
    tree = (tuple(args), dict(kwargs))
    leaves = jax.tree.leaves(tree, is_leaf=is_per_replica)
    sizes = {leaf.shape[0] for leaf in leaves if has_rows(leaf)}
    is_odd = any(is_per_replica(leaf) or _is_key(leaf) for leaf in leaves)
    if len(sizes) == 1 and 0 not in sizes and not is_odd:
        return int(sizes.pop())
    rows: dict[str, int] = {}
    fn_name = name_of(fn)
    for name, leaf in zip(leaf_names(fn, tree), leaves, strict=True):
        if is_per_replica(leaf):
            raise TypeError(
                f"{name} of {fn_name} must be a global batch, got {leaf!r:.60}. Pass plain "
                "arrays: the rows are split across the workers."
            )
        if _is_key(leaf):
            raise TypeError(
                f"{name} of {fn_name} is a random key, which cannot be sent to a worker. Pass a "
                "seed and call jax.random.key(seed) in the function, or keep an nnx.Rngs in the "
                "model."
            )
        if has_rows(leaf):
            rows[name] = leaf.shape[0]
    if len(set(rows.values())) > 1:
        text = ", ".join(f"{name} has {count}" for name, count in rows.items())
        raise ValueError(
            f"The arrays of the batch for {fn_name} must have the same number of rows, but {text}. "
            "Pass constants in the closure of the function."
        )
    size = next(iter(rows.values()), None)
    if size == 0:
        raise ValueError(f"The batch for {fn_name} must have at least one row. Skip empty batches.")
    return size


def has_rows(leaf: Any) -> bool:
    """Whether a leaf of the arguments is split by rows: an array with at least one axis."""
    return isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim > 0


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def bounds(size: int, num_workers: int, num_devices: int, fn_name: str) -> list[tuple[int, int]]:
    """Returns start and stop of the rows of each part: nearly equal multiples of `num_devices`.

    Raises:
        ValueError: If the rows cannot be divided among the devices of the workers.
    """
    if size % num_devices:
        raise ValueError(
            f"The batch for {fn_name} must be divisible by devices_per_worker={num_devices}, got "
            f"{size} rows. Use a multiple of {num_devices}, or devices_per_worker=1."
        )
    units = size // num_devices
    num_parts = min(num_workers, units)
    starts = [first_row(part, num_parts, size, num_devices) for part in range(num_parts + 1)]
    return list(itertools.pairwise(starts))


def first_row(part: int, num_parts: int, size: int, num_devices: int) -> int:
    """Returns the first row of a part of a batch. The first parts are the longer ones."""
    least, longer = divmod(size // num_devices, num_parts)
    return (part * least + min(part, longer)) * num_devices


def cut(tree: PyTree, start: int, stop: int) -> PyTree:
    """Returns rows of all arrays of a batch, in NumPy; other leaves as they are."""

    def rows(leaf: Any) -> Any:
        if has_rows(leaf):
            return np.asarray(leaf[start:stop])
        return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(rows, tree)


def on_replicas(tree: PyTree, replicas: ReplicaDevices) -> PyTree:
    """Splits the rows of a part across the replicas of a worker, and moves them to the devices.

    The devices may share memory with the arrays, which must not change as long as the part runs.

    Args:
        tree: The arguments.
        replicas: The replicas, which are on devices of one kind.
    """
    leaves, treedef = jax.tree.flatten(tree)
    shapes = {
        i: (len(replicas), leaf.shape[0] // len(replicas), *leaf.shape[1:])
        for i, leaf in enumerate(leaves)
        if has_rows(leaf)
    }
    split = [np.reshape(leaves[i], shape) for i, shape in shapes.items()]
    for i, stacked in zip(shapes, replicas.borrow(split, replicas.stacked), strict=True):
        leaves[i] = per_replica(stacked)
    return jax.tree.unflatten(treedef, leaves)


def as_numpy(result: PyTree) -> PyTree:
    """Converts what a step returned on a worker to NumPy."""

    def convert(leaf: Any) -> Any:
        if is_per_replica(leaf):
            return PerReplicaResult(tuple(np.asarray(value) for value in leaf.values))
        return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(convert, result, is_leaf=is_per_replica)


def joined(results: Sequence[Result]) -> PyTree:
    """Returns what a step returned, given the results of its parts.

    It is what all replicas in one program return; see `joins`. Per-replica values remain
    per-replica, in the order of the parts.
    """
    total = sum(result.weight for result in results)
    shares = [result.weight / total if total else 1 / len(results) for result in results]
    leaves: list[tuple[list[Any], Any]]
    leaves = [jax.tree.flatten(result.value, is_leaf=_is_own) for result in results]
    treedef = leaves[0][1]
    joins = map(Join, results[0].joins or [Join.SAME.value] * len(leaves[0][0]))
    try:
        if any(other != treedef for _, other in leaves):
            raise ValueError
        values = [
            _joined(values, join, shares)
            for *values, join in zip(*(own for own, _ in leaves), joins, strict=True)
        ]
    except ValueError as error:
        raise ValueError(
            "The parts of a step returned results of different structure or shape: "
            f"{', '.join(describe(result.value) for result in results)}."
        ) from error
    return jax.tree.unflatten(treedef, values)


def _is_own(node: Any) -> bool:
    return isinstance(node, PerReplicaResult)


def _joined(values: list[Any], join: Join, shares: Sequence[float]) -> Any:
    first = values[0]
    if isinstance(first, PerReplicaResult):
        return PerReplica([row for value in values for row in value.values])
    if len(values) == 1 or join is Join.SAME:
        return first
    if any(np.shape(value) != np.shape(first) for value in values):
        raise ValueError
    if join in (Join.MAX, Join.MIN):
        reduce = np.maximum if join is Join.MAX else np.minimum
        return np.asarray(functools.reduce(reduce, values))
    if not jnp.issubdtype(first.dtype, jnp.inexact):
        return np.sum(values, axis=0, dtype=first.dtype)
    is_complex = jnp.issubdtype(first.dtype, jnp.complexfloating)
    wide = np.complex128 if is_complex else np.float64
    factors = shares if join is Join.MEAN else [1.0] * len(values)
    pairs = [(f, v) for f, v in zip(factors, values, strict=True) if f]
    return np.asarray(sum(f * v.astype(wide) for f, v in pairs)).astype(first.dtype)
