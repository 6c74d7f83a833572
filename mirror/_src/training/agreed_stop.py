"""`AgreedStop`: ends `fit` before the same launch in all processes of a job.

A process that stopped by itself would leave the others in a collective that it never joins. So a
process only requests to stop. Then every process pauses before its next launch and says how many it
has launched; all of them continue to the largest number, and stop there. Nothing is exchanged while
no process has requested to stop, and no step becomes slower.

The first process that requests to stop calls all processes, and process 0 finds the largest number,
so the messages grow with the number of processes. In each process, one thread waits for the call,
and one for a request of this process, whose main thread may be busy with data.
"""

import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias, final

from mirror._src.cluster import consensus, store
from mirror._src.cluster.start import agreement_secs

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
        self._counts = consensus.Topic(f"{self._root}/at")
        self._mine: Request | None = None
        self._gate = threading.Lock()
        self._launched = 0
        self._is_paused = False
        self._last = 0
        self._error = ""
        self._is_decided = threading.Event()
        # Its `put` may interrupt itself, as signal handlers do; a method of an event may not.
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(act,), name="mirror stop", daemon=True)
            for act in (self._send, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, cause: Cause, why: str) -> None:
        """Requests to stop. Called by any thread and by signal handlers, so it never waits."""
        self._mine = self._mine or Request(cause, why)
        self._requests.put(self._mine)

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
        if self._launched >= self._last:
            return False
        self._launched += 1
        return True

    def close(self) -> None:
        """Ends the threads. A request that comes later finds that this process has finished."""
        me = store.process_index()
        self._requests.put(None)
        self._call([me], None)
        for thread in self._threads:
            thread.join(5.0)
        if self._is_paused:
            return
        if me == 0:  # it has made all launches, and decides no more
            self._counts.announce(str(self._launched))
        else:
            self._counts.post(str(self._launched))

    def _run(self, act: Callable[[], None]) -> None:
        try:
            act()
        except RuntimeError as error:  # the coordinator has ended
            self._error = str(error)
            self._is_paused = True
            self._is_decided.set()

    def _send(self) -> None:
        """Waits for a request of this process, and calls all, unless another one was faster."""
        mine = self._requests.get()
        if mine is None:
            return
        me, key = store.process_index(), f"{self._root}/request"
        store.set_default(key, json.dumps([me, mine]))
        text = store.get(key, time.monotonic() + agreement_secs())
        first, request = json.loads(text or json.dumps([me, mine]))
        self._call(range(store.process_count()) if first == me else [me], Request(*request))

    def _call(self, processes: Sequence[int], request: Request | None) -> None:
        for i in processes:
            store.set_default(f"{self._root}/call/{i}", json.dumps(request))

    def _watch(self) -> None:
        """Waits for the call to this process, or for the end."""
        request = json.loads(store.wait(f"{self._root}/call/{store.process_index()}"))
        if request is not None:
            self._decide(Request(*request))

    def _decide(self, request: Request) -> None:
        with self._gate:
            self._is_paused = True
            count = self._launched
        deadline = time.monotonic() + agreement_secs()
        try:
            self._last = int(self._counts.decide(str(count), _largest, deadline))
        except consensus.AbsentError as error:
            self._error = (
                f"fit() was to stop in all processes ({request.why}), but processes "
                f"{error.processes} did not respond within {agreement_secs():g} s. They have "
                "ended, or are stuck; their output says what they do."
            )
        self.request = request
        self._is_decided.set()


def _largest(counts: Sequence[str]) -> str:
    return str(max(map(int, counts)))
