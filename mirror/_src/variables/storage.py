"""How a `Variable` stores its value: as one array, or as one array per replica."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import place_like
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.values.per_replica import PerReplica, held_by, is_per_replica, per_replica


def are_arrays(value: PerReplica) -> bool:
    """Whether it holds arrays: flax fills trees that it shows with something else."""
    return isinstance(held_by(value), jax.Array | np.ndarray | UnstackedArrays)


def shape_of(held: Any) -> tuple[int, ...]:
    """Returns the shape of the value, per replica if each has its own."""
    return held.shapes[0] if is_per_replica(held) else jnp.shape(held)


def dtype_of(held: Any) -> Any:
    """Returns the dtype of the value."""
    return held.dtype if hasattr(held, "dtype") else jnp.result_type(held)


def shares(value: np.ndarray, count: int) -> list[np.ndarray]:
    """So many arrays that add up to one, exactly if they are integers."""
    if not jnp.issubdtype(value.dtype, jnp.integer):
        return [(value / count).astype(value.dtype)] * count
    share = np.asarray(value // count, value.dtype)
    return [np.asarray(value - share * (count - 1), value.dtype), *[share] * (count - 1)]


def spread(rows: Sequence[Any], replicas: ReplicaDevices) -> PerReplica:
    """Stores one array on each replica."""
    return per_replica(replicas.stack(np.stack([np.asarray(row) for row in rows])))


def rows_like(rows: Sequence[np.ndarray], like: PerReplica) -> Any:
    """Stores one array per replica in the same way as another value."""
    held = held_by(like)
    if isinstance(held, UnstackedArrays):
        return UnstackedArrays(
            [place_like(r, part) for r, part in zip(rows, held.arrays, strict=True)]
        )
    return place_like(np.stack(rows), held)
