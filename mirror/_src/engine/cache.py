"""`ProgramCache`: the programs and traces of earlier calls, by what they depend on."""

import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

from mirror._src.base.naming import code_of, is_our_module
from mirror._src.base.types import StepFunction
from mirror._src.base.weak_table import WeakTable
from mirror._src.engine.arguments import Layout
from mirror._src.engine.program import StepProgram
from mirror._src.engine.step import TracedStep

_MAX_PROGRAMS = 256


class StepCache:
    """Programs, traces and layouts of one step function.

    Args:
        fn: The function, which is not kept.

    Attributes:
        programs: The last compiled program for each call key, and the exact program for each call
            key, types and trace context.
        traces: The trace for each trace key, types and trace context.
        layouts: The layout of the arguments, by their structure and types.
        depth: Index in `HOISTS` of the function that finds the nnx objects among the arguments.
    """

    def __init__(self, fn: StepFunction) -> None:
        self.programs: dict[Any, StepProgram] = {}
        self.traces: dict[Any, TracedStep] = {}
        self.layouts: dict[Any, Layout] = {}
        self.depth = 0
        self.code = None if is_our_module(getattr(fn, "__module__", None)) else code_of(fn)
        # An entry exists while a thread makes a program or waits for it.
        self._making: WeakValueDictionary[Any, threading.RLock] = WeakValueDictionary()
        self._lock = threading.Lock()

    def making(self, key: Any) -> threading.RLock:
        """Returns the lock to hold while the program for a key is made and compiled."""
        with self._lock:
            return self._making.setdefault(key, threading.RLock())


class ProgramCache:
    """The caches of all step functions of a strategy. Each is dropped with its function.

    Attributes:
        get: Returns the cache of a function, or None; see `WeakTable.get`.
    """

    def __init__(self) -> None:
        self._steps: WeakTable[StepCache] = WeakTable(self._dropped)
        self.get = self._steps.get
        self._lone: WeakTable[list[int]] = WeakTable()

    def of(self, fn: StepFunction) -> StepCache:
        """Returns the cache of a function.

        Raises:
            TypeError: If the function is not hashable.
        """
        return self.get(fn) or self._steps.set_default(fn, StepCache(fn))

    @property
    def steps(self) -> Iterator[StepCache]:
        """The caches of all functions."""
        return self._steps.values()

    @property
    def is_full(self) -> bool:
        """Whether the cache has reached the size at which it is cleared."""
        sizes = (max(len(step.programs) // 2, len(step.traces)) for step in self.steps)
        return sum(sizes) > _MAX_PROGRAMS

    def num_dropped(self, fn: StepFunction) -> int:
        """Returns how many functions with the same code were dropped after at most one run."""
        code = code_of(fn)
        return len(self._lone.get(code) or ()) if code is not None else 0

    def _dropped(self, step: StepCache) -> None:
        ran = {id(program): program.runs for program in step.programs.values()}
        if step.code is not None and ran and max(ran.values()) <= 1:
            self._lone.set_default(step.code, []).append(1)

    def clear(self) -> None:
        """Forgets everything."""
        self._steps.clear()
        self._lone.clear()
