"""Defers Ctrl-C and SIGTERM to the boundary between two steps.

Python raises `KeyboardInterrupt` wherever the main thread is. In one of JAX's garbage-collector
callbacks (seen with JAX 0.10.2), Python prints the traceback, drops the exception, and training
continues. In the Python code that JAX runs after a launch, the results are lost.

A forked process inherits handlers, but neither the threads nor the training that they are for: in
the child, signals have their defaults again.
"""

import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

TERMINATED = 128 + signal.SIGTERM
"""Exit status after SIGTERM."""

_SECS_TO_NOTICE = 0.5
_SECS_TO_WAKE = 0.1
_STEP_ENDS = "stopping after the current step. Press Ctrl-C again to stop at once."
_NATIVE = (
    "stopping when the compiler, or other native code, returns to Python. Press Ctrl-\\ to end the "
    "process at once, without saving."
)
_RAY = "ray._private.worker"  # of Ray 2.60; tests/ps/test_signals.py
_active: "weakref.ref[DeferredInterrupts] | None" = None
_saying = threading.Lock()


class DeferredInterrupts:
    """Context manager that defers Ctrl-C to the next `check`, or to the end of the context.

    A second Ctrl-C raises at once; if the first has to wait, a line on standard error says so.
    SIGTERM is deferred while a `Termination` exists.

    Ctrl-C is not deferred if it is ignored (a background job) or has another handler. Outside the
    main thread, nothing is, because only the main thread can set handlers. The active context is
    stored as a weak reference: if another signal's handler raises an exception that skips
    `__exit__`, Ctrl-C keeps working.

    Args:
        watches: Whether a thread watches for Ctrl-C, so that this line also appears while native
            code, such as a compiler, keeps the main thread from running any handler.
    """

    pending: int | None = None
    is_immediate = False
    has_said = False
    was_woken = False
    redirected: Callable[[int], None] | None = None
    termination: "Termination | None" = None
    _watch: "SignalWatch | None" = None

    def __init__(self, *, watches: bool = False) -> None:
        self._watches = watches
        self.handled: set[int] = set()
        self.raised: set[int] = set()

    def __enter__(self) -> None:
        global _active
        check()  # pressed earlier, in an outer context
        is_main = threading.current_thread() is threading.main_thread()
        self._is_active = is_main and _active_context() is None
        self._has_handler = self._is_active and _is_unhandled(signal.SIGINT)
        me = weakref.ref(self)
        if self._is_active:
            _active = me
        if self._has_handler:
            signal.signal(signal.SIGINT, _defer)
            if self._watches:
                notice = functools.partial(_notice, me)
                self._watch = SignalWatch(signal.SIGINT, notice)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        global _active
        if self._is_active:
            try:
                if kind is None:
                    check()
            finally:
                if self._has_handler:
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                _active = None
                if self._watch is not None:
                    self._watch.close()


class Termination:
    """Defers SIGTERM to the next `check`, which raises `SystemExit(143)`.

    A wait for the user's code ends half a second later. Does nothing if no `DeferredInterrupts` is
    active in this thread, or the program handles SIGTERM. `ray.init` sets a handler, which then
    never runs: Ray's core, in C++, replaces it by one that prints a trace and ends the process, and
    restores the default at the end.

    Args:
        grace_secs: Number of seconds after which the process ends if `close` was not called.
        say_late: Prints why it ends; called in another thread.
    """

    def __init__(
        self, grace_secs: float = math.inf, say_late: Callable[[], None] = lambda: None
    ) -> None:
        self._grace_secs, self._say_late = grace_secs, say_late
        self._before: Any = signal.getsignal(signal.SIGTERM)
        self._context = context = _own_context()
        self._closed = threading.Event()
        self.is_received = False
        if context is not None and _is_unhandled(signal.SIGTERM):
            context.termination = self
            self._watch = SignalWatch(signal.SIGTERM, self.notice)
            signal.signal(signal.SIGTERM, _defer)
        else:
            self._context = None

    def notice(self) -> None:
        """Limits the time that the process takes to end; called by any thread."""
        context = self._context
        if self.is_received or context is None:
            return
        self.is_received = True
        if context.redirected is not None:
            context.redirected(signal.SIGTERM)
        else:
            threading.Thread(target=self._end_in_time, name="mirror SIGTERM", daemon=True).start()

    def _end_in_time(self) -> None:
        deadline = time.monotonic() + self._grace_secs
        for _ in range(2):  # the first may have reached another thread, while the main one sleeps
            if self._closed.wait(min(_SECS_TO_NOTICE, _left(deadline))):
                return
            with _saying:
                if self._context is not None:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        if not self._closed.wait(_left(deadline)):
            self._say_late()
            os._exit(TERMINATED)

    def close(self) -> None:
        """Restores the handler of SIGTERM."""
        with _saying:  # otherwise `pthread_kill` would find that handler
            context, self._context = self._context, None
        self._closed.set()
        if context is not None:
            context.termination = None
            self._watch.close()
            signal.signal(signal.SIGTERM, self._before)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)


def redirect(call: Callable[[int], None]) -> None:
    """Makes signals call a function instead of raising exceptions, until the end of the context.

    A second Ctrl-C still raises. Does nothing if no `DeferredInterrupts` is active in this thread.

    Args:
        call: Function of the number of the signal. It runs in a signal handler or in a thread, and
            must not wait.
    """
    context = _own_context()
    if context is not None:
        context.redirected = call


def check() -> None:
    """Raises a deferred signal. Call it where it is safe to stop.

    Raises:
        KeyboardInterrupt: If Ctrl-C was pressed.
        SystemExit: If SIGTERM was received.
    """
    context = _own_context()
    if context is not None and context.pending is not None:
        raise _exception_of(context.pending)


def settle() -> int | None:
    """Returns the signal that was raised or is deferred, which `check` raises no longer."""
    context = _own_context()
    if context is None:
        return None
    number, context.pending = context.pending, None
    return number


def immediate() -> contextlib.AbstractContextManager[None]:
    """Context manager in which Ctrl-C raises at once: around calls of the user's code.

    SIGTERM raises half a second later. The signal stays pending, in case that this code drops the
    exception. One that is deferred already does not raise: it would prevent a call that is due.
    """
    return _Raising(at_once=True)


def deferred() -> contextlib.AbstractContextManager[None]:
    """Context manager inside `immediate` in which Ctrl-C waits: around joint changes."""
    return _Raising(at_once=False)


class _Raising:
    """Context manager of `immediate` and `deferred`; `contextlib` takes 0.7 us more."""

    __slots__ = ("_at_once", "_before", "_context")

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once

    def __enter__(self) -> None:
        self._context = context = _own_context()
        if context is not None:
            self._before, context.is_immediate = context.is_immediate, self._at_once

    def __exit__(self, *args: object) -> None:
        if self._context is not None:
            self._context.is_immediate = self._before


def _active_context() -> DeferredInterrupts | None:
    return _active() if _active is not None else None


def _own_context() -> DeferredInterrupts | None:
    """Returns the active context in the main thread, None in others."""
    is_main = threading.get_ident() == threading.main_thread().ident
    return _active_context() if is_main else None


def _is_unhandled(number: int) -> bool:
    """Whether the program leaves a signal to its default, or to a context that has ended."""
    handler = signal.getsignal(number)
    if number == signal.SIGINT:
        return handler in (signal.default_int_handler, _defer)
    return handler is signal.SIG_DFL or getattr(handler, "__module__", None) == _RAY


def _exception_of(number: int) -> BaseException:
    return SystemExit(TERMINATED) if number == signal.SIGTERM else KeyboardInterrupt()


def _set_default(number: int) -> None:
    is_interrupt = number == signal.SIGINT
    signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


def _defer(number: int, frame: object) -> None:  # noqa: ARG001
    context = _active_context()
    if number == signal.SIGINT or context is None:
        _set_default(number)
    if context is None:
        signal.raise_signal(number)
        return
    is_again = number in context.handled
    context.handled.add(number)
    if context.termination is not None and number == signal.SIGTERM:
        context.termination.notice()
    elif context.redirected is not None:
        context.redirected(number)
    if context.redirected is not None or (is_again and context.pending is None):
        return  # the second: it is settled
    if context.pending != signal.SIGTERM:
        context.pending = number
    raises = context.is_immediate and number not in context.raised
    if raises and (number == signal.SIGINT or is_again):
        context.raised.add(number)
        raise _exception_of(number)
    if number == signal.SIGINT:
        _notice(weakref.ref(context))  # in case that nothing watches


def _notice(context: "weakref.ref[DeferredInterrupts]") -> None:
    """Says after a while that Ctrl-C was noticed, if it is still waiting then."""
    notice = threading.Timer(_SECS_TO_NOTICE, _say_that_it_waits, [context])
    notice.daemon = True
    notice.start()


def _say_that_it_waits(context: "weakref.ref[DeferredInterrupts]") -> None:
    """Prints once how to stop at once, if the context has not ended."""
    with _saying:
        active = _active_context()
        if active is None or active is not context():
            return
        if not active.was_woken and _has_not_run(active):
            # The signal reached another thread, as it may after the process was stopped, while the
            # main thread sleeps; or that is in native code, where one more changes nothing.
            active.was_woken = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(_SECS_TO_WAKE)
        has_raised = signal.SIGINT in active.raised
        if active is not _active_context() or has_raised or active.has_said:
            return
        if active.pending is not None or _has_not_run(active):
            active.has_said = True
            text = _NATIVE if active.pending is None else _STEP_ENDS
            say(f"\nInterrupted: {text}")


def say(text: str) -> None:
    """Prints a line on standard error, unless it is closed or a broken pipe."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _has_not_run(context: DeferredInterrupts) -> bool:
    is_ours = signal.getsignal(signal.SIGINT) is _defer
    return is_ours and signal.SIGINT not in context.handled


class SignalWatch:
    """Calls a function in a thread as soon as a signal arrives.

    Python runs handlers in the main thread, which may be in native code for minutes, such as a
    compiler. All watches share the thread, which ends with the last of them, and the one wakeup
    descriptor of the process. They do nothing where another library uses this descriptor. Only
    the main thread can create and close them.

    Args:
        number: The signal, which needs a handler of Python.
        call: The function. It is called again for each further signal.
    """

    _watches: "ClassVar[list[SignalWatch]]" = []
    _writes: ClassVar[int] = -1
    _thread: ClassVar[threading.Thread | None] = None

    def __init__(self, number: int, call: Callable[[], None]) -> None:
        self.number, self.call = number, call
        self._watches.append(self)
        if len(self._watches) == 1:
            _start_watching()

    def close(self) -> None:
        """Ends the watch, and with the last one the thread."""
        if self in self._watches:  # not in a forked process
            self._watches.remove(self)
            if not self._watches:
                _stop_watching()


def _start_watching() -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    earlier = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    if earlier != -1:
        signal.set_wakeup_fd(earlier)
        os.close(reads)
        os.close(writes)
        return
    SignalWatch._writes = writes
    SignalWatch._thread = threading.Thread(
        target=_watch, args=(reads,), name="mirror signals", daemon=True
    )
    SignalWatch._thread.start()


def _stop_watching() -> None:
    writes, SignalWatch._writes = SignalWatch._writes, -1
    if writes == -1:
        return
    current = signal.set_wakeup_fd(-1)
    if current not in (-1, writes):  # another library took it in the meantime
        signal.set_wakeup_fd(current)
    os.close(writes)  # the thread reads to the end
    thread, SignalWatch._thread = SignalWatch._thread, None
    if thread is not None:
        thread.join(timeout=1)  # a fork after `fit` must not find threads


def _watch(reads: int) -> None:
    with contextlib.closing(os.fdopen(reads, "rb", buffering=0)) as file:
        while numbers := file.read(64):
            for watch in tuple(SignalWatch._watches):
                if watch.number in numbers:
                    watch.call()


def _restore_in_child() -> None:
    """Gives the signals of a forked process their defaults.

    Its handlers would save the training of its parent, and a signal to it would be written to the
    descriptor that they share, and so arrive in the parent.
    """
    global _active, _saying
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _defer:
            _set_default(number)
    _active, _saying = None, threading.Lock()
    SignalWatch._watches.clear()
    _stop_watching()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_restore_in_child)


@contextlib.contextmanager
def arriving(*numbers: int) -> Iterator[list[int]]:
    """Yields the signals that arrive, which do nothing else; in the main thread only.

    A signal that is ignored stays ignored: SIGHUP under nohup, SIGINT in a job of a script.
    """
    arrived: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    handled = [n for n in numbers if is_main and signal.getsignal(n) is not signal.SIG_IGN]
    before = {n: signal.signal(n, lambda number, _: arrived.append(number)) for n in handled}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
