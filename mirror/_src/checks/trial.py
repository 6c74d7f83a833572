"""Copies of objects and arguments, to try a step without changing the originals."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.run.arguments import ObjectPlaceholder
from mirror._src.values.per_replica import PerReplica, is_per_replica
from mirror._src.variables.variable import Variable


def copy_of(objects: Sequence[Any]) -> list[Any]:
    """Copies of nnx objects, which share with each other what the objects share."""
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
    """Gives variables the values of copies of them, and keeps the copies."""
    for variable, copied in zip(variables, copy_of(list(saved)), strict=True):
        variable.set_raw_value(copied.get_raw_value())


def with_objects(tree: Any, objects: list[Any]) -> Any:
    """The arguments of a call with these objects in the places where others were taken out."""
    return jax.tree.map(
        lambda node: objects[node.number] if isinstance(node, ObjectPlaceholder) else node,
        tree,
        is_leaf=lambda node: is_per_replica(node) or isinstance(node, ObjectPlaceholder),
    )


def whole_batch(leaf: Any) -> Any:
    """A per-replica batch as the one batch of a lone replica."""
    if not is_per_replica(leaf):
        return leaf
    rows = [np.asarray(value) for value in leaf.values]
    if rows[0].ndim == 0:
        raise ValueError(
            f"The replicas' batches are put together to one, but {leaf!r} has one scalar for each "
            "replica and no batch axis. Pass it mirrored, or in a batch."
        )
    return PerReplica([np.concatenate(rows)])
