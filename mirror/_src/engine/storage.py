"""Stores the value of a `Variable`, one array or one per replica."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.errors import describe
from mirror._src.base.foreign_arrays import to_array
from mirror._src.base.types import Array, is_numeric, long_fix
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import UnstackedArrays, host_copy, place_like, require_fits
from mirror._src.engine.all_reduce import AllReduce
from mirror._src.engine.per_replica import (
    PerReplica,
    held_by,
    is_per_replica,
    local_ids,
    per_replica,
    spans_processes,
)

slot: Any = vars(nnx.Variable).get("_raw_value")

write_value: Any = getattr(slot, "__set__", nnx.Variable.set_raw_value)
"""Writes the raw value of a variable.

`Variable.set_raw_value` checks the trace level twice and takes 2 us, which for 600 variables is
most of the overhead of a step. The checks are not needed: `run` works only outside traces
(`jax.set_mesh` rejects it elsewhere). So the slot is written directly. It is private (flax 0.12.8
to 0.12.12) and used only if it exists; `test_flax_still_has_the_private_slot_of_variables` in
`tests/engine/test_runner.py` fails when flax removes it.
"""
read_value: Any = getattr(slot, "__get__", nnx.Variable.get_raw_value)
"""Reads the raw value of a variable itself, even where a stand-in replaces it in a trace."""


Synchronization: TypeAlias = Literal["auto", "on_write", "on_read"]
Aggregation: TypeAlias = Literal["none", "sum", "mean", "only_first_replica"]


def label(name: str | None) -> str:
    """Returns the name of a variable in messages.

    >>> label("v"), label(None)
    ("variable 'v'", 'an unnamed variable')
    """
    return f"variable {name!r}" if name else "an unnamed variable"


def initial_value(value: Any, dtype: Any, name: str | None) -> Array:
    """Returns the initial value of a variable as an array.

    Raises:
        ValueError, TypeError: If it is neither an array nor a number; see `as_array`.
    """
    if callable(value) and not isinstance(value, jax.Array | np.ndarray | nnx.Variable):
        value = value()
    if isinstance(value, nnx.Variable):
        value = value.get_value()
    if value is None or is_per_replica(value) or isinstance(value, str):
        raise ValueError(
            f"The initial value of {label(name)} must be an array or a number, got "
            f"{describe(value)}. Pass one value, which all replicas start with."
        )
    array = as_array(f"The initial value of {label(name)}", value, dtype)
    # The first assignment would drop a weak type, so that the step would be compiled again.
    return array.astype(array.dtype) if getattr(array, "weak_type", False) else array


def as_array(name: str, value: Any, dtype: Any = None) -> Array:
    """Returns a value of the user as a JAX array.

    Raises:
        TypeError: If it is neither an array of numbers nor a number, or has masked values.
        ValueError: If it contains an integer that does not fit 32 bits, which JAX would cut off.
    """
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
        return jnp.asarray(value, dtype)
    array = to_array(name, value)
    if not is_numeric(array.dtype):
        fix = long_fix(array, "Pass numbers.")
        raise TypeError(f"{name} must be an array or a number, got {describe(value)}. {fix}")
    if dtype is None:
        require_fits(name, array)
    # JAX rejects Python integers that do not fit `dtype`, and wraps the ones of NumPy.
    return jnp.asarray(value if isinstance(value, int) else host_copy(array), dtype)


def one_of(value: Any, choices: Any, argument: str, name: str | None) -> Any:
    """Returns the value in lower case.

    Raises:
        ValueError: If it is not one of the choices.
    """
    choice = value.lower() if isinstance(value, str) else value
    if choice not in get_args(choices):
        known = ", ".join(map(repr, get_args(choices)))
        raise ValueError(f"`{argument}` of {label(name)} must be one of {known}, got {value!r}.")
    return choice


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
