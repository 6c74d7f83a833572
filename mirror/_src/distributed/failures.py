"""An exception that ends one process of a job is reported by all of them.

By default, JAX makes that process wait in a barrier for the others, which wait for it in a
collective: for `shutdown_secs`, and without a word. Instead, it posts its error and leaves. The
others print the error at once, in a thread, because they may be in a collective. JAX ends them
after `heartbeat_secs` at the latest.
"""

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import final

from mirror._src.distributed import store
from mirror._src.utils.errors import first_line

_ALL_SECS = 2.0  # for the others to fail as well, if the error is theirs, too
_POLL_SECS = 0.5
_POST_SECS = 3.0
_TEXT_LENGTH = 2000
_FIRST = "failed/first"
_INTERRUPTED = 130


def first_failure() -> tuple[int, str] | None:
    """Returns the process that an uncaught exception ended first, and its error, or None.

    Raises:
        RuntimeError: If the coordinator cannot be reached.
    """
    text = store.read(_FIRST, time.monotonic())
    if text is None:
        return None
    process, cause = json.loads(text)
    return int(process), str(cause)


@final
class Failures:
    """The hook of uncaught exceptions, and the thread that waits for failures of others."""

    def __init__(self) -> None:
        self._previous = sys.excepthook
        self._status: int | None = None
        self._have_all_failed = False
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mirror failures", daemon=True)

    def install(self) -> None:
        """Starts to watch, once this process has joined its job."""
        self._thread.start()
        # Runs before JAX's own function, which was registered earlier and waits in the barrier.
        atexit.register(self._end)
        sys.excepthook = self._report

    def _report(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Prints the exception, and posts it."""
        self._previous(kind, error, trace)
        text = f"{kind.__name__}: {first_line(error)}"[:_TEXT_LENGTH]
        # In a thread, because posting waits for as long as the coordinator is stopped.
        posting = threading.Thread(target=self._post, args=(text,), daemon=True)
        posting.start()
        posting.join(_ALL_SECS + _POST_SECS)
        if not self._have_all_failed:
            self._status = _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1

    def _post(self, text: str) -> None:
        with contextlib.suppress(Exception):  # the coordinator may have ended
            me, count = store.process_index(), store.process_count()
            store.propose(_FIRST, json.dumps([me, text]))
            store.propose(f"failed/{me}", text)
            deadline = time.monotonic() + _ALL_SECS
            if all(store.read(f"failed/{i}", deadline) is not None for i in range(count)):
                self._have_all_failed = True  # they end in order

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the coordinator has ended
            while not self._has_ended.is_set():
                text = store.read(_FIRST, time.monotonic() + _POLL_SECS)
                if text is None:
                    continue
                first, cause = json.loads(text)
                if first != store.process_index():
                    print(f"Process {first} has failed: {cause}", file=sys.stderr, flush=True)
                return

    def _end(self) -> None:
        """Ends the thread, which must not use the store after JAX closes it; leaves if failed."""
        self._has_ended.set()
        if self._status is not None:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(self._status)
        self._thread.join(5.0)
