"""Captured variables: steps use them without receiving them as arguments.

The first trace of a step finds them. The step is then traced again, with the variables as inputs.
"""

import threading
from collections.abc import Sequence
from typing import Any

from mirror._src.base.types import StepFunction
from mirror._src.base.weak_table import WeakTable
from mirror._src.engine.closures import referenced_ids
from mirror._src.engine.variable import Variable


class CapturedVariables:
    """The captured variables of every step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_step: WeakTable[tuple[tuple[Variable, ...], Any]] = WeakTable()

    def of(self, fn: StepFunction) -> Sequence[Variable]:
        """Returns the variables that a step is known to capture."""
        try:
            variables, ids = self._of_step.get(fn) or ((), ())
        except TypeError:  # a step that is not hashable is rejected later
            return ()
        if variables and ids != referenced_ids(fn):
            with self._lock:  # a name in the step now refers to another variable
                self._of_step.pop(fn)
            return ()
        return variables

    def add(self, fn: StepFunction, variables: Sequence[Variable]) -> None:
        """Adds the variables that a trace of a step has found."""
        ids = referenced_ids(fn)
        with self._lock:
            known, _ = self._of_step.get(fn) or ((), ())
            merged = {id(variable): variable for variable in (*known, *variables)}
            self._of_step.pop(fn)
            self._of_step.set_default(fn, (tuple(merged.values()), ids))

    def clear(self) -> None:
        """Forgets all steps."""
        self._of_step.clear()


class VariablesFound(Exception):
    """Raised if a trace finds captured variables; the step must be traced again with them."""

    def __init__(self, variables: dict[int, Variable]) -> None:
        super().__init__(f"{len(variables)} variables")
        self.variables = list(variables.values())
