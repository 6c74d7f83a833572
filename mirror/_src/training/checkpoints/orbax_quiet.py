"""Suppresses the log of Orbax, and joins its threads."""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_MOST_WAIT_SECS = 1.0
_QUIET_SECS = 0.1  # after a write that ended late, before the files of the save are removed


class _WithoutLateWrites:
    """Hook for unraisable exceptions without the writes that outlive Orbax's event loop."""

    def __init__(self, hook: Callable[[Any], object]) -> None:
        self._hook, self.is_late = hook, threading.Event()

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) == "Event loop is closed":
            self.is_late.set()
        else:
            self._hook(unraisable)


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Suppresses the log of Orbax, and joins its threads.

    Orbax 0.12.8 logs forty lines per checkpoint. When it fails, it closes its event loop while
    writes are still running, each of which then prints that the loop is closed; they may end at any
    time, so the hook that drops these lines stays. Orbax also abandons the threads of the loop,
    `asyncio_0`, without joining them.
    """
    logger, hook = logging.getLogger("absl"), sys.unraisablehook
    before = set(threading.enumerate())

    def is_not_orbax(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    quiet = hook if isinstance(hook, _WithoutLateWrites) else _WithoutLateWrites(hook)
    logger.addFilter(is_not_orbax)
    sys.unraisablehook = quiet
    try:
        yield
        if sys.unraisablehook is quiet:
            sys.unraisablehook = hook
    except BaseException:
        while quiet.is_late.wait(_QUIET_SECS):
            quiet.is_late.clear()
        raise
    finally:
        logger.removeFilter(is_not_orbax)
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith("asyncio_"):
                thread.join(_MOST_WAIT_SECS)  # threads of other libraries may never end
