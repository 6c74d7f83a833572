"""`AgreedStop`: ends `fit` before the same launch in all processes of a job.

A process that stopped by itself would leave the others in a collective that it never joins. So a
process only requests to stop. Then every process pauses before its next launch and says how many it
has launched; all of them continue to the largest number, and stop there. Nothing is exchanged while
no process has requested to stop, and no step becomes slower.
"""

import itertools
import json
import threading
import time
from typing import Literal, NamedTuple, TypeAlias, final

from mirror._src.distributed import store
from mirror._src.distributed.start import agreement_secs

Cause: TypeAlias = Literal["stop", "interrupt", "SIGTERM"]

_POLL_SECS = 0.1
_numbers = itertools.count()  # every process makes the same calls of `fit`


class Request(NamedTuple):
    """A request to stop.

    Attributes:
        cause: A callback, Ctrl-C or SIGTERM.
        why: The reason, for users.
    """

    cause: Cause
    why: str


@final
class AgreedStop:
    """The agreement of all processes on the launch before which `fit` stops."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self._root = f"stop/{next(_numbers)}"
        self._mine: Request | None = None
        self._gate = threading.Lock()
        self._launched = 0
        self._is_paused = False
        self._last = 0
        self._error = ""
        self._is_decided, self._is_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mirror stop", daemon=True)
        self._thread.start()

    def ask(self, cause: Cause, why: str) -> None:
        """Requests to stop. Called by any thread and by signal handlers, so it never waits."""
        self._mine = self._mine or Request(cause, why)

    def may_launch(self) -> bool:
        """Counts a launch; returns False if all processes stop before it.

        Raises:
            RuntimeError: If a process has requested to stop, and another one does not respond.
        """
        if self._mine is not None:
            self._is_decided.wait()  # so that requests of all processes at one step end there
        with self._gate:
            if not self._is_paused:
                self._launched += 1
                return True
        while not self._is_decided.wait(_POLL_SECS):  # a second Ctrl-C raises here
            pass
        if self._error:
            raise RuntimeError(self._error)
        if self._launched == self._last:
            return False
        self._launched += 1
        return True

    def close(self) -> None:
        """Ends the thread. A request that comes later finds that this process has finished."""
        self._is_closed.set()
        self._thread.join(5.0)
        if not self._is_paused:
            store.post(f"{self._root}/at/{store.process_index()}", str(self._launched))

    def _watch(self) -> None:
        """Waits for a request of any process."""
        try:
            while not self._is_closed.is_set():
                mine = self._mine
                if mine is not None:
                    store.propose(f"{self._root}/request", json.dumps(mine))
                text = store.read(f"{self._root}/request", time.monotonic() + _POLL_SECS)
                if text is not None:
                    self._decide(Request(*json.loads(text)))
                    return
        except RuntimeError as error:  # the coordinator has ended
            self._error = str(error)
            self._is_paused = True
            self._is_decided.set()

    def _decide(self, request: Request) -> None:
        with self._gate:
            self._is_paused = True
            count = self._launched
        store.post(f"{self._root}/at/{store.process_index()}", str(count))
        deadline = time.monotonic() + agreement_secs()
        ids = range(store.process_count())
        texts = [store.read(f"{self._root}/at/{i}", deadline) for i in ids]
        absent = [i for i, text in zip(ids, texts, strict=True) if text is None]
        if absent:
            self._error = (
                f"fit() was to stop in all processes ({request.why}), but processes {absent} did "
                f"not respond within {agreement_secs():g} s. They have ended, or are stuck; their "
                "output says what they do."
            )
        self._last = max((int(text) for text in texts if text is not None), default=0)
        self.request = request
        self._is_decided.set()
