"""Ctrl-C, taken between two steps instead of anywhere.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. Where that is one of JAX's
callbacks for the garbage collector (seen on JAX 0.10.2), it prints a traceback and is lost, and the
training goes on. Where it is the Python that JAX runs after a launch, the results are lost.
"""

import signal
import threading
import weakref

_holder: "weakref.ref[DeferredInterrupts] | None" = None


class DeferredInterrupts:
    """Inside, Ctrl-C waits for the next `check` or the end; a second one raises at once.

    Where Ctrl-C is ignored (a job in the background) or somebody else's, it is left so, and so it
    is in any thread but the main one, which alone may set it. Whatever else raises in here from a
    signal's handler, an alarm say, leaves Ctrl-C as it was: who holds it back is known by a weak
    reference.
    """

    asked = False

    def __enter__(self) -> None:
        global _holder
        check()  # pressed before, further out
        self._holds = threading.current_thread() is threading.main_thread() and _is_free()
        if self._holds:
            _holder = weakref.ref(self)
            self.asked = False
            signal.signal(signal.SIGINT, _note)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        global _holder
        if self._holds:
            try:
                if kind is None:
                    check()
            finally:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _holder = None


def check() -> None:
    """Where it is safe to stop.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    holder = _held_by()
    if holder is None or not holder.asked:
        return
    if threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def _held_by() -> DeferredInterrupts | None:
    return _holder() if _holder is not None else None


def _is_free() -> bool:
    handler = signal.getsignal(signal.SIGINT)
    return handler is signal.default_int_handler or (handler is _note and _held_by() is None)


def _note(signum: int, frame: object) -> None:  # noqa: ARG001
    signal.signal(signal.SIGINT, signal.default_int_handler)
    holder = _held_by()
    if holder is None:
        raise KeyboardInterrupt
    holder.asked = True
