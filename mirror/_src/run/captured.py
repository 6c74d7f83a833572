"""Variables that steps use without being passed them: found in a trace, inputs from then on."""

import threading
from collections.abc import Sequence
from typing import Any

from mirror._src.run.closures import variables_around
from mirror._src.utils.types import StepFunction
from mirror._src.variables.variable import Variable


class CapturedVariables:
    """The variables that each step was found to use without being passed them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_step: dict[StepFunction, tuple[tuple[Variable, ...], Any]] = {}

    def of(self, fn: StepFunction) -> Sequence[Variable]:
        """The variables that a step was found to use without being passed them."""
        try:
            variables, around = self._of_step[fn] if self._of_step else ((), ())
        except (KeyError, TypeError):  # what is not hashable is refused later
            return ()
        if variables and around != variables_around(fn):
            with self._lock:  # a name that the step uses means another variable now
                self._of_step.pop(fn, None)
            return ()
        return variables

    def add(self, fn: StepFunction, found: Sequence[Variable]) -> None:
        """Adds the variables that a trace of a step has found."""
        around = variables_around(fn)
        with self._lock:
            known, _ = self._of_step.get(fn, ((), ()))
            new = {id(variable): variable for variable in (*known, *found)}
            self._of_step[fn] = tuple(new.values()), around

    def keep_only(self, steps: set[StepFunction]) -> None:
        """Forgets all other steps."""
        with self._lock:
            self._of_step = {fn: found for fn, found in self._of_step.items() if fn in steps}

    def clear(self) -> None:
        """Forgets all steps."""
        self._of_step.clear()


class VariablesFound(Exception):
    """A step uses variables that it is not passed: it is to be traced again, with them."""

    def __init__(self, variables: dict[int, Variable]) -> None:
        super().__init__(f"{len(variables)} variables")
        self.variables = list(variables.values())
