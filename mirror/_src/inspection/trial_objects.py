"""Copies of nnx objects and arguments, so that a trial step does not change the originals."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.types import Array, PyTree
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.engine.arguments import ObjectPlaceholder
from mirror._src.engine.per_replica import PerReplica, is_per_replica, spans_processes
from mirror._src.engine.runner import Runner
from mirror._src.engine.scopes import current_frame
from mirror._src.engine.variable import Variable


def copy_of(objects: Sequence[Any]) -> list[Any]:
    """Copies nnx objects; variables that several objects share are shared by the copies too."""
    graphdef: Any
    graphdef, state = nnx.split(tuple(objects))
    return list(nnx.merge(graphdef, jax.tree.map(_copy, state)))


def _copy(leaf: Any) -> Any:
    return (
        UnstackedArrays([jnp.copy(x) for x in leaf.arrays])
        if isinstance(leaf, UnstackedArrays)
        else jnp.copy(leaf)
    )


def restore(variables: Sequence[Variable], saved: Sequence[Any]) -> None:
    """Sets variables to the values of earlier copies; the copies stay usable."""
    for variable, copied in zip(variables, copy_of(list(saved)), strict=True):
        variable.set_raw_value(copied.get_raw_value())


def with_objects(tree: Any, objects: list[Any]) -> Any:
    """Replaces the placeholders in the arguments of a call by these objects."""
    return jax.tree.map(
        lambda node: objects[node.number] if isinstance(node, ObjectPlaceholder) else node,
        tree,
        is_leaf=lambda node: is_per_replica(node) or isinstance(node, ObjectPlaceholder),
    )


def gathered(runner: Runner, tree: PyTree) -> PyTree:
    """Returns the tree with all values of `PerReplica` leaves in this process.

    A collective if they are in several processes; every process must call it.
    """
    leaves: list[Any]
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_per_replica)
    spread = [i for i, leaf in enumerate(leaves) if is_per_replica(leaf) and spans_processes(leaf)]
    if spread:
        arrays = runner.run(_stack, ([leaves[i] for i in spread],), {})
        for i, array in zip(spread, arrays, strict=True):
            leaves[i] = PerReplica.from_stacked(np.asarray(array))
    return treedef.unflatten(leaves)


def _stack(leaves: list[Array]) -> list[Array]:
    frame = current_frame()
    assert frame is not None
    assert frame.replica is not None  # a runner calls this
    return frame.replica.all_gather([leaf[None] for leaf in leaves])


def whole_batch(leaf: Any) -> Any:
    """Joins the replicas' batches into one batch for a single replica.

    Raises:
        ValueError: If the leaf is a `PerReplica` of scalars.
    """
    if not is_per_replica(leaf):
        return leaf
    rows = [np.asarray(value) for value in leaf.values]
    if rows[0].ndim == 0:
        raise ValueError(
            f"Cannot join the replicas' values of {leaf!r} into one batch: scalars have no batch "
            "axis. Pass a mirrored value, or one with a batch axis."
        )
    return PerReplica([np.concatenate(rows)])
