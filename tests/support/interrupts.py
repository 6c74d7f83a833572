"""Interrupts that arrive while a step runs."""

import contextlib
import signal
from collections.abc import Callable, Iterator

import pytest


@contextlib.contextmanager
def repeated_until_interrupted() -> Iterator[Callable[[float, Callable[[], object]], None]]:
    """Yields a function that calls another one until it is interrupted, after some seconds."""
    armed: list[bool] = []

    def on_alarm(number, frame):
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    def repeat(secs, fn):
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (the loop is what is interrupted)
            try:
                armed.append(True)
                signal.setitimer(signal.ITIMER_REAL, secs, 0.1)
                call_while_armed(fn)
            finally:
                armed.clear()  # after an error, no interrupt may end the whole test session
            raise KeyboardInterrupt  # it arrived in a weakref's callback, where Python drops it

    def call_while_armed(fn):  # see tests/base/test_loops.py
        while armed:
            try:
                fn()
            except Exception as error:  # JAX's C++ turns an interrupt into an error
                if "KeyboardInterrupt" in str(error):
                    raise KeyboardInterrupt from error
                raise

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        yield repeat
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
