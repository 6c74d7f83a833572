"""Storage of the value of a `Variable`: one array, or one array per replica."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import place_like
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.engine.all_reduce import AllReduce
from mirror._src.engine.per_replica import (
    PerReplica,
    held_by,
    is_per_replica,
    local_ids,
    per_replica,
    spans_processes,
)


def are_arrays(value: PerReplica) -> bool:
    """Whether a `PerReplica` contains arrays; flax prints trees that contain other objects."""
    return isinstance(held_by(value), jax.Array | np.ndarray | UnstackedArrays)


def shape_of(value: Any) -> tuple[int, ...]:
    """Returns the shape of a value; of a `PerReplica`, the shape on one replica."""
    return value.shapes[0] if is_per_replica(value) else jnp.shape(value)


def dtype_of(value: Any) -> Any:
    """Returns the dtype of a value."""
    return value.dtype if hasattr(value, "dtype") else jnp.result_type(value)


def shares(value: np.ndarray, count: int) -> list[np.ndarray]:
    """Splits a value into `count` summands; the sum is exact for integers."""
    if not jnp.issubdtype(value.dtype, jnp.integer):
        return [(value / count).astype(value.dtype)] * count
    share = np.asarray(value // count, value.dtype)
    return [np.asarray(value - share * (count - 1), value.dtype), *[share] * (count - 1)]


def store_per_replica(rows: Sequence[Any], replicas: ReplicaDevices) -> PerReplica:
    """Stores one array on each replica."""
    return per_replica(replicas.stack(np.stack([np.asarray(row) for row in rows])))


def first_value(value: PerReplica) -> np.ndarray:
    """Returns the value of replica 0; a collective if it is on another process."""
    if not spans_processes(value):
        return np.asarray(value.values[0])
    rows = [np.asarray(row) for row in value.values]
    kept = [
        row if i == 0 else np.zeros_like(row) for i, row in zip(local_ids(value), rows, strict=True)
    ]
    total = AllReduce().reduce("sum", per_replica(rows_like(kept, value)))
    return np.asarray(total).astype(value.dtype)  # the sum of booleans is an integer


def rows_like(rows: Sequence[np.ndarray], like: PerReplica) -> Any:
    """Stores one array per replica in the same way as another value.

    Args:
        rows: One array per replica; with several processes, one per replica of this process.
        like: The other value.
    """
    stored: Any = held_by(like)
    if spans_processes(like):
        return jax.make_array_from_process_local_data(stored.sharding, np.stack(rows), stored.shape)
    if isinstance(stored, UnstackedArrays):
        return UnstackedArrays(list(map(place_like, rows, stored.arrays)))
    return place_like(np.stack(rows), stored)
