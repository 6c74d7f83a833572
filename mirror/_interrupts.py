"""Ctrl-C, taken between two steps instead of anywhere.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. Where that is one of JAX's
callbacks for the garbage collector (seen on JAX 0.10.2), it prints a traceback and is lost, and the
training goes on. Where it is the Python that JAX runs after a launch, the results are lost.
"""

import signal
import threading
import weakref
from typing import Any

_asked = False
_holder: weakref.ref[Any] | None = None


class held_back:
    """Inside, Ctrl-C waits for the next `check` or the end; a second one raises at once.

    Where Ctrl-C is ignored (a job in the background) or somebody else's, it is left so, and so it
    is in any thread but the main one, which alone may set it. Whatever else raises in here from a
    signal's handler, an alarm say, leaves Ctrl-C as it was: who holds it back is known by a weak
    reference.
    """

    def __enter__(self) -> None:
        global _asked, _holder
        check()  # pressed before, further out
        self._holds = threading.current_thread() is threading.main_thread() and _is_free()
        if self._holds:
            _holder = weakref.ref(self)
            _asked = False
            signal.signal(signal.SIGINT, _note)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        global _asked, _holder
        if self._holds:
            try:
                if kind is None:
                    check()
            finally:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _asked, _holder = False, None


def check() -> None:
    """Where it is safe to stop.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    if _asked and _is_held() and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def _is_held() -> bool:
    return _holder is not None and _holder() is not None


def _is_free() -> bool:
    handler = signal.getsignal(signal.SIGINT)
    return handler is signal.default_int_handler or (handler is _note and not _is_held())


def _note(signum: int, frame: object) -> None:  # noqa: ARG001
    global _asked
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not _is_held():
        raise KeyboardInterrupt
    _asked = True
