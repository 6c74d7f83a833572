"""Operations on `"on_read"` variables, of which each replica has a value of its own."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.devices.backend import names
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.utils.types import PyTree
from mirror._src.values.per_replica import held_by, is_per_replica
from mirror._src.variables.storage import shares, spread
from mirror._src.variables.variable import Variable


def is_own(holder: object) -> bool:
    """Whether it is a variable of which each replica has a value of its own."""
    return isinstance(holder, Variable) and holder.is_on_read


def collapse(objects: Sequence[Any]) -> None:
    """Gives the variables of which each replica has a value one value, as it is read outside."""
    for _, node in nnx.iter_graph(tuple(objects)):
        if is_own(node):
            held = node.get_raw_value()
            none = node.aggregation == "none" and is_per_replica(held)
            node.set_raw_value(jnp.asarray(np.asarray(held.values[0]) if none else node[...]))


def unwrapped(tree: PyTree) -> PyTree:
    """The tree with what its variables hold in their place: a `PerReplica`, if they are on_read."""
    return jax.tree.map(
        lambda leaf: leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable) or is_per_replica(leaf),
    )


def spread_over(variable: Variable, replicas: ReplicaDevices) -> Any:
    """What holds an `"on_read"` variable's values on these replicas.

    One that has had one value only until now reads the same afterwards.

    Raises:
        ValueError: it has values for another number of replicas.
    """
    held = variable.get_raw_value()
    if not is_per_replica(held):
        array = np.asarray(held)
        shared = variable.aggregation == "sum"
        rows = shares(array, len(replicas)) if shared else [array] * len(replicas)
        return held_by(spread(rows, replicas))
    if held.num_replicas != len(replicas):
        raise ValueError(
            f"{variable.described} has values for {held.num_replicas} replicas and was given to a "
            f"strategy of {len(replicas)}, {names(replicas.devices)}. Create it in that strategy's "
            "scope."
        )
    stacked = held_by(held)
    there = isinstance(stacked, jax.Array) and stacked.sharding == replicas.stacked
    if there or (isinstance(stacked, UnstackedArrays) and replicas.are_mixed):
        return stacked
    return replicas.stack(np.stack([np.asarray(row) for row in held.values]))
