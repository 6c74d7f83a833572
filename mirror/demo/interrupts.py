"""Ctrl-C, taken between two steps instead of anywhere.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. Where that is one of JAX's
callbacks for the garbage collector (seen on JAX 0.10.2), it prints a traceback and is lost, and the
training goes on.
"""

import contextlib
import signal
from collections.abc import Iterator

_asked = False


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Inside, Ctrl-C waits for the next `check`; a second one ends the process at once.

    Where Ctrl-C is ignored (a job in the background) or somebody else's, it is left so.
    """
    global _asked
    _asked = False
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.SIG_DFL if _asked else signal.default_int_handler)


def check() -> None:
    """Where it is safe to stop.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    if _asked:
        raise KeyboardInterrupt


def _note(signum: int, frame: object) -> None:  # noqa: ARG001
    global _asked
    _asked = True
    signal.signal(signal.SIGINT, signal.SIG_DFL)
