"""Operations on `"on_read"` variables, which have one value per replica."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.errors import counted
from mirror._src.base.types import PyTree
from mirror._src.devices.backend import names
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.engine.per_replica import held_by, is_per_replica
from mirror._src.engine.storage import shares, store_per_replica
from mirror._src.engine.variable import Variable


def is_on_read(holder: object) -> bool:
    """Whether an object is a variable with one value per replica."""
    return isinstance(holder, Variable) and holder.is_on_read


def collapse(objects: Sequence[Any]) -> None:
    """Replaces per-replica values of variables by the single value that is read outside a step."""
    for _, node in nnx.iter_graph(tuple(objects)):
        if is_on_read(node):
            value = node.get_raw_value()
            is_unreadable = node.aggregation == "none" and is_per_replica(value)
            single = np.asarray(value.values[0]) if is_unreadable else node[...]
            node.set_raw_value(jnp.asarray(single))


def unwrapped(tree: PyTree) -> PyTree:
    """Replaces variables by their values: a `PerReplica` for an `"on_read"` variable."""
    return jax.tree.map(
        lambda leaf: leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable) or is_per_replica(leaf),
    )


def spread_over(variable: Variable, replicas: ReplicaDevices) -> Any:
    """Returns the values of an `"on_read"` variable, laid out on these replicas.

    A variable that has had a single value until now reads the same afterwards.

    Raises:
        ValueError: If the variable has values for another number of replicas.
    """
    value = variable.get_raw_value()
    if not is_per_replica(value):
        array = np.asarray(value)
        is_sum = variable.aggregation == "sum"
        rows = shares(array, len(replicas)) if is_sum else [array] * len(replicas)
        return held_by(store_per_replica(rows, replicas))
    if value.num_replicas != len(replicas):
        raise ValueError(
            f"The strategy has {counted(len(replicas), 'replica')} on {names(replicas.devices)}, "
            f"but {variable.described} has values for {value.num_replicas}. Create the variable "
            "inside the strategy's scope()."
        )
    stacked = held_by(value)
    is_in_place = isinstance(stacked, jax.Array) and stacked.sharding == replicas.stacked
    if is_in_place or (isinstance(stacked, UnstackedArrays) and replicas.are_mixed):
        return stacked
    return replicas.stack(np.stack([np.asarray(row) for row in value.values]))
