"""Ctrl-C, taken between two steps instead of anywhere.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. Where that is one of JAX's
callbacks for the garbage collector (seen on JAX 0.10.2), it prints a traceback and is lost, and the
training goes on.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator

_asked = False


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Inside, Ctrl-C waits for the next `check` or the end; a second one raises at once.

    Where Ctrl-C is ignored (a job in the background) or somebody else's, it is left so, and so it
    is in any thread but the main one, which alone may set it.
    """
    global _asked
    check()  # pressed before, further out
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _asked = False
    signal.signal(signal.SIGINT, _note)
    try:
        yield
        check()
    finally:
        _asked = False
        signal.signal(signal.SIGINT, signal.default_int_handler)


def check() -> None:
    """Where it is safe to stop.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    if _asked and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def _note(signum: int, frame: object) -> None:  # noqa: ARG001
    global _asked
    _asked = True
    signal.signal(signal.SIGINT, signal.default_int_handler)
