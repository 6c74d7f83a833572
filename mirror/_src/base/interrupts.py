"""Defers Ctrl-C to the boundary between two steps.

Python raises `KeyboardInterrupt` wherever the main thread is. In one of JAX's garbage-collector
callbacks (seen with JAX 0.10.2), Python prints the traceback, drops the exception, and training
continues. In the Python code that JAX runs after a launch, the results are lost.

A forked process inherits handlers, but neither the threads nor the training that they are for: in
the child, signals have their defaults again.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import ClassVar

_SECS_TO_NOTICE = 0.5
_SECS_TO_WAKE = 0.1
_STEP_ENDS = "stopping after the current step. Press Ctrl-C again to stop at once."
_NATIVE = (
    "stopping when the compiler, or other native code, returns to Python. Press Ctrl-\\ to end the "
    "process at once, without saving."
)
_active: "weakref.ref[DeferredInterrupts] | None" = None
_saying = threading.Lock()


class DeferredInterrupts:
    """Context manager that defers Ctrl-C to the next `check`, or to the end of the context.

    A second Ctrl-C raises at once; if the first has to wait, a line on standard error says so.

    Does nothing if Ctrl-C is ignored (a background job) or has another handler, or outside the main
    thread, because only the main thread can set handlers. The active context is stored as a weak
    reference: if another signal's handler raises an exception that skips `__exit__`, Ctrl-C keeps
    working.

    Args:
        watches: Whether a thread watches for Ctrl-C, so that this line also appears while native
            code, such as a compiler, keeps the main thread from running any handler.
    """

    is_pending = False
    is_immediate = False
    has_run = False
    has_raised = False
    has_said = False
    was_woken = False
    redirected: Callable[[], None] | None = None
    _watch: "SignalWatch | None" = None

    def __init__(self, *, watches: bool = False) -> None:
        self._watches = watches

    def __enter__(self) -> None:
        global _active
        check()  # pressed earlier, in an outer context
        self._is_active = threading.current_thread() is threading.main_thread() and _is_free()
        if self._is_active:
            _active = weakref.ref(self)
            self.is_pending = self.has_run = self.has_raised = False
            self.has_said = self.was_woken = False
            self.redirected = None
            signal.signal(signal.SIGINT, _defer)
            if self._watches:
                self._watch = SignalWatch(signal.SIGINT, functools.partial(_notice, _active))

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        global _active
        if self._is_active:
            try:
                if kind is None:
                    check()
            finally:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _active = None
                if self._watch is not None:
                    self._watch.close()


def redirect(call: Callable[[], None]) -> None:
    """Makes the first Ctrl-C call a function in place of `KeyboardInterrupt`, until the end.

    Does nothing if no `DeferredInterrupts` is active in this thread.

    Args:
        call: The function, which runs in a signal handler and must not wait.
    """
    context = _active_context()
    if context is not None and threading.current_thread() is threading.main_thread():
        context.redirected = call


def check() -> None:
    """Raises a deferred interrupt. Call it where it is safe to stop.

    Raises:
        KeyboardInterrupt: If Ctrl-C was pressed.
    """
    context = _active_context()
    if context is None or not context.is_pending:
        return
    if threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


@contextlib.contextmanager
def immediate() -> Iterator[None]:
    """Context manager in which Ctrl-C raises at once: around calls of the user's code.

    The interrupt stays pending, in case that this code drops the exception.
    """
    context = _active_context()
    if context is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    check()
    before, context.is_immediate = context.is_immediate, True
    try:
        yield
    finally:
        context.is_immediate = before


def _active_context() -> DeferredInterrupts | None:
    return _active() if _active is not None else None


def _is_free() -> bool:
    handler = signal.getsignal(signal.SIGINT)
    return handler is signal.default_int_handler or (
        handler is _defer and _active_context() is None
    )


def _defer(signum: int, frame: object) -> None:  # noqa: ARG001
    signal.signal(signal.SIGINT, signal.default_int_handler)
    context = _active_context()
    if context is None:
        raise KeyboardInterrupt
    context.has_run = True
    if context.redirected is not None:
        redirected, context.redirected = context.redirected, None
        redirected()
        return
    context.is_pending = True
    if context.is_immediate:
        context.has_raised = True
        raise KeyboardInterrupt
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
        if active is not _active_context() or active.has_raised or active.has_said:
            return
        if active.is_pending or _has_not_run(active):
            active.has_said = True
            text = _STEP_ENDS if active.is_pending else _NATIVE
            with contextlib.suppress(OSError, ValueError):  # closed, or a broken pipe
                print(f"\nInterrupted: {text}", file=sys.stderr, flush=True)


def _has_not_run(context: DeferredInterrupts) -> bool:
    return not context.has_run and signal.getsignal(signal.SIGINT) is _defer


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
    if signal.getsignal(signal.SIGINT) is _defer:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _active, _saying = None, threading.Lock()
    for watch in SignalWatch._watches:
        if watch.number != signal.SIGINT:
            signal.signal(watch.number, signal.SIG_DFL)
    SignalWatch._watches.clear()
    _stop_watching()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_restore_in_child)
