"""Suppresses the log of Orbax, and joins its threads."""

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
def quiet_orbax() -> Iterator[None]:
    """Suppresses the log of Orbax, and joins its threads.

    Orbax 0.12.8 logs forty lines per checkpoint. When it fails, it closes its event loop while
    writes are still running, each of which then prints that the loop is closed. It also abandons
    the threads of the loop, `asyncio_0`, without joining them.
    """
    logger, hook, is_late = logging.getLogger("absl"), sys.unraisablehook, threading.Event()
    before = set(threading.enumerate())

    def is_not_orbax(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    def unless_late(unraisable: Any) -> None:
        if str(unraisable.exc_value) == "Event loop is closed":
            is_late.set()
        else:
            hook(unraisable)

    logger.addFilter(is_not_orbax)
    sys.unraisablehook = unless_late
    try:
        yield
    except BaseException:
        while is_late.wait(_QUIET_SECS):
            is_late.clear()
        raise
    finally:
        logger.removeFilter(is_not_orbax)
        if sys.unraisablehook is unless_late:
            sys.unraisablehook = hook
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith("asyncio_"):
                thread.join(_MOST_WAIT_SECS)  # threads of other libraries may never end
