"""Named variables on a server: every operation of a task is applied once."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mirror._src.base.errors import describe, nearest

_OPERATIONS = ("create", "read", "assign", "assign_add", "assign_sub")


class NamedVariables:
    """Variables by name, and for each task how many of its operations were applied.

    Args:
        values: The values.
        marks: For each task, the number of its last operation that was applied.
    """

    def __init__(
        self, values: Mapping[str, np.ndarray] | None = None, marks: Mapping[int, int] | None = None
    ) -> None:
        self._values = {name: np.array(value) for name, value in (values or {}).items()}
        self._marks = dict(marks or {})

    def apply(
        self, name: str, operation: str, value: Any = None, mark: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Applies an operation, unless its mark says that it was applied, and returns the value.

        Args:
            name: Name of the variable.
            operation: `create` (keeps the value if the variable exists), `read`, `assign`,
                `assign_add` or `assign_sub`.
            value: The operand, except of `read`.
            mark: Number of the task and of the operation in it. A task that is repeated on another
                worker repeats its marks.

        Returns:
            A copy of the value after the operation.

        Raises:
            ValueError: If the variable or the operation is unknown, or the shape is another one.
            TypeError: If the operand is not numeric, or its dtype cannot be converted.
        """
        if operation not in _OPERATIONS:
            raise ValueError(f"`operation` must be one of {_OPERATIONS}, got {operation!r}.")
        if operation == "create":
            self._create(name, value)
            return self._values[name].copy()
        if name not in self._values:
            there = ", ".join(map(repr, sorted(self._values))) or "none"
            raise ValueError(
                f"There is no variable {name!r} on this server, whose variables are: {there}."
                f"{nearest(name, self._values)} Create it: strategy.Variable(value, name={name!r})."
            )
        if operation != "read" and not self._was_applied(mark):
            self._values[name] = self._changed(name, operation, value)
            if mark is not None:
                task, number = mark
                self._marks[task] = number
        return self._values[name].copy()

    def forget(self, below: int) -> None:
        """Forgets the marks of tasks with numbers less than `below`, which are not repeated."""
        self._marks = {task: last for task, last in self._marks.items() if task >= below}

    def snapshot(self) -> tuple[dict[str, np.ndarray], dict[int, int]]:
        """Returns copies of the values and of the marks."""
        return {name: value.copy() for name, value in self._values.items()}, dict(self._marks)

    def _was_applied(self, mark: tuple[int, int] | None) -> bool:
        return mark is not None and mark[1] <= self._marks.get(mark[0], -1)

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
