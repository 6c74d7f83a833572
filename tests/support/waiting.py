"""Waits for what another thread does."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[..., bool], secs: float = 30.0) -> None:
    """Waits until a condition holds; fails if it does not within a time in seconds."""
    deadline = time.monotonic() + secs
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"it has not happened in {secs:g} s")
        time.sleep(0.001)
