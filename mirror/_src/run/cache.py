"""The programs and traces of earlier calls, by what they depend on."""

import threading
from typing import Any

from mirror._src.run.program import StepProgram
from mirror._src.run.quick import QuickCall
from mirror._src.run.step import TracedStep
from mirror._src.run.step_warnings import FRESH_FUNCTIONS
from mirror._src.utils.naming import code_of, is_our_module
from mirror._src.utils.types import StepFunction

_MOST_PROGRAMS = 256


class ProgramCache:
    """What was made for earlier calls.

    Attributes:
        programs: By the key of a call: the program of the last such call. By key, sets of shapes
            and context: the one for these.
        traces: By trace key, sets of shapes and context.
        quick: The quick way of calls, by function and donated arguments.
    """

    def __init__(self) -> None:
        self.programs: dict[Any, StepProgram] = {}
        self.traces: dict[Any, TracedStep] = {}
        self.quick: dict[tuple[StepFunction, tuple[int, ...]], QuickCall] = {}
        self._making: dict[Any, threading.RLock] = {}
        self._lock = threading.Lock()
        self._by_code: dict[Any, list[StepProgram]] = {}

    @property
    def is_full(self) -> bool:
        """Whether there are so many programs that all are to be forgotten."""
        return len(self.programs) > 2 * _MOST_PROGRAMS

    def making(self, key: Any) -> threading.RLock:
        """The lock of those who need a program that has yet to be made."""
        with self._lock:
            return self._making.setdefault(key, threading.RLock())

    def superseded(self, fn: StepFunction, program: StepProgram) -> list[StepProgram]:
        """The earlier programs of a step that is a new function object each time.

        Args:
            fn: The step.
            program: Its new program.
        """
        code = code_of(fn)
        ours = is_our_module(getattr(fn, "__module__", None))
        if code is None or ours:  # our own are made with care
            return []
        made = self._by_code.setdefault(code, [])
        made.append(program)
        lately = made[-FRESH_FUNCTIONS:]
        if len({id(p.fn) for p in lately}) < FRESH_FUNCTIONS or any(p.runs > 1 for p in lately):
            return []
        earlier = made[:-1]
        del made[:-1]
        return earlier

    def forget(self, programs: set[int]) -> set[StepFunction]:
        """Forgets programs by identity; returns the steps of those that are left."""
        for key, quick in list(self.quick.items()):
            if id(quick.program) in programs:
                self.quick.pop(key, None)
        self.programs = {k: p for k, p in list(self.programs.items()) if id(p) not in programs}
        kept = {program.fn for program in self.programs.values()}
        self.traces = {key: t for key, t in self.traces.items() if key[0][0] in kept}
        self._making = {key: m for key, m in self._making.items() if key in self.programs}
        return kept

    def clear(self) -> None:
        """Forgets all."""
        self.programs.clear()
        self.traces.clear()
        self._making.clear()
        self._by_code.clear()
        self.quick.clear()


class Identity:
    """An object as part of a key: equal to itself alone, and alive as long as the key."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value
