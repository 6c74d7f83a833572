"""Named variables that the main program and scheduled functions share."""

from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import describe, nearest
from mirror._src.base.public_names import set_module
from mirror._src.base.tracebacks import api_boundary
from mirror._src.base.types import Array
from mirror._src.devices.transfer import is_tracing
from mirror._src.engine.storage import as_array


@final
class NamedVariables:
    """The values of variables by name."""

    def __init__(self) -> None:
        self._values: dict[str, np.ndarray] = {}

    def apply(self, name: str, operation: str, value: Any = None) -> np.ndarray:
        """Applies an operation, and returns a copy of the value afterwards.

        Args:
            name: Name of the variable.
            operation: `create` (keeps the value if the variable exists), `read`, `assign`,
                `assign_add` or `assign_sub`.
            value: The operand, except of `read`.

        Raises:
            ValueError: If the variable is unknown, or the shape is another one.
            TypeError: If the operand is not numeric, or its dtype cannot be converted.
        """
        if operation == "create":
            self._create(name, value)
        elif name not in self._values:
            there = ", ".join(map(repr, sorted(self._values))) or "none"
            raise ValueError(
                f"There is no variable {name!r} of this strategy, whose variables are: {there}."
                f"{nearest(name, self._values)} Create it: strategy.Variable(value, name={name!r})."
            )
        elif operation != "read":
            self._values[name] = self._changed(name, operation, value)
        return self._values[name].copy()

    def _create(self, name: str, value: Any) -> None:
        array = _as_array(name, value)
        array = np.array(array, jax.dtypes.canonicalize_dtype(array.dtype))
        old = self._values.setdefault(name, array)
        if (old.shape, old.dtype) != (array.shape, array.dtype):
            raise ValueError(
                f"Variable {name!r} exists as {describe(old)} and cannot be created as "
                f"{describe(array)}. Use another name."
            )

    def _changed(self, name: str, operation: str, value: Any) -> np.ndarray:
        old, operand = self._values[name], _as_array(name, value)
        if operand.shape != old.shape:
            raise ValueError(
                f"{operation} of variable {name!r} must have its shape {list(old.shape)}, got "
                f"{list(operand.shape)}."
            )
        if not np.can_cast(operand.dtype, old.dtype, "same_kind"):
            raise TypeError(
                f"{operation} of variable {name!r}, which is {describe(old)}, got "
                f"{describe(operand)}. Convert the value to {old.dtype} first."
            )
        operand = operand.astype(old.dtype)
        if operation == "assign":
            return operand
        # An operation of NumPy on arrays without axes returns a scalar.
        return np.asarray(old + operand if operation == "assign_add" else old - operand)


def _as_array(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.kind in "USMm":
        raise TypeError(f"Variable {name!r} must be an array or a number, got {describe(value)}.")
    return array


@set_module("mirror.ps")
@final
class ServerVariable:
    """A variable of a strategy, from `ParameterServerStrategy.Variable`.

    It can be read and assigned in the main program and in scheduled functions, which may capture
    it or receive it as an argument. A function that is lost with its worker runs again, so what it
    assigned before is assigned twice. An arithmetic expression reads the value. The value is in a
    process on the machine of the main program, and is lost with the strategy.

    >>> a = strategy.Variable(3.0, name="a")
    >>> a.assign_add(1.0)
    Array(4., dtype=float32)
    >>> float(a * 2)
    8.0
    """

    __array_priority__ = 1000

    def __init__(self, name: str, variables: Any) -> None:
        self.name, self._variables = name, variables

    @api_boundary
    def read_value(self) -> Array:
        """Returns the value.

        Raises:
            RuntimeError: In a function that JAX traces, such as a training step: it would read the
                value once, when it is compiled.
            RuntimeError: If the strategy has been closed.
        """
        return self._apply("read", None)

    @property
    def value(self) -> Array:
        """The value."""
        return self.read_value()

    @api_boundary
    def assign(self, value: Any) -> Array:
        """Sets the value, and returns it.

        Raises:
            ValueError: If the shape differs.
            TypeError: If the dtype cannot be converted.
        """
        return self._apply("assign", value)

    @api_boundary
    def assign_add(self, value: Any) -> Array:
        """Adds to the value, and returns the sum. Raises as `assign`."""
        return self._apply("assign_add", value)

    @api_boundary
    def assign_sub(self, value: Any) -> Array:
        """Subtracts from the value, and returns the difference. Raises as `assign`."""
        return self._apply("assign_sub", value)

    def _apply(self, operation: str, value: Any) -> Array:
        if isinstance(value, jax.core.Tracer):
            raise RuntimeError(
                f"Variable {self.name!r} got a traced value in {operation}. Assign outside jax.jit "
                "and strategy.run."
            )
        if is_tracing():
            raise RuntimeError(
                f"Variable {self.name!r} got {operation} in a function that JAX traces: a training "
                "step, or the argument of jax.jit. This would happen once, when it is compiled. "
                "Read the value outside and pass it as an argument, or assign outside."
            )
        # As JAX converts Python numbers: an int is an int32 unless x64 is enabled.
        what = f"The value of variable {self.name!r}"
        operand = None if operation == "read" else np.asarray(as_array(what, _value_of(value)))
        return jnp.asarray(self._variables.apply(self.name, operation, operand))

    def __jax_array__(self) -> Array:
        return self.read_value()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.read_value(), dtype)

    def __float__(self) -> float:
        return float(self.read_value())

    def __int__(self) -> int:
        return int(self.read_value())

    def __bool__(self) -> bool:
        return bool(self.read_value())

    def __repr__(self) -> str:
        return f"ServerVariable({self.name!r})"


def _value_of(value: Any) -> Any:
    return value.read_value() if isinstance(value, ServerVariable) else value


def _operator(name: str) -> Any:
    return lambda self, *others: getattr(self.read_value(), name)(*map(_value_of, others))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(ServerVariable, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(ServerVariable, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs"):
    setattr(ServerVariable, f"__{_name}__", _operator(f"__{_name}__"))
