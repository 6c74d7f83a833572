"""`Step`: all that a strategy knows of one step function, until the function is dropped."""

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from mirror._src.base.naming import code_of, is_our_module
from mirror._src.base.types import StepFunction
from mirror._src.base.weak_table import WeakTable
from mirror._src.engine.arguments import Layout
from mirror._src.engine.closures import referenced_ids
from mirror._src.engine.program import StepProgram
from mirror._src.engine.replica_function import TracedStep
from mirror._src.engine.variable import Variable

_MAX_PROGRAMS = 256


class Step:
    """Layouts, traces and programs of one step function.

    Args:
        fn: The function, which is not kept.

    Attributes:
        programs: The last compiled program for each call key, and the exact program for each call
            key, types and trace context.
        traces: The trace for each trace key, types and trace context.
        layouts: The layout of the arguments, by their structure and types.
        depth: Index in `HOISTS` of the function that finds the nnx objects among the arguments.
        warned: Kinds of the warnings that were issued.
        own_values: For each structure of arguments, the mirrored ones of which it returns new
            values per replica, and why.
        variables: The variables that a trace has found to be used without being arguments.
    """

    def __init__(self, fn: StepFunction) -> None:
        self.programs: dict[Any, StepProgram] = {}
        self.traces: dict[Any, TracedStep] = {}
        self.layouts: dict[Any, Layout] = {}
        self.depth = 0
        self.warned: set[str] = set()
        self.own_values: dict[Any, dict[int, str]] = {}
        self.code = None if is_our_module(getattr(fn, "__module__", None)) else code_of(fn)
        self.variables: Sequence[Variable] = ()
        self._referenced: list[int] = []
        # An entry exists while a thread makes a program or waits for it.
        self._making: WeakValueDictionary[Any, threading.RLock] = WeakValueDictionary()
        self._lock = threading.Lock()

    def making(self, key: Any) -> threading.RLock:
        """Returns the lock to hold while the program for a key is made and compiled."""
        with self._lock:
            return self._making.setdefault(key, threading.RLock())

    def captured(self, fn: StepFunction) -> Sequence[Variable]:
        """Returns `variables`; none if a name in the step now refers to another variable."""
        with self._lock:
            if self.variables and self._referenced != referenced_ids(fn):
                self.variables = ()
            return self.variables

    def capture(self, fn: StepFunction, variables: Sequence[Variable]) -> None:
        """Adds variables that a trace has found."""
        with self._lock:
            merged = {id(variable): variable for variable in (*self.variables, *variables)}
            self.variables, self._referenced = tuple(merged.values()), referenced_ids(fn)


class _Lone:
    """The functions with one code that were dropped after at most one run.

    Attributes:
        count: Their number.
        warned: Kinds of the warnings that were issued about them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.warned: set[str] = set()


class Steps:
    """The step functions of a strategy. Each is dropped with its function.

    Attributes:
        get: Returns the step of a function, or None; see `WeakTable.get`.
    """

    def __init__(self) -> None:
        self._steps: WeakTable[Step] = WeakTable(self._dropped)
        self.get = self._steps.get
        self._lone: WeakTable[_Lone] = WeakTable()

    def of(self, fn: StepFunction) -> Step:
        """Returns the step of a function."""
        return self.get(fn) or self._steps.set_default(fn, Step(fn))

    def lone(self, fn: StepFunction) -> _Lone | None:
        """Returns what is known of dropped functions with the same code, if there are any."""
        code = code_of(fn)
        return self._lone.get(code) if code is not None else None

    def limit_size(self) -> None:
        """Forgets everything if there are too many programs."""
        steps = self._steps.values()
        sizes = (max(len(step.programs) // 2, len(step.traces)) for step in steps)
        if sum(sizes) > _MAX_PROGRAMS:
            self._steps.clear()
            self._lone.clear()

    def forget_programs(self) -> None:
        """Forgets the programs, but not the traces."""
        for step in self._steps.values():
            step.programs.clear()

    def _dropped(self, step: Step) -> None:
        ran = {id(program): program.runs for program in step.programs.values()}
        if step.code is not None and ran and max(ran.values()) <= 1:
            self._lone.set_default(step.code, _Lone()).count += 1
