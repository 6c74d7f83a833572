"""A job ends as one: what ends one process is reported by all of them, and ends all of them.

By default, JAX makes a process that ends wait in a barrier for the others, which wait for it in a
collective: for `shutdown_secs`, and without a word; then it aborts all of them. Instead, a process
posts its error, or how many launches it has made, before it ends. A thread of each process waits
for this, compares the launches (see `ledger`), and prints the error. The main thread raises it at
its next launch, or where it waits for other processes; if it waits in native code, the thread ends
the process.
"""

import atexit
import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, final

from mirror._src.base.errors import ProgramMismatchError, ReplicaDivergenceError, first_line
from mirror._src.cluster import store
from mirror._src.cluster.ledger import Difference, ledger

_ALL_SECS = 2.0  # for the others to fail as well, if the error is theirs, too
_POLL_SECS = 0.5
_POST_SECS = 3.0
_STUCK_SECS = 3.0  # in one place, after which the thread ends the process
_MOST_SECS = 12.0
_FAREWELL_SECS = 1.0  # from the last message of a process to its end
_TEXT_LENGTH = 2000
_EVENTS = "end"
LEFT = "left"
"""Directory of the store, in which each process posts that it ends: it makes no more calls."""
_INTERRUPTED = 130
_LOST_CONNECTION = "Gloo"  # in errors of collectives on CPUs (JAX 0.10 to 0.12)


class Event(NamedTuple):
    """The end of a job, or of one of its processes.

    Attributes:
        kind: `"failure"` (an exception in one process), `"end"` (one process has ended),
            `"stop"` (one process waits for a process that has ended), or the kind of a
            `Difference`.
        process: The process.
        text: The error or message; for `"end"`, what it has found to differ in its data, or "".
        launches: How many launches the process has begun.
    """

    kind: str
    process: int
    text: str
    launches: int = 0


def first_failure() -> Event | None:
    """Returns the error that ended a process first, or None.

    Raises:
        RuntimeError: If the coordinator cannot be reached.
    """
    for number in range(2):
        text = store.get(f"{_EVENTS}/{number}", time.monotonic())
        event = Event(*json.loads(text)) if text is not None else None
        if event is not None and (event.kind == "failure" or (event.kind == "end" and event.text)):
            return event
    return None


def error_of(event: Event) -> Exception:
    """Returns the error that an event raises in the processes that still run."""
    if event.kind == "program":
        return ProgramMismatchError(event.text)
    if event.kind in ("value", "end"):
        return ReplicaDivergenceError(event.text)
    if event.kind == "stop":
        return RuntimeError(event.text)
    is_divergence = event.text.startswith(ReplicaDivergenceError.__name__)
    kind = ReplicaDivergenceError if is_divergence else RuntimeError
    return kind(f"Process {event.process} has failed: {event.text}")


def missing_launch(ended: Event, process: int, count: int, last: str) -> str:
    """Returns the message for a process whose launch another process will never make."""
    return (
        f"Process {ended.process} has ended after launch {ended.launches}, but process "
        f"{process} has begun launch {count}, {last}, which needs all processes. End "
        "the program at the same step on every process: look for sys.exit, return, break or an "
        "iterator that is shorter there."
    )


@final
class Failures:
    """The hook of uncaught exceptions, and the thread that waits for the ends of others.

    Args:
        shutdown_secs: Time to wait at the end for processes that are still at work.
    """

    def __init__(self, shutdown_secs: float) -> None:
        self._shutdown_secs = shutdown_secs
        self._previous = sys.excepthook
        self._status: int | None = None
        self._have_all_failed = False
        self._silent: list[int] = []  # processes that did not fail within `_ALL_SECS`
        self._is_exiting = False
        self._ended: Event | None = None
        self._is_over = threading.Event()
        self._stopped_at = 0.0
        self._place: object = None
        self._place_since = 0.0
        self._exchange_lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="mirror failures", daemon=True)
        self._leaves, self._has_left = threading.Event(), threading.Event()
        # Started early: Python 3.12 starts no thread while it ends.
        self._last = threading.Thread(target=self._leave_late, name="mirror farewell", daemon=True)

    def install(self) -> None:
        """Starts to watch, once this process has joined its job."""
        self._thread.start()
        self._last.start()
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
        posting = threading.Thread(target=self._post_failure, args=(text,), daemon=True)
        posting.start()
        posting.join(_ALL_SECS + _POST_SECS)
        silent = ", ".join(map(str, self._silent))
        if silent and _LOST_CONNECTION in str(error):
            print(
                f"mirror: process {store.process_index()} has lost its connection to another "
                f"process in a collective. Process {silent} has reported no error: read its output "
                "and its exit status. The system kills a process that needs too much memory.",
                file=sys.stderr,
                flush=True,
            )
        if not self._have_all_failed:
            self._status = _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1

    def _post_failure(self, text: str) -> None:
        with contextlib.suppress(Exception):  # the coordinator may have ended
            me, count = store.process_index(), store.process_count()
            _post(Event("failure", me, text, ledger.count))
            store.set_default(f"failed/by/{me}", "")
            deadline = time.monotonic() + _ALL_SECS
            failed = store.get_many("failed/by", count, deadline, {me: ""}, stops=False)
            self._silent = [i for i in range(count) if i not in failed]
            # The first one decides for all: a process must not wait for one that has left.
            store.set_default("failed/all", "yes" if len(failed) == count else "no")
            said = store.get("failed/all", time.monotonic() + _POST_SECS, stops=False)
            self._have_all_failed = said == "yes"  # they end in order

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError, AssertionError):  # the coordinator has ended
            number = 0
            while not self._is_over.is_set():
                # Not `store.wait`, which a message would have to end: a process that ended without
                # this delay while a step still ran hung in the cleanup of JAX 0.12, in 2 of 8 runs.
                deadline = time.monotonic() + _POLL_SECS
                text = store.get(f"{_EVENTS}/{number}", deadline, stops=False)
                if text is not None:
                    number += 1
                    event = Event(*json.loads(text))
                    if event.kind == "end":
                        self._ended = event
                    else:
                        self._stop(event)
                if store.stop is not None:
                    self._end_if_stuck()
                    self._is_over.wait(_POLL_SECS)
                    continue
                self._exchange()
                if self._ended is not None and ledger.num_joined > self._ended.launches:
                    me = store.process_index()
                    found = self._ended.text
                    message = found or missing_launch(self._ended, me, ledger.count, ledger.last)
                    event = Event("value" if found else "stop", me, message)
                    self._stop(event)
                    _post(event)

    def _exchange(self) -> None:
        with self._exchange_lock:  # until the job stops: this process may end at the same time
            difference: Difference | None = ledger.exchange()
            if difference is not None:
                event = Event(difference.kind, store.process_index(), difference.text)
                _post(event)
                self._stop(event)

    def _stop(self, event: Event) -> None:
        """Prints what has ended the job, which the main thread raises if it does not wait."""
        is_mine = event.kind == "failure" and event.process == store.process_index()
        if is_mine or store.stop is not None:
            return
        error = error_of(event)
        name = "" if event.kind == "failure" else f"{type(error).__name__}: "
        print(f"{name}{error}", file=sys.stderr, flush=True)
        if event.kind == "failure":
            self._is_over.wait(_ALL_SECS)  # for this process to raise its own error
        self._stopped_at = self._place_since = time.monotonic()
        store.stop = error

    def _end_if_stuck(self) -> None:
        """Ends the process if its main thread does not move, as in a collective."""
        now = time.monotonic()
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place = []
        while frame is not None:
            place.append((id(frame), frame.f_lasti))
            frame = frame.f_back
        if place != self._place:
            self._place, self._place_since = place, now
        is_stuck = now - self._place_since > _STUCK_SECS
        if self._is_exiting or not (is_stuck or now - self._stopped_at > _MOST_SECS):
            return
        print(
            f"mirror: process {store.process_index()} waits for other processes, and ends because "
            "of this error, with status 1.",
            file=sys.stderr,
            flush=True,
        )
        self._leave(1)

    def _end(self) -> None:
        """Ends this process with the others, or without them if one has failed."""
        self._is_exiting = True
        if not store.is_initialized():  # the user has called jax.distributed.shutdown
            self._is_over.set()
            return
        if self._status is not None:
            self._leave(self._status)
        if not self._have_all_failed:
            with contextlib.suppress(RuntimeError):  # the coordinator has ended
                self._await_ends()
        if store.stop is not None and not self._have_all_failed:
            is_wrong = isinstance(store.stop, ReplicaDivergenceError | ProgramMismatchError)
            if is_wrong and not ledger.divergence:  # it has raised that itself, before a launch
                self._leave(1)  # the results of this process are wrong
            if self._ended is not None and ledger.num_joined > self._ended.launches:
                self._leave(1)  # XLA would wait for the launch when no thread of Python runs
            self._say_farewell()
            self._is_over.set()
            self._thread.join(5.0)
            store.abandon()
            return
        # The thread must not use the store after JAX closes it.
        self._is_over.set()
        self._thread.join(5.0)

    def _await_ends(self) -> None:
        """Waits until all processes end, so that no process ends before its launches are compared.

        Returns early if the job stops.
        """
        if store.stop is not None:
            return
        me, count = store.process_index(), store.process_count()
        deadline = time.monotonic() + self._shutdown_secs
        end = Event("end", me, ledger.divergence, ledger.num_joined)
        store.set_default(f"{_EVENTS}/0", json.dumps(end))
        self._exchange()
        while not ledger.is_settled and store.stop is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECS / 10)
            self._exchange()
        mine = json.dumps([ledger.num_joined, ledger.last])
        store.set(f"{LEFT}/{me}", mine)
        with contextlib.suppress(Exception):  # `store.stop`
            if me == 0:
                left = store.get_many(LEFT, count, deadline, {me: mine})
                if len(left) == count:
                    self._exchange()
                    if store.stop is None:  # else the others wait for its event
                        store.set(f"{LEFT}/all", json.dumps([left[i] for i in range(count)]))
            text = store.get(f"{LEFT}/all", deadline)
            if text is not None:
                self._compare_ends([json.loads(each) for each in json.loads(text)])

    def _compare_ends(self, ends: list[tuple[int, str]]) -> None:
        """Stops if all processes end, but not after the same launch."""
        counts = [launches for launches, _ in ends]
        fewest, most = min(counts), max(counts)
        if fewest == most:
            return
        last = counts.index(most)
        self._ended = Event("end", counts.index(fewest), "", fewest)
        self._stop(Event("stop", last, missing_launch(self._ended, last, *ends[last])))

    def _leave(self, status: int) -> None:
        """Ends the process now, process 0 after the others: without it, JAX aborts them."""
        logging.shutdown()
        self._say_farewell()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)

    def _say_farewell(self) -> None:
        self._leaves.set()
        self._has_left.wait(_MOST_SECS + _STUCK_SECS + _FAREWELL_SECS)

    def _leave_late(self) -> None:
        self._leaves.wait()
        _say_farewell()
        self._has_left.set()
        time.sleep(_MOST_SECS)  # the cleanup of JAX waits for a launch
        os._exit(1)


def _post(event: Event) -> None:
    """Posts an event, unless another process has been faster; the end of a process may precede."""
    for number in range(2):
        key = f"{_EVENTS}/{number}"
        store.set_default(key, json.dumps(event))
        text = store.get(key, time.monotonic() + _POST_SECS, stops=False)
        if text is None or json.loads(text)[0] != "end":
            return


def _say_farewell() -> None:
    with contextlib.suppress(Exception):
        me, count = store.process_index(), store.process_count()
        store.set_default(f"gone/{me}", running(str(os.getpid())))
        if me != 0:
            return
        deadline = time.monotonic() + _MOST_SECS + _STUCK_SECS
        gone: dict[str, str] = {}
        while len(gone) < count and time.monotonic() < deadline:
            gone = store.get_all("gone")
            time.sleep(_POLL_SECS / 2)
        time.sleep(_FAREWELL_SECS)
        others = [text for process, text in gone.items() if text and int(process) != me]
        # The cleanup of a process may take longer than its farewell.
        while any(running(text.split()[0]) == text for text in others):
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECS / 10)


def running(pid: str) -> str:
    """Returns number, start and host of a process of this machine that runs, or "".

    A container with the same host name may have another process of this number.
    """
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        if Path(f"/proc/{pid}/cmdline").read_bytes():  # empty once it has ended
            return f"{pid} {stat.rpartition(')')[2].split()[19]} {socket.gethostname()}"
    return ""
