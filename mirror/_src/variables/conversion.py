"""Checks and converts the arguments of `Variable`, and the values that are assigned to it."""

from typing import Any, Literal, Protocol, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.utils.errors import ReplicaDivergenceError, describe
from mirror._src.utils.types import Array
from mirror._src.values.per_replica import is_per_replica

Synchronization: TypeAlias = Literal["auto", "on_write", "on_read"]
Aggregation: TypeAlias = Literal["none", "sum", "mean", "only_first_replica"]


class Assignable(Protocol):
    """What `convert` needs of a variable."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        ...

    @property
    def dtype(self) -> Any:
        """The dtype of the value."""
        ...

    @property
    def described(self) -> str:
        """What messages call it."""
        ...


def convert(variable: Assignable, value: Any) -> Any:
    """Returns the value in the variable's shape and dtype.

    Raises:
        ValueError, TypeError, ReplicaDivergenceError: it cannot be; see `assign`.
    """
    if isinstance(value, nnx.Variable):
        value = value.get_value()
    if is_per_replica(value):
        raise ReplicaDivergenceError(
            f"{value!r} was assigned to {variable.described}, which is the same on all replicas. "
            "Reduce it first, strategy.reduce('mean', x), or assign inside the step."
        )
    shape, dtype = variable.shape, variable.dtype
    kinds = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, list, tuple)
    if not isinstance(value, kinds):
        raise TypeError(f"{describe(value)} was assigned to {variable.described}: it is no array.")
    exact = isinstance(value, jax.Array | np.ndarray | np.generic)
    array = jnp.asarray(value)
    weak = getattr(array, "weak_type", False) or not exact
    if weak and not jnp.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(
            f"{describe(value)} was assigned to {variable.described} of {dtype}, which cannot hold "
            f"it. Convert it: jnp.asarray(x).astype({str(dtype)!r})."
        )
    if not weak and array.dtype != dtype:
        raise ValueError(
            f"{describe(array)} was assigned to {variable.described} of {dtype}. Convert it: "
            f"x.astype({str(dtype)!r})."
        )
    if array.shape != shape:
        raise ValueError(
            f"{describe(array)} was assigned to {variable.described} of shape {shape}. Pass an "
            "array of that shape."
        )
    return array.astype(dtype)


def initial_value(value: Any, dtype: Any, name: str | None) -> Array:
    """Returns the first value of a variable as an array.

    Raises:
        ValueError: If it is neither an array nor a number.
    """
    if callable(value) and not isinstance(value, jax.Array | np.ndarray | nnx.Variable):
        value = value()
    if isinstance(value, nnx.Variable):
        value = value.get_value()
    if value is None or is_per_replica(value) or isinstance(value, str):
        raise ValueError(
            f"Variable {name or ''!r} starts with {describe(value)}. Pass an array or a number, "
            "the same for all replicas."
        )
    array = jnp.asarray(value, dtype)
    # A weak type would go with the first assignment, and the step be compiled anew.
    return array.astype(array.dtype) if getattr(array, "weak_type", False) else array


_TENSORFLOWS = {
    *("shape", "validate_shape", "caching_device", "variable_def", "import_scope", "constraint"),
    "experimental_enable_variable_lifting",
}


def refuse_tensorflows(metadata: dict[str, Any]) -> None:
    """Rejects the arguments that only `tf.Variable` has.

    Raises:
        TypeError: If `metadata` contains one.
    """
    for name in metadata:
        if name in _TENSORFLOWS:
            raise TypeError(
                f"Variable({name}=...) is TensorFlow's and has no counterpart here. Leave it out; "
                "a variable keeps the shape and the dtype that it is created with."
            )


def one_of(value: Any, choices: Any, what: str, name: str | None) -> Any:
    """Returns the value in lower case, if it is one of the choices.

    Raises:
        ValueError: If it is not.
    """
    found = value.lower() if isinstance(value, str) else value
    if found not in get_args(choices):
        known = ", ".join(map(repr, get_args(choices)))
        raise ValueError(f"{what}={value!r} of variable {name or ''!r} is none of {known}.")
    return found


def require_meaning(array: Array, aggregation: Aggregation, name: str | None) -> None:
    """Checks that the result of the aggregation has the dtype of the variable.

    Raises:
        ValueError: If it has another dtype.
    """
    mean_of_exact = aggregation == "mean" and not jnp.issubdtype(array.dtype, jnp.inexact)
    if mean_of_exact or (aggregation == "sum" and array.dtype == jnp.bool_):
        raise ValueError(
            f"aggregation={aggregation!r} of variable {name or ''!r} of {array.dtype}: the result "
            "has another dtype. Pass dtype='float32' for a mean, 'int32' for a count."
        )
