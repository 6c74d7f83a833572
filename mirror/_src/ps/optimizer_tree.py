"""The tree of parameters that an optimizer sees on a server, and how its state is cut and joined.

An optimizer sees `{"layers": {"0": {"kernel": rows}}}`: nested dicts by the names of the leaves,
pruned to the leaves of the server. So masks and labels that are functions of the path work, and a
leaf of the state has the same path on every server and for the whole model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from mirror._src.base.types import PyTree
from mirror._src.ps.placement import Placement, rows

Path = tuple[Any, ...]


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts: `{"a": {"b": x}}` for `{"a.b": x}`.

    Raises:
        ValueError: If the name of a leaf is the beginning of another one, as `a` of `a.b`.
    """
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *outer, last = name.split(".")
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise ValueError(
                f"The variable {name!r} and another one have names of which one begins the other. "
                "Rename one of them."
            )
        node[last] = leaf
    return tree


def flatten(tree: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns leaves by their names; the inverse of `nest`."""
    leaves = {}
    for name in names:
        node: Any = tree
        for key in name.split("."):
            node = node[key]
        leaves[name] = node
    return leaves


def init_structs(
    tx: optax.GradientTransformation, leaves: Mapping[str, Any]
) -> tuple[list[tuple[Path, jax.ShapeDtypeStruct]], Any]:
    """Returns the paths, shapes and dtypes of the state of an optimizer, and its structure.

    Raises:
        ValueError: If the optimizer cannot be initialized with these leaves alone.
    """
    structs = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in leaves.items()}
    try:
        return jax.tree_util.tree_flatten_with_path(jax.eval_shape(tx.init, nest(structs)))
    except Exception as error:
        raise ValueError(
            f"`tx` cannot be initialized with the variables of one parameter server alone, "
            f"{', '.join(sorted(leaves)) or 'none'}: {type(error).__name__}: {error} "
            "Pass masks and labels of optax as functions of the parameters, not as trees of fixed "
            "structure, or use one server, ps=1."
        ) from error


def owner(path: Path, names: Mapping[str, Any]) -> str | None:
    """Returns the leaf that a leaf of the state belongs to: whose path ends its path."""
    keys: list[str] = []
    for key in reversed(path):
        if not isinstance(key, jax.tree_util.DictKey):
            break
        keys.insert(0, str(key.key))
    while keys:
        if (name := ".".join(keys)) in names:
            return name
        del keys[0]
    return None


def row_owner(path: Path, shape: Sequence[int], leaves: Mapping[str, Any]) -> str | None:
    """Returns the leaf whose rows the rows of a leaf of the state belong to; `None` without any."""
    name = owner(path, leaves)
    if name is None or not shape or not leaves[name].shape:
        return None
    return name if shape[0] == leaves[name].shape[0] else None


def join_optimizer_state(
    tx: optax.GradientTransformation,
    trained: Mapping[str, Any],
    placement: Placement,
    states: Sequence[PyTree],
) -> PyTree:
    """Returns the state of an optimizer for whole leaves, given its state on each server.

    Args:
        tx: The optimizer.
        trained: Shape and dtype of each trained leaf, whole.
        placement: Where the rows of the leaves are.
        states: The state on each server, in NumPy; `None` for a server without trained leaves.

    Returns:
        The state that `tx.init(nest(trained))` has the structure of, in NumPy. What does not belong
        to a leaf, such as a count of steps, is equal on all servers.
    """
    found: list[dict[Path, Any]] = [
        dict(jax.tree_util.tree_flatten_with_path(state)[0]) for state in states
    ]
    structs, treedef = init_structs(tx, trained)
    initial: list[Any] | None = None
    leaves = []
    for position, (path, struct) in enumerate(structs):
        name = row_owner(path, struct.shape, trained)
        held = [] if name is None else placement.holders[name]
        if len(held) > 1:
            leaves.append(np.concatenate([found[server][path] for server, _ in held]))
            continue
        values = [state[path] for state in found if path in state]
        if not values:  # No server has a trained leaf.
            initial = initial or jax.tree.leaves(tx.init(nest(trained)))
            values = [as_numpy(initial[position])]
        leaves.append(values[0])
    return treedef.unflatten(leaves)


def split_optimizer_state(
    tx: optax.GradientTransformation,
    trained: Mapping[str, Any],
    placement: Placement,
    state: PyTree,
) -> list[PyTree]:
    """Returns the state of an optimizer for each server; the inverse of `join_optimizer_state`.

    Args:
        tx: The optimizer.
        trained: Shape and dtype of each trained leaf, whole.
        placement: Where the rows of the leaves are.
        state: The state for whole leaves, of the structure of `tx.init(nest(trained))`.

    Returns:
        Its rows for each server, as views; `None` for a server without trained leaves.

    Raises:
        ValueError: If the state has another structure.
    """
    structs, treedef = init_structs(tx, trained)
    if jax.tree.structure(state) != treedef:
        raise ValueError(
            f"The optimizer's state must have the structure of tx.init, {treedef}, got "
            f"{jax.tree.structure(state)}. Was it saved with another optimizer?"
        )
    by_path = dict(jax.tree_util.tree_flatten_with_path(state)[0])
    shapes = {path: struct.shape for path, struct in structs}
    states: list[PyTree] = []
    for slices in placement.servers:
        own = {part.leaf: part for part in slices if part.leaf in trained}
        if not own:
            states.append(None)
            continue
        parts, inner = init_structs(tx, own)
        leaves = []
        for path, _ in parts:
            name = row_owner(path, shapes[path], trained)
            value = as_numpy(by_path[path])
            leaves.append(value if name is None else rows(value, own[name]))
        states.append(inner.unflatten(leaves))
    return states


def as_numpy(leaf: Any) -> np.ndarray:
    """Returns an array in NumPy; the data of a random key. It may be a view."""
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def as_jax(leaf: np.ndarray, like: Any) -> jax.Array:
    """Returns a copy of an array as an array of JAX with the dtype and the weak type of another."""
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        # JAX tells the implementation of an array alone, also of a traced one.
        impls: list[Any] = []
        jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)
        return jax.random.wrap_key_data(jax.numpy.array(leaf), impl=impls[0])
    if getattr(like, "weak_type", False) and not np.ndim(leaf):
        return jax.numpy.asarray(np.asarray(leaf).item())
    return jax.numpy.array(leaf, like.dtype)
