"""`Conductor`: carries out what the scheduler decides, in a background thread."""

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

from mirror._src.ps.engine import RayEngine
from mirror._src.ps.handles import CancelledError
from mirror._src.ps.messages import (
    Assignment,
    Committed,
    Definition,
    Lost,
    NotSetUp,
    Raised,
    Rejected,
    ServerLost,
    ServerSnapshot,
)
from mirror._src.ps.schedule import Scheduler, Task

_logger = logging.getLogger("mirror")

_MAX_QUEUED = 1000
"""Most tasks that wait for a worker; then `schedule` waits, because their batches are in memory."""

_STUCK_SECS = 30.0
_START_SECS = 300.0  # of which JAX takes seconds in each process
_LINE_SECS = 10.0  # between the lines about a wait


Snapshot = tuple[ServerSnapshot, Any]  # and a reference to the one of its tables


@final
class Conductor:
    """Runs scheduled functions on the workers, in a background thread.

    Args:
        engine: The processes.
        staleness: As for `Scheduler`.
        snapshot_every: As for `Scheduler`.
    """

    def __init__(
        self,
        engine: RayEngine,
        *,
        staleness: int | None,
        snapshot_every: int = 0,
    ) -> None:
        self._engine = engine
        self._scheduler = Scheduler(
            self, engine.num_workers, staleness=staleness, snapshot_every=snapshot_every
        )
        self._ready: set[int] = set()
        definition = engine.dumps(Definition((), None, staleness == 0))
        self._definitions = [definition] * engine.num_servers
        self.losses: dict[str, int] = {"workers": 0, "rejoined": 0, "servers": 0}
        self.devices_per_worker = 1
        self._broken: BaseException | None = None
        self._is_closed = False
        self._progress = time.monotonic()
        self._changed = threading.Condition(threading.RLock())
        self._events: queue.SimpleQueue[Callable[[], None] | None]
        self._events = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="mirror-coordinator", daemon=True)

    def start(self) -> None:
        """Loads the servers, sets the workers up, and starts the thread."""
        self._thread.start()
        with self._changed:
            empty: Snapshot = (ServerSnapshot({}), None)
            self._do(self._scheduler.load, 0, [empty] * self._engine.num_servers)
            for worker in range(self._engine.num_workers):
                self._do(self.revive, worker)
            self._await_start()

    def close(self) -> None:
        """Ends the thread; scheduled functions that have not ended are canceled."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            text = "The strategy was closed before this function ended."
            self._resolve_all(CancelledError(text))
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    @property
    def is_idle(self) -> bool:
        """Whether all scheduled functions have ended."""
        with self._changed:
            return self._scheduler.is_idle

    @property
    def has_lost_values(self) -> bool:
        """Whether the servers have lost their values, and no snapshot replaced them."""
        with self._changed:
            return self._scheduler.has_lost_values or self._is_closed

    def submit(self, task: Task) -> None:
        """Schedules a function.

        Raises:
            Exception: What an earlier function raised, once nothing runs any more.
        """
        with self._changed:
            self._wait(lambda: self._scheduler.queued < _MAX_QUEUED, None, "schedule")
            if self._scheduler.running == 0:
                self._progress = time.monotonic()
            self._do(self._scheduler.submit, task)

    def join(self, timeout: float | None) -> None:
        """Waits until all scheduled functions have ended.

        Raises:
            TimeoutError: If they have not ended in time.
            Exception: What one of them raised.
        """
        with self._changed:
            self._wait(lambda: self._scheduler.is_idle, timeout, "join")

    def raise_error(self) -> None:
        """Raises what a function raised, once nothing runs any more."""
        with self._changed:
            self._wait(lambda: True, None, "done")

    def load(self, definitions: Sequence[Any], snapshots: Sequence[Snapshot], step: int) -> None:
        """Gives the servers other values, when nothing is scheduled.

        Args:
            definitions: The pickled `Definition` of each server.
            snapshots: Values and state of the optimizer for each server.
            step: Number of updates that they have had.
        """
        with self._changed:
            self._wait(lambda: self._scheduler.is_idle, None, "schedule")
            self._definitions = list(definitions)
            loaded = [(snapshot._replace(version=step), held) for snapshot, held in snapshots]
            self._do(self._scheduler.load, step, loaded)

    def take_snapshot(self) -> list[Snapshot]:
        """Returns the state of all servers, between two updates."""
        with self._changed:
            while True:
                incarnation = self._scheduler.incarnation
                self._do(self._scheduler.request_snapshot)
                self._wait(lambda: self._scheduler.is_idle, None, "join")
                # After a loss, a snapshot is taken before the steps since the last are repeated.
                if self._scheduler.incarnation == incarnation:
                    snapshots: list[Snapshot] = self._scheduler.kept
                    return snapshots

    # Everything below is called with the lock held.

    def _wait(self, condition: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Waits for a condition; raises what a function raised, once nothing runs any more.

        Args:
            condition: The condition, which is checked with the lock held.
            timeout: Seconds to wait, or None.
            what: Name of the method, for the error.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._broken is not None:
                raise self._broken
            if self._is_closed:
                raise RuntimeError("The strategy has been closed. Create a new one.")
            if self._scheduler.has_error:
                error = self._scheduler.take_error()
                if error is not None:
                    raise error
            elif condition():
                return
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(
                    f"{what}(timeout={timeout:g}) ended with {self._scheduler.queued} scheduled "
                    f"functions waiting and {self._scheduler.running} running. Call it again, or "
                    "pass a longer timeout."
                )
            self._changed.wait(left)

    def _await_start(self) -> None:
        """Waits for the servers and a worker.

        Raises:
            RuntimeError: If they have not started in time.
        """
        for _ in range(round(_START_SECS / _LINE_SECS)):
            try:
                self._wait(
                    lambda: self._scheduler.is_idle and bool(self._ready), _LINE_SECS, "start"
                )
                return
            except TimeoutError:
                missing = "servers" if self._ready else "workers"
                problem = f"The {missing} have not started. {self._engine.free_resources()}"
                _logger.warning("Waiting for the cluster. %s", problem)
        raise RuntimeError(
            f"{problem} Waited {_START_SECS:.0f} s. Close other strategies and end other actors "
            "that occupy the cluster, start more machines, or demand less in `worker_options` and "
            "`ps_options`."
        )

    def _loop(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=_STUCK_SECS)
            except queue.Empty:
                self._log_if_stuck()
                continue
            if event is None:
                return
            with self._changed:
                try:
                    event()
                except BaseException as error:
                    self._break(error)
                self._changed.notify_all()

    def _post(self, method: Callable[..., None], *arguments: Any) -> Callable[[Any], None]:
        """Returns a function that lets the thread call a method with a reply."""
        return lambda reply: self._events.put(lambda: method(*arguments, reply))

    def _do(self, method: Callable[..., Any], *arguments: Any) -> None:
        """Calls a method of the scheduler."""
        try:
            method(*arguments)
        except Exception as error:  # the scheduler takes for started what was not
            self._break(error)
            raise
        finally:
            self._changed.notify_all()

    def _break(self, error: BaseException) -> None:
        """Ends all tasks with an error of the engine, which all calls raise from now on."""
        self._broken = error
        self._resolve_all(error)

    def _resolve_all(self, error: BaseException) -> None:
        for task in self._scheduler.unsettled.values():
            task.value._resolve(error=error)
        self._changed.notify_all()

    # `Actions` of the scheduler.

    def run(self, assignment: Assignment, task: Task) -> None:
        """See `Actions`."""
        arguments = (assignment, *task.arguments[assignment.part])
        done = self._post(self._answered, assignment)
        self._engine.call_worker(assignment.worker, task.method, arguments, done)

    def commit(self, incarnation: int, commit: Committed) -> None:
        """See `Actions`."""
        arguments = [(incarnation, *commit)] * self._engine.num_servers
        self._call_servers("commit", arguments, lambda _: None)

    def revive(self, worker: int) -> None:
        """See `Actions`."""
        self._ready.discard(worker)
        self._engine.set_up_worker(worker, self._post(self._revived, worker))

    def collect(self, number: int) -> None:
        """See `Actions`."""
        empty: list[tuple[Any, ...]] = [()] * self._engine.num_servers
        taken = functools.partial(self._scheduler.snapshot_taken, number)
        self._call_servers("snapshot", empty, taken)

    def restore(self, incarnation: int, kept: Sequence[Snapshot]) -> None:
        """See `Actions`."""
        arguments = [
            (definition, snapshot, incarnation, held)
            for definition, (snapshot, held) in zip(self._definitions, kept, strict=True)
        ]
        self._call_servers(
            "load",
            arguments,
            lambda _: self._scheduler.restored(incarnation),
            waits_for_restart=True,
        )

    def _call_servers(
        self,
        method: str,
        arguments: Sequence[Sequence[Any]],
        then: Callable[[list[Any]], None],
        **options: bool,
    ) -> None:
        """Calls a method of each server, and then what gets the replies of all."""
        incarnation = self._scheduler.incarnation

        def answered(replies: list[Any]) -> None:
            if any(isinstance(each, Lost | Rejected | BaseException) for each in replies):
                self._server_lost(incarnation, replies)
            else:
                then(replies)

        self._engine.call_servers(method, arguments, self._post(answered), **options)

    def _answered(self, assignment: Assignment, reply: Any) -> None:
        number, worker, scheduler = assignment.number, assignment.worker, self._scheduler
        if isinstance(reply, Lost | NotSetUp):
            if scheduler.is_running(number):  # otherwise the loss of the process is known
                self._worker_lost(assignment, reply)
            return
        self._progress = time.monotonic()
        if isinstance(reply, ServerLost):
            self._note_loss(reply.server, scheduler.lost_server_in(number, reply.server))
        elif isinstance(reply, Raised):
            scheduler.failed(number, error_of(reply, worker, self._engine.loads))
        elif isinstance(reply, BaseException):
            scheduler.failed(number, reply)
        else:
            scheduler.finished(number, reply)

    def _worker_lost(self, assignment: Assignment, reply: Any) -> None:
        worker = assignment.worker
        self.losses["workers"] += 1
        what = f"function {assignment.task}"
        if assignment.step is not None:
            what = f"step {assignment.step}"
        _logger.warning("Worker %d was lost in %s; its work goes to another worker.", worker, what)
        if isinstance(reply, Lost) and reply.is_forever:
            self._scheduler.worker_gone(worker)
        else:
            self._scheduler.worker_lost(worker)

    def _revived(self, worker: int, reply: Any) -> None:
        if isinstance(reply, BaseException):
            raise reply
        if isinstance(reply, Lost) and reply.is_forever:
            _logger.error("Worker %d cannot be restarted: %s", worker, reply.reason)
            self._scheduler.worker_gone(worker)
        elif isinstance(reply, Lost):
            self._scheduler.worker_lost(worker)
        else:
            self.devices_per_worker = reply
            if self.losses["workers"] > self.losses["rejoined"]:
                self.losses["rejoined"] += 1
                _logger.warning("Worker %d has returned.", worker)
            self._ready.add(worker)
            self._scheduler.worker_ready(worker)

    def _server_lost(self, incarnation: int, replies: Sequence[Any]) -> None:
        server = None
        for index, reply in enumerate(replies):
            if isinstance(reply, BaseException):
                raise reply
            if isinstance(reply, Lost):
                server = reply.task
            elif isinstance(reply, Rejected) and reply.reason == "not loaded" and server is None:
                server = index
        self._note_loss(server, self._scheduler.server_lost(incarnation, server))

    def _note_loss(self, server: int | None, is_new: bool) -> None:
        """Logs a loss of a server that the scheduler did not know yet."""
        if is_new:
            self.losses["servers"] += 1
            name = "A parameter server" if server is None else f"Parameter server {server}"
            _logger.warning("%s was lost; all servers return to their last snapshot.", name)

    def _log_if_stuck(self) -> None:
        with self._changed:
            idle = time.monotonic() - self._progress
            if self._scheduler.is_idle or idle < _STUCK_SECS:
                return
            lost = self._engine.num_workers - len(self._ready)
            _logger.warning(
                "No scheduled function has ended for %.0f s: %d wait, %d run, and %d of %d workers "
                "are lost and have not returned.",
                *(idle, self._scheduler.queued, self._scheduler.running),
                *(lost, self._engine.num_workers),
            )


def error_of(raised: Raised, worker: int, loads: Callable[[Any], Any]) -> BaseException:
    """Returns the error that the user's function raised on a worker."""
    error: BaseException = RuntimeError(raised.text)
    if raised.pickled is not None:
        try:
            loaded = loads(raised.pickled)
            if isinstance(loaded, BaseException):
                error = loaded
            else:
                kind, arguments, attributes = loaded
                error = kind.__new__(kind, *arguments)
                error.args = arguments
                vars(error).update(attributes)
        except Exception:
            error = RuntimeError(raised.text)
    error.add_note(f"Raised on worker {worker}:\n{raised.traceback}")
    return error
