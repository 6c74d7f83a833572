"""`ServerVariable`: a named variable on a parameter server."""

import operator
from collections.abc import Callable
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.modules import set_module
from mirror._src.base.tracebacks import api_boundary
from mirror._src.base.types import Array
from mirror._src.devices.transfer import is_tracing
from mirror._src.ps.current import running_function


class VariableHost(Protocol):
    """Interface that applies operations of the driver to a variable."""

    def variable(self, server: int, name: str, operation: str, value: Any) -> np.ndarray:
        """Applies an operation and returns the value afterwards."""
        ...


@set_module("mirror.ps")
@final
class ServerVariable:
    """A variable on a parameter server, from `ParameterServerStrategy.Variable`.

    It can be read and assigned in the main program and in scheduled functions, which may capture
    it or receive it as an argument. Each operation is applied once, even if its function is
    repeated because a worker was lost. An arithmetic expression reads the value.

    >>> a = strategy.Variable(3.0, name="a")
    >>> a.assign_add(1.0)
    Array(4., dtype=float32)
    >>> float(a * 2)
    8.0
    """

    __array_priority__ = 1000

    def __init__(self, name: str, server: int, host: VariableHost | None) -> None:
        self.name, self._server, self._host = name, server, host

    @api_boundary
    def read_value(self) -> Array:
        """Returns the value.

        Raises:
            RuntimeError: In a function that JAX traces, such as a training step: it would read the
                value once, when it is compiled.
            Exception: In the main program, what a scheduled function raised, until `schedule`,
                `join` or `done` have raised it.
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
        operand = None if operation == "read" else _operand(value)
        function = running_function()
        if function is not None:
            return jnp.asarray(function.variable(self._server, self.name, operation, operand))
        if self._host is None:
            raise RuntimeError(
                f"Variable {self.name!r} was copied into a process that is not a worker of its "
                "strategy. Use it in the main program and in scheduled functions."
            )
        return jnp.asarray(self._host.variable(self._server, self.name, operation, operand))

    def __jax_array__(self) -> Array:
        return self.read_value()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.read_value(), dtype)

    def __float__(self) -> float:
        return float(self.read_value())

    def __int__(self) -> int:
        return int(self.read_value())

    def __repr__(self) -> str:
        return f"ServerVariable({self.name!r}, server={self._server})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ServerVariable, (self.name, self._server, None)


def _operand(value: Any) -> np.ndarray:
    value = value.read_value() if isinstance(value, ServerVariable) else value
    # As JAX converts Python numbers: an int is an int32 unless x64 is enabled.
    return np.asarray(jnp.asarray(value))


def _binary(operation: Callable[[Any, Any], Any], *, is_reflected: bool = False) -> Any:
    def method(self: ServerVariable, other: Any) -> Any:
        if isinstance(other, ServerVariable):
            other = other.read_value()
        value = self.read_value()
        return operation(other, value) if is_reflected else operation(value, other)

    return method


def _unary(operation: Callable[[Any], Any]) -> Any:
    return lambda self: operation(self.read_value())


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(ServerVariable, f"__{_name}__", _binary(getattr(operator, _name)))
    setattr(ServerVariable, f"__r{_name}__", _binary(getattr(operator, _name), is_reflected=True))
for _name in ("lt", "le", "gt", "ge"):
    setattr(ServerVariable, f"__{_name}__", _binary(getattr(operator, _name)))
for _name in ("neg", "abs"):
    setattr(ServerVariable, f"__{_name}__", _unary(getattr(operator, _name)))
