"""Waits for what another thread does."""

import sys
import threading
import time
from collections.abc import Callable


def wait_until(condition: Callable[..., bool], secs: float = 300.0) -> None:
    """Waits until a condition holds; fails if it does not within a time in seconds."""
    deadline = time.monotonic() + secs
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"it has not happened in {secs:g} s")
        time.sleep(0.001)


def main_thread_waits(where: str = "") -> bool:
    """Whether the main thread waits for another one, in a function with this name or in any."""
    frame = sys._current_frames()[threading.main_thread().ident]
    waits, names = frame.f_code.co_filename == threading.__file__, []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return waits and (not where or where in names)
