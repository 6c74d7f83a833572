"""Consensus: process 0 decides from the texts of all processes.

Every process posts one text and reads one decision, so the number of messages grows with the number
of processes, not with the number of pairs. This module alone knows how long to wait, how others
fail, and when keys may be deleted. No device is used, so processes that are about to run different
programs can find that out.
"""

import contextlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, final

from mirror._src.base.errors import require_secs
from mirror._src.cluster import store
from mirror._src.cluster.failures import LEFT, error_of, first_failure

_T = TypeVar("_T")
_POLL_SECS = 0.5  # between two looks at whether the others can still come
_MARGIN_SECS = 5.0  # for the decision, after the last text
_ABSENT, _DECIDED = "absent", "decided"

Gone = Callable[[Sequence[int]], str]
"""Returns why one of these processes will not come, or ""."""

_closed: deque[str] = deque(maxlen=100)
_lock = threading.Lock()


class AbsentError(RuntimeError):
    """Raised in every process that has arrived if others do not arrive.

    Attributes:
        processes: Indices of the processes that have not arrived.
        reason: Why they will not; "" if the deadline has passed.
    """

    def __init__(self, processes: Sequence[int], reason: str = "") -> None:
        super().__init__(reason or f"processes {list(processes)} have not arrived")
        self.processes, self.reason = list(processes), reason


@final
class Topic:
    """Decisions one after the other; every process makes the same calls.

    Args:
        key: Key of the store, used for this topic only. The text of process i for decision n is
            under `key/n/i`.
        gone: Returns why processes will not come; by default, they may always come. It may raise,
            which ends the wait.

    Attributes:
        number: Number of the next decision.
    """

    def __init__(self, key: str, gone: Gone = lambda _: "") -> None:
        self._key, self._gone = key, lambda missing: gone(missing) or _ended(missing)
        self.number = self._oldest = 0

    def decide(self, mine: str, judge: Callable[[Sequence[str]], str], deadline: float) -> str:
        """Returns the decision on the texts of all processes; every process must call it.

        Args:
            mine: The text of this process.
            judge: Returns the decision, from the texts in the order of the processes. Only process
                0 calls it.
            deadline: When to stop waiting, as of `time.monotonic`.

        Raises:
            AbsentError: If a process does not arrive.
            RuntimeError: If an uncaught exception has ended another process, or the coordinator
                cannot be reached.
        """
        number, directory = self.number, self.post(mine)
        if store.process_index() != 0:
            return self._decision(directory, deadline)
        try:
            texts = self._texts(directory, mine, deadline)
        except AbsentError as error:
            absence = json.dumps([error.processes, error.reason])
            store.set(f"{directory}/decision", f"{_ABSENT} {absence}")
            raise
        decision = judge(texts)
        store.set(f"{directory}/decision", f"{_DECIDED} {decision}")
        for old in range(self._oldest, number):  # every process has read them
            store.delete(f"{self._key}/{old}/")
        self._oldest = number
        return decision

    def post(self, text: str) -> str:
        """Posts the text of this process without waiting; returns the directory of the decision."""
        directory, self.number = f"{self._key}/{self.number}", self.number + 1
        store.set(f"{directory}/{store.process_index()}", text)
        return directory

    def announce(self, decision: str) -> None:
        """Posts a decision of process 0 alone, which waits for no other."""
        directory, self.number = f"{self._key}/{self.number}", self.number + 1
        store.set(f"{directory}/decision", f"{_DECIDED} {decision}")

    def await_decision(self, deadline: float) -> str:
        """Returns the decision that process 0 announces; for all others.

        Raises:
            AbsentError: If process 0 does not announce it.
            RuntimeError: As `decide`.
        """
        directory, self.number = f"{self._key}/{self.number}", self.number + 1
        return self._parsed(self._waited(f"{directory}/decision", deadline), [0])

    def close(self) -> None:
        """Posts that this process makes no more calls; `has_closed` then says so to the others."""
        store.set_default(f"{self._key}/closed/{store.process_index()}", "")
        if store.process_index() == 0:
            with _lock:
                _closed.append(self._key)

    def has_closed(self, process: int) -> bool:
        """Whether a process makes no more calls."""
        return str(process) in store.get_all(f"{self._key}/closed")

    def _texts(self, directory: str, mine: str, deadline: float) -> list[str]:
        """Returns the texts of all processes, in process 0."""
        count = store.process_count()
        texts = {0: mine}

        def read(until: float) -> bool:
            texts.update(store.get_many(directory, count, until, texts))
            return len(texts) == count

        def missing() -> list[int]:
            return [i for i in range(count) if i not in texts]

        reason = _wait(read, deadline, lambda: self._gone(missing()))
        if missing():
            raise AbsentError(missing(), reason)
        return [texts[i] for i in range(count)]

    def _decision(self, directory: str, deadline: float) -> str:
        """Returns the decision of process 0, in all others."""
        text, absent = self._waited(f"{directory}/decision", deadline), list[int]()
        if text is None:
            arrived = store.get_all(directory)
            absent = [i for i in range(store.process_count()) if str(i) not in arrived]
            if not absent:  # the decision is on its way
                text = self._waited(f"{directory}/decision", time.monotonic() + _MARGIN_SECS)
        return self._parsed(text, absent or [0])

    def _waited(self, key: str, deadline: float) -> str | None:
        texts: list[str] = []

        def read(until: float) -> bool:
            text = store.get(key, until)
            texts.extend([] if text is None else [text])
            return bool(texts)

        reason = _wait(read, deadline, lambda: self._gone([0]))
        if reason and not texts:
            raise AbsentError([0], reason)
        return texts[0] if texts else None

    def _parsed(self, text: str | None, absent: Sequence[int]) -> str:
        kind, _, details = (text or "").partition(" ")
        if kind == _DECIDED:
            return details
        raise AbsentError(*(json.loads(details) if kind == _ABSENT else [absent]))


def _wait(read: Callable[[float], bool], deadline: float, gone: Callable[[], str]) -> str:
    """Repeats a read until it succeeds; returns why it never will, or "" at the deadline."""
    while not read(min(deadline, time.monotonic() + _POLL_SECS)):
        reason = gone()
        failed = first_failure()  # a process posts it before it is gone
        if failed is not None and failed.process != store.process_index():
            raise error_of(failed)
        store.require_not_stopped()
        if reason or time.monotonic() >= deadline:
            # It may have been posted before the process stopped.
            return "" if read(time.monotonic()) else reason
    return ""


def _ended(missing: Sequence[int]) -> str:
    """Returns which of these processes has ended, so that it makes no more calls, or ""."""
    left = store.get_all(LEFT)
    ended = next((i for i in missing if str(i) in left), None)
    if ended is None:
        return ""
    return (
        f"Process {ended} has ended, and process {store.process_index()} waits for it. Make the "
        "same calls on every process: look for sys.exit, return, break or an iterator that is "
        "shorter there."
    )


_writes = Topic("writes")


@contextlib.contextmanager
def chief_writes(name: str, secs: float) -> Iterator[None]:
    """Context manager around a method that every process calls, in which only process 0 writes.

    It ends when process 0 has written, however long that takes.

    Args:
        name: Name of the method for messages.
        secs: Time to wait for the other processes to call it.

    Raises:
        RuntimeError: If a process does not call it in time.
    """
    try:
        _writes.decide("", lambda _: "", time.monotonic() + secs)
    except AbsentError as error:
        reason = error.reason or (
            f"processes {error.processes} have not called {name} within {secs:g} s. "
            "Call it on every process, not only on the chief, which writes; if they are only slow, "
            "wait longer: mirror.distributed.initialize(agreement_secs=...)."
        )
        raise RuntimeError(f"{name} failed: {reason}") from None
    try:
        yield
    finally:
        if store.process_index() == 0:
            _writes.announce("")
        else:
            _writes.await_decision(math.inf)


_barriers = Topic("barrier")


def barrier(name: str, timeout_secs: float = 300.0) -> None:
    """Waits until every process has called `barrier` as often, with the same name.

    It uses JAX's coordination service, not the devices. Without a job, it returns at once.

    Args:
        name: Name for the error message.
        timeout_secs: Time to wait for the other processes.

    Raises:
        RuntimeError: If a process does not arrive in time, has ended, or passes another name.
        TypeError: If `timeout_secs` is not a number.
        ValueError: If it is not positive or finite.

    >>> barrier("data is prepared")
    """
    secs = require_secs("timeout_secs", timeout_secs, 300)
    if store.process_count() == 1:
        return
    try:
        groups = json.loads(_barriers.decide(json.dumps(name), _grouped, time.monotonic() + secs))
        reason = ", ".join(f"{name!r} on processes {ids}" for name, ids in groups[:8])
        if len(groups) == 1:
            return
    except AbsentError as error:
        reason = error.reason or f"processes {error.processes} have not, within {timeout_secs:g} s"
    raise RuntimeError(
        f"Not all of {store.process_count()} processes reached barrier {name!r}: "
        f"{reason.rstrip('.')}. Call mirror.distributed.barrier({name!r}) on every process, also "
        "on those that are not the chief."
    )


def gather(name: str, mine: Mapping[str, Any], deadline: float) -> list[dict[str, Any]]:
    """Returns the values of every process, as JSON; every process must call it once per name.

    Raises:
        RuntimeError: If a process does not arrive by the deadline.
    """
    groups = json.loads(_decided(Topic(name), json.dumps(mine), _grouped, deadline))
    of_process = {i: values for values, ids in groups for i in ids}
    return [dict(of_process[i]) for i in range(store.process_count())]


def is_any(name: str, mine: bool, deadline: float) -> bool:
    """Whether a process passes True; every process must call it once per name.

    Raises:
        RuntimeError: If a process does not arrive by the deadline.
    """
    if store.process_index() == 0:
        sweep()
    with contextlib.closing(Topic(name)) as topic:
        return _decided(topic, str(mine), lambda texts: str("True" in texts), deadline) == "True"


def _decided(
    topic: Topic, mine: str, judge: Callable[[Sequence[str]], str], deadline: float
) -> str:
    """Returns the decision of a topic, or raises an error for the user."""
    start = time.monotonic()
    try:
        return topic.decide(mine, judge, deadline)
    except AbsentError as error:
        raise RuntimeError(
            error.reason
            or f"Process {store.process_index()} of {store.process_count()} waited "
            f"{time.monotonic() - start:.0f} s for processes {error.processes}, which have not "
            "joined. Start every process with the same program; their output says what they do."
        ) from None


def _grouped(texts: Sequence[str]) -> str:
    """Returns each different text once, with the processes that have posted it."""
    groups: dict[str, list[int]] = {}
    for i, text in enumerate(texts):
        groups.setdefault(text, []).append(i)
    return json.dumps([[json.loads(text), ids] for text, ids in groups.items()])


def sweep() -> None:
    """Deletes the keys of topics that all processes have closed. Only for process 0."""

    def is_over(key: str) -> bool:
        return len(store.get_all(f"{key}/closed")) == store.process_count()

    with _lock:
        for key in [*filter(is_over, _closed)]:
            store.delete(f"{key}/")
            _closed.remove(key)
