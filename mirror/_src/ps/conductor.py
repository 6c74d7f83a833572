"""`Conductor`: carries out what the scheduler decides, and reports what happened to it."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

from mirror._src.ps import tasks as act
from mirror._src.ps.messages import (
    Definition,
    NotSetUp,
    Raised,
    Rejected,
    Result,
    ServerLost,
    ServerSnapshot,
)
from mirror._src.ps.processes import Engine, Lost, Task, are_all_answers, error_of
from mirror._src.ps.remote_value import CancelledError
from mirror._src.ps.schedule import Scheduler

_logger = logging.getLogger("mirror")

_MAX_QUEUED = 1000
"""Most tasks that wait for a worker; then `schedule` waits, because their batches are in memory."""

_STUCK_SECS = 30.0
_START_SECS = 300.0  # of which JAX takes seconds in each process
_LINE_SECS = 10.0  # between the lines about a wait


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
        engine: Engine,
        *,
        staleness: int | None,
        snapshot_every: int = 0,
    ) -> None:
        self._engine = engine
        self._scheduler = Scheduler(
            engine.num_workers,
            staleness=staleness,
            snapshot_every=snapshot_every,
        )
        self._tasks: dict[int, Task] = {}
        self._current: dict[int, set[int]] = {}  # the numbers of each worker's assignments
        self._ready: set[int] = set()
        self._taken: dict[int, list[ServerSnapshot]] = {}
        is_sync = staleness == 0
        self._definitions = [engine.dumps(Definition((), None, is_sync))] * engine.num_servers
        self.kept = [ServerSnapshot({})] * engine.num_servers
        self.losses: dict[str, int] = {"workers": 0, "rejoined": 0, "servers": 0}
        self.devices_per_worker = 1
        self._broken: BaseException | None = None
        self._is_closed = False
        self._progress = time.monotonic()
        self._changed = threading.Condition(threading.RLock())
        self._events: queue.SimpleQueue[Callable[[], Sequence[act.Action]] | None]
        self._events = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="mirror-coordinator", daemon=True)

    def start(self) -> None:
        """Loads the servers, sets the workers up, and starts the thread."""
        self._thread.start()
        with self._changed:
            self._perform(self._scheduler.load(0))
            for worker in range(self._engine.num_workers):
                self._perform([act.Revive(worker)])
            self._await_start()

    def close(self) -> None:
        """Ends the thread; scheduled functions that have not ended are canceled."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            for task in self._tasks.values():
                task.value._resolve(
                    error=CancelledError("The strategy was closed before this function ended.")
                )
            self._changed.notify_all()
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

    def submit(self, task: Task, *, is_step: bool) -> None:
        """Schedules a function.

        Raises:
            Exception: What an earlier function raised, once nothing runs any more.
        """
        with self._changed:
            self._wait(lambda: self._scheduler.queued < _MAX_QUEUED, None, "schedule")
            number, actions = self._scheduler.submit(len(task.arguments), is_step=is_step)
            self._tasks[number] = task
            if self._scheduler.running == 0:
                self._progress = time.monotonic()
            self._perform(actions)

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

    def load(
        self, definitions: Sequence[Any], snapshots: Sequence[ServerSnapshot], step: int
    ) -> None:
        """Gives the servers other values, when nothing is scheduled.

        Args:
            definitions: The pickled `Definition` of each server.
            snapshots: Values and state of the optimizer for each server.
            step: Number of updates that they have had.
        """
        with self._changed:
            self._wait(lambda: self._scheduler.is_idle, None, "schedule")
            self._definitions = list(definitions)
            self.kept = [snapshot._replace(version=step) for snapshot in snapshots]
            self._perform(self._scheduler.load(step))

    def take_snapshot(self) -> list[ServerSnapshot]:
        """Returns the state of all servers, between two updates."""
        with self._changed:
            while True:
                incarnation = self._scheduler.incarnation
                self._perform(self._scheduler.request_snapshot())
                self._wait(lambda: self._scheduler.is_idle, None, "join")
                # After a loss, a snapshot is taken before the steps since the last are repeated.
                if self._scheduler.incarnation == incarnation:
                    return self.kept

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
                    self._perform(event())
                except BaseException as error:
                    self._break(error)
                self._changed.notify_all()

    def _post(self, method: Callable[..., Sequence[act.Action]], *arguments: Any) -> Callable:
        """Returns a function that lets the thread call a method with a reply."""
        return lambda reply: self._events.put(lambda: method(*arguments, reply))

    def _perform(self, actions: Sequence[act.Action]) -> None:
        try:
            self._carry_out(actions)
        except Exception as error:  # the scheduler takes for started what was not
            self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        """Ends all tasks with an error of the engine, which all calls raise from now on."""
        self._broken = error
        for task in self._tasks.values():
            task.value._resolve(error=error)
        self._changed.notify_all()

    def _carry_out(self, actions: Sequence[act.Action]) -> None:
        for action in actions:
            match action:
                case act.Start(assignment):
                    task = self._tasks[assignment.task]
                    self._current.setdefault(assignment.worker, set()).add(assignment.number)
                    arguments = (assignment, *task.arguments[assignment.part])
                    done = self._post(self._answered, assignment)
                    self._engine.call_worker(assignment.worker, task.method, arguments, done)
                case act.Commit():
                    commits = [tuple(action)] * self._engine.num_servers
                    done = self._post(self._committed, action.incarnation)
                    self._engine.call_servers("commit", commits, done)
                case act.Deliver(number, results):
                    self._deliver(self._tasks[number], results)
                case act.Fail(number, error):
                    self._tasks[number].value._resolve(error=error)
                case act.Cancel(number):
                    self._tasks[number].value._resolve(
                        error=CancelledError(
                            "An earlier scheduled function failed before this one ran. Handle its "
                            "error, then schedule this function again."
                        )
                    )
                case act.Forget(number):
                    del self._tasks[number]
                case act.Revive(worker):
                    self._ready.discard(worker)
                    self._engine.set_up_worker(worker, self._post(self._revived, worker))
                case act.TakeSnapshot(number):
                    done = self._post(self._snapshot, number, self._scheduler.incarnation)
                    empty: list[tuple[Any, ...]] = [()] * self._engine.num_servers
                    self._engine.call_servers("snapshot", empty, done)
                case act.KeepSnapshot(number):
                    self.kept = self._taken.pop(number)
                case act.Restore(incarnation):
                    loads = [
                        (definition, kept, incarnation)
                        for definition, kept in zip(self._definitions, self.kept, strict=True)
                    ]
                    done = self._post(self._loaded, incarnation)
                    self._engine.call_servers("load", loads, done, waits_for_restart=True)
        self._changed.notify_all()

    def _deliver(self, task: Task, results: Sequence[Result]) -> None:
        self._progress = time.monotonic()
        try:
            value = task.join(results)
        except Exception as error:
            task.value._resolve(error=error)
        else:
            task.value._resolve(value)

    def _answered(self, assignment: act.Assignment, reply: Any) -> Sequence[act.Action]:
        number, worker = assignment.number, assignment.worker
        if isinstance(reply, Lost | NotSetUp):
            if number not in self._current.get(worker, ()):
                return []  # of a process whose loss is known
            return self._worker_lost(worker, assignment, reply)
        self._current.get(worker, set()).discard(number)
        if isinstance(reply, ServerLost):
            actions = self._scheduler.lost_server_in(number, reply.server)
            return self._noted(reply.server, actions)
        if isinstance(reply, Raised):
            return self._scheduler.failed(number, error_of(reply, worker, self._engine.loads))
        if isinstance(reply, BaseException):
            return self._scheduler.failed(number, reply)
        return self._scheduler.finished(number, reply)

    def _worker_lost(
        self, worker: int, assignment: act.Assignment, reply: Any
    ) -> Sequence[act.Action]:
        self._current.pop(worker, None)
        self.losses["workers"] += 1
        what = f"function {assignment.task}"
        if assignment.step is not None:
            what = f"step {assignment.step}"
        _logger.warning("Worker %d was lost in %s; its work goes to another worker.", worker, what)
        if isinstance(reply, Lost) and reply.is_forever:
            return self._scheduler.worker_gone(worker)
        return self._scheduler.worker_lost(worker)

    def _revived(self, worker: int, reply: Any) -> Sequence[act.Action]:
        if isinstance(reply, Lost):
            if not reply.is_forever:
                return self._scheduler.worker_lost(worker)
            _logger.error("Worker %d cannot be restarted: %s", worker, reply.reason)
            return self._scheduler.worker_gone(worker)
        if isinstance(reply, BaseException):
            raise reply
        self.devices_per_worker = reply
        if self.losses["workers"] > self.losses["rejoined"]:
            self.losses["rejoined"] += 1
            _logger.warning("Worker %d has returned.", worker)
        self._ready.add(worker)
        return self._scheduler.worker_ready(worker)

    def _committed(self, incarnation: int, reply: Any) -> Sequence[act.Action]:
        return [] if are_all_answers(reply) else self._server_lost(incarnation, None, reply)

    def _snapshot(self, number: int, incarnation: int, reply: Any) -> Sequence[act.Action]:
        if not are_all_answers(reply):
            return self._server_lost(incarnation, None, reply)
        self._taken = {number: list(reply)}
        return self._scheduler.snapshot_taken(number)

    def _loaded(self, incarnation: int, reply: Any) -> Sequence[act.Action]:
        if not are_all_answers(reply):
            return self._server_lost(incarnation, None, reply)
        return self._scheduler.restored(incarnation)

    def _server_lost(self, incarnation: int, server: int | None, reply: Any) -> list[act.Action]:
        if isinstance(reply, BaseException):
            raise reply
        for index, each in enumerate(reply if isinstance(reply, list) else [reply]):
            if isinstance(each, BaseException):
                raise each
            if isinstance(each, Lost):
                server = each.task
            elif isinstance(each, Rejected) and each.reason == "not loaded" and server is None:
                server = index
        return self._noted(server, self._scheduler.server_lost(incarnation, server))

    def _noted(self, server: int | None, actions: list[act.Action]) -> list[act.Action]:
        """Logs a loss of a server that the scheduler did not know yet."""
        is_new = any(isinstance(action, act.Restore) for action in actions)
        if is_new:
            self.losses["servers"] += 1
            name = "A parameter server" if server is None else f"Parameter server {server}"
            _logger.warning("%s was lost; all servers return to their last snapshot.", name)
        return actions

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
