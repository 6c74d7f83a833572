"""Defers Ctrl-C to the boundary between two steps.

Python raises `KeyboardInterrupt` wherever the main thread is. In one of JAX's garbage-collector
callbacks (seen with JAX 0.10.2), Python prints the traceback, drops the exception, and training
continues. In the Python code that JAX runs after a launch, the results are lost.
"""

import signal
import threading
import weakref

_active: "weakref.ref[DeferredInterrupts] | None" = None


class DeferredInterrupts:
    """Context manager that defers Ctrl-C to the next `check`, or to the end of the context.

    A second Ctrl-C raises at once.

    Does nothing if Ctrl-C is ignored (a background job) or has another handler, or outside the main
    thread, because only the main thread can set handlers. The active context is stored as a weak
    reference: if another signal's handler raises an exception that skips `__exit__`, Ctrl-C keeps
    working.
    """

    is_pending = False

    def __enter__(self) -> None:
        global _active
        check()  # pressed earlier, in an outer context
        self._is_active = threading.current_thread() is threading.main_thread() and _is_free()
        if self._is_active:
            _active = weakref.ref(self)
            self.is_pending = False
            signal.signal(signal.SIGINT, _defer)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        global _active
        if self._is_active:
            try:
                if kind is None:
                    check()
            finally:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _active = None


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
    context.is_pending = True
