"""Checks and converts the arguments of `Variable`, and the values that are assigned to it."""

from typing import Any, Literal, Protocol, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.errors import ReplicaDivergenceError, describe
from mirror._src.base.types import ARRAY_LIKE, Array
from mirror._src.engine.per_replica import is_per_replica
from mirror._src.engine.reduce_op import ReduceOp, result_dtype

Synchronization: TypeAlias = Literal["auto", "on_write", "on_read"]
Aggregation: TypeAlias = Literal["none", "sum", "mean", "only_first_replica"]


class Assignable(Protocol):
    """Interface that `convert` requires of a variable."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        ...

    @property
    def dtype(self) -> Any:
        """Dtype of the value."""
        ...

    @property
    def described(self) -> str:
        """Name of the variable in messages."""
        ...


def label(name: str | None) -> str:
    """Returns the name of a variable in messages.

    >>> label("v"), label(None)
    ("variable 'v'", 'an unnamed variable')
    """
    return f"variable {name!r}" if name else "an unnamed variable"


def convert(variable: Assignable, value: Any) -> Any:
    """Converts a value to the shape and dtype of a variable.

    Raises:
        ValueError, TypeError, ReplicaDivergenceError: If it cannot be converted; see
            `Variable.assign`.
    """
    if isinstance(value, nnx.Variable):
        value = value.get_value()
    if is_per_replica(value):
        raise ReplicaDivergenceError(
            f"Cannot assign {value!r} to {variable.described}, which is the same on all replicas. "
            "Reduce it first, strategy.reduce('mean', x), or assign inside the step."
        )
    shape, dtype = variable.shape, variable.dtype
    if not isinstance(value, (*ARRAY_LIKE, list, tuple)):
        raise TypeError(
            f"Cannot assign {describe(value)} to {variable.described}: expected an array or a "
            "number."
        )
    is_typed = isinstance(value, jax.Array | np.ndarray | np.generic)
    array = jnp.asarray(value)
    is_weak = getattr(array, "weak_type", False) or not is_typed
    if is_weak and not jnp.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(
            f"Cannot assign {describe(value)} to {variable.described}, which has dtype {dtype}. "
            f"Convert it: jnp.asarray(x).astype({str(dtype)!r})."
        )
    if not is_weak and array.dtype != dtype:
        raise ValueError(
            f"Cannot assign {describe(array)} to {variable.described}, which has dtype {dtype}. "
            f"Convert it: x.astype({str(dtype)!r})."
        )
    if array.shape != shape:
        raise ValueError(
            f"Cannot assign {describe(array)} to {variable.described}, which has shape {shape}. "
            "Pass an array of that shape."
        )
    return array.astype(dtype)


def initial_value(value: Any, dtype: Any, name: str | None) -> Array:
    """Returns the initial value of a variable as an array.

    Raises:
        ValueError: If it is neither an array nor a number.
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
    array = jnp.asarray(value, dtype)
    # The first assignment would drop a weak type, so that the step would be compiled again.
    return array.astype(array.dtype) if getattr(array, "weak_type", False) else array


_TENSORFLOW_ARGUMENTS = {
    *("shape", "validate_shape", "caching_device", "variable_def", "import_scope", "constraint"),
    "experimental_enable_variable_lifting",
}


def reject_tensorflow_arguments(metadata: dict[str, Any]) -> None:
    """Rejects the arguments that only `tf.Variable` has.

    Raises:
        TypeError: If `metadata` contains one.
    """
    for name in metadata:
        if name in _TENSORFLOW_ARGUMENTS:
            raise TypeError(
                f"Variable({name}=...) exists in TensorFlow only. Omit it; a variable keeps the "
                "shape and dtype that it is created with."
            )


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


def require_aggregation_keeps_dtype(
    array: Array, aggregation: Aggregation, name: str | None
) -> None:
    """Checks that the aggregated value has the dtype of the variable.

    Raises:
        ValueError: If it has another dtype.
    """
    is_reduced = aggregation in ("mean", "sum")
    if is_reduced and result_dtype(ReduceOp(aggregation), array.dtype) != array.dtype:
        raise ValueError(
            f"aggregation={aggregation!r} does not preserve the dtype of {label(name)}, "
            f"{array.dtype}. Pass dtype='float32' for a mean, or dtype='int32' for a count."
        )
