"""Arguments and results of scheduled functions: checked, pickled, split, and converted."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.errors import describe
from mirror._src.base.naming import leaf_names, name_of
from mirror._src.base.tracebacks import users_function
from mirror._src.base.types import PyTree
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import require_fits
from mirror._src.engine.per_replica import PerReplica, is_per_replica, per_replica
from mirror._src.ps.handles import RemoteValue


class ArgumentOfStep(NamedTuple):
    """Stands for the model, the optimizer or the next batch among the arguments of a step."""

    kind: str  # "model", "optimizer" or "next"
    iterator: Any = None


def is_place(node: Any) -> bool:
    """Whether a node among the arguments of a step stands for something else."""
    return isinstance(node, ArgumentOfStep)


def filled(tree: PyTree, value_for: Callable[[ArgumentOfStep], Any]) -> PyTree:
    """Replaces each `ArgumentOfStep` among the arguments of a step."""
    return jax.tree.map(
        lambda node: value_for(node) if is_place(node) else node, tree, is_leaf=is_place
    )


def without_places(tree: PyTree) -> PyTree:
    """Returns the arguments of a step without the places of the others."""
    return filled(tree, lambda _: None)


class PerReplicaResult(NamedTuple):
    """A result that differs between the replicas of a worker."""

    values: tuple[Any, ...]


def pickled(dumps: Callable[[Any], Any], value: Any, what: str = "") -> Any:
    """Returns the pickle of a function, or of arguments, which `what` names.

    Raises:
        TypeError: If it cannot be pickled; the message names the captured variable.
    """
    try:
        return dumps(value)
    except Exception as error:
        users = users_function(value)  # a step of `Trainer` has its loss function
        if users is not value and _is_picklable(dumps, users):
            users = value
        value, what = users, what or name_of(users)
        culprit = _culprit(dumps, value) if callable(value) else ""
        raise TypeError(
            f"Cannot send {what} to a worker{culprit}: {type(error).__name__}: {error} Create such "
            "objects inside the function, or pass arrays and plain values."
        ) from error


def require_no_remote_values(tree: Any, fn_name: str) -> None:
    """Rejects arguments that are results of other scheduled functions.

    Raises:
        TypeError: If there is one.
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Pytree))
    if any(isinstance(leaf, RemoteValue) for leaf in leaves):
        raise TypeError(
            f"{fn_name} got a RemoteValue as an argument. Pass its result: value.fetch()."
        )


def _culprit(dumps: Callable[[Any], Any], fn: Callable[..., Any]) -> str:
    """Returns which captured variable of a function cannot be pickled, for the message."""
    try:
        captured = inspect.getclosurevars(inspect.unwrap(fn))
    except (TypeError, ValueError):
        return ""
    for name, value in {**captured.globals, **captured.nonlocals}.items():
        if not _is_picklable(dumps, value):
            return f", because it captures {name!r}, {describe(value)}"
    return ""


def _is_picklable(dumps: Callable[[Any], Any], value: Any) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True


def num_rows(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Returns the number of rows of a batch; None without an array that has rows.

    Args:
        fn: The step, for the names of its arguments.
        args: Its positional arguments; None stands for model and optimizer.
        kwargs: Its keyword arguments.

    Raises:
        ValueError: If the leaves differ in it, it is 0, or an integer does not fit.
        TypeError: If a leaf is a `PerReplica` or a random key.
    """
    tree = (tuple(args), dict(kwargs))
    leaves = jax.tree.leaves(tree, is_leaf=is_per_replica)
    for i, leaf in enumerate(leaves):
        its_name = lambda i=i: leaf_names(fn, tree)[i]  # noqa: E731
        require_fits(its_name, leaf)
    sizes = {leaf.shape[0] for leaf in leaves if has_rows(leaf)}
    is_odd = any(is_per_replica(leaf) or _is_key(leaf) for leaf in leaves)
    if len(sizes) == 1 and 0 not in sizes and not is_odd:
        return int(sizes.pop())
    rows: dict[str, int] = {}
    fn_name = name_of(fn)
    for name, leaf in zip(leaf_names(fn, tree), leaves, strict=True):
        if is_per_replica(leaf):
            raise TypeError(
                f"{name} of {fn_name} must be plain arrays, got {leaf!r:.60}. Pass the "
                "batch: its rows are split across the devices of a worker."
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


def on_host(tree: PyTree) -> PyTree:
    """Returns the arguments of a step with its arrays in NumPy."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree
    )


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


def as_users(result: PyTree) -> PyTree:
    """Converts what `as_numpy` returned to what a step returns."""
    return jax.tree.map(
        lambda leaf: PerReplica(list(leaf.values)) if _is_own(leaf) else leaf,
        result,
        is_leaf=_is_own,
    )


def _is_own(node: Any) -> bool:
    return isinstance(node, PerReplicaResult)
