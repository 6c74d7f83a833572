"""`ProgramCache`: the programs and traces of earlier calls, by what they depend on."""

import threading
from typing import Any
from weakref import WeakValueDictionary

from mirror._src.run.program import StepProgram
from mirror._src.run.quick import QuickCall
from mirror._src.run.step import TracedStep
from mirror._src.run.step_warnings import MAX_NEW_FUNCTIONS
from mirror._src.utils.naming import code_of, is_our_module
from mirror._src.utils.types import StepFunction

_MAX_PROGRAMS = 256


class ProgramCache:
    """Cache of programs, traces and quick calls.

    Attributes:
        programs: The last compiled program for each call key, and the exact program for each call
            key, variants and trace context.
        traces: The trace for each trace key, variants and trace context.
        quick: The quick call for each function and donated arguments.
    """

    def __init__(self) -> None:
        self.programs: dict[Any, StepProgram] = {}
        self.traces: dict[Any, TracedStep] = {}
        self.quick: dict[tuple[StepFunction, tuple[int, ...]], QuickCall] = {}
        # An entry exists while a thread makes a program or waits for it.
        self._making: WeakValueDictionary[Any, threading.RLock] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._by_code: dict[Any, list[StepProgram]] = {}

    @property
    def is_full(self) -> bool:
        """Whether the cache has reached the size at which it is cleared."""
        return len(self.programs) > 2 * _MAX_PROGRAMS

    def making(self, key: Any) -> threading.RLock:
        """Returns the lock to hold while the program for a key is made and compiled."""
        with self._lock:
            return self._making.setdefault(key, threading.RLock())

    def superseded(self, fn: StepFunction, program: StepProgram) -> list[StepProgram]:
        """Returns the earlier programs of a step that is a new function object in every call.

        Args:
            fn: The step.
            program: The new program of the step.
        """
        code = code_of(fn)
        is_ours = is_our_module(getattr(fn, "__module__", None))
        if code is None or is_ours:  # mirror's own steps are cached deliberately
            return []
        programs = self._by_code.setdefault(code, [])
        programs.append(program)
        recent = programs[-MAX_NEW_FUNCTIONS:]
        if len({id(p.fn) for p in recent}) < MAX_NEW_FUNCTIONS or any(p.runs > 1 for p in recent):
            return []
        earlier = programs[:-1]
        del programs[:-1]
        return earlier

    def forget(self, programs: set[int]) -> set[StepFunction]:
        """Forgets some programs, and returns the step functions of the remaining ones.

        Args:
            programs: The `id` of each program to forget.
        """
        for key, quick in list(self.quick.items()):
            if id(quick.program) in programs:
                self.quick.pop(key, None)
        self.programs = {k: p for k, p in list(self.programs.items()) if id(p) not in programs}
        kept = {program.fn for program in self.programs.values()}
        self.traces = {key: t for key, t in self.traces.items() if key[0][0] in kept}
        return kept

    def clear(self) -> None:
        """Forgets everything."""
        self.programs.clear()
        self.traces.clear()
        self._by_code.clear()
        self.quick.clear()


class Identity:
    """Wrapper that compares an object by identity, and keeps it alive, as part of a key."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value
