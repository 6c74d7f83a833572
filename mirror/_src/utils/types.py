"""The names that every other module uses: arrays, trees, the replica axis."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

Array: TypeAlias = jax.Array
ArrayLike: TypeAlias = jax.typing.ArrayLike
PyTree: TypeAlias = Any
StepFunction: TypeAlias = Callable[..., Any]

REPLICA_AXIS = "replica"
"""The name of the replica axis: `jax.lax.pmean(x, mirror.REPLICA_AXIS)` works inside `run`."""
