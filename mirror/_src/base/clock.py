"""The time and waiting for it, in one place, so that tests can set it."""

import threading
import time


def now() -> float:
    """Returns the seconds of a clock that is never set."""
    return time.monotonic()


def wait(event: threading.Event, secs: float) -> bool:
    """Waits until an event, or for some seconds; returns whether the event has happened."""
    return event.wait(secs)
