"""Types of arrays and trees, and the name of the replica axis."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar, final

import jax
import numpy as np

Array: TypeAlias = jax.Array
ArrayLike: TypeAlias = jax.typing.ArrayLike
PyTree: TypeAlias = Any
Shard: TypeAlias = Literal["none", "optimizer", "model", "auto"]
StepFunction: TypeAlias = Callable[..., Any]

K = TypeVar("K")
A = TypeVar("A", bound=np.ndarray | jax.Array)


@final
class Unknown:
    """Type of batches that type checkers know nothing about: only `Any` is assignable to it."""


ARRAY_LIKE = (jax.Array, np.ndarray, np.generic, int, float, complex)
"""Types of arrays and numbers, for `isinstance`. A bool is an int."""

REPLICA_AXIS = "replica"
"""Name of the replica axis: `jax.lax.pmean(x, mirror.REPLICA_AXIS)` works inside `run`."""
