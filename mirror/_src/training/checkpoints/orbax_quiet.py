"""Keeping the log and the threads of Orbax away from the user."""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

_MOST_WAIT_SECS = 1.0
_QUIET_SECS = 0.1


@contextlib.contextmanager
def orbax_alone() -> Iterator[None]:
    """Keeps what Orbax says from the user, and waits for its threads.

    That is forty lines of log for a checkpoint. Where it fails, it closes its event loop under the
    writes that are under way, each of which then prints that the loop is closed. And it lets go of
    the loop's threads, `asyncio_0`, without joining them (Orbax 0.12.8).
    """
    logger, hook, late = logging.getLogger("absl"), sys.unraisablehook, threading.Event()
    before = set(threading.enumerate())

    def is_not_orbax(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    def unless_late(unraisable: Any) -> None:
        if str(unraisable.exc_value) == "Event loop is closed":
            late.set()
        else:
            hook(unraisable)

    logger.addFilter(is_not_orbax)
    sys.unraisablehook = unless_late
    try:
        yield
    except BaseException:
        while late.wait(_QUIET_SECS):
            late.clear()
        raise
    finally:
        logger.removeFilter(is_not_orbax)
        if sys.unraisablehook is unless_late:
            sys.unraisablehook = hook
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith("asyncio_"):
                thread.join(_MOST_WAIT_SECS)  # another's may have no end
