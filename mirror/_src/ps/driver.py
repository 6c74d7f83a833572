"""`Driver`: which worker runs which part of which task, and what happens after a loss.

The driver is coroutines in one event loop: one or two per worker, and one for the servers. They
await calls of the engine, which raise `LostError`, and share the state of the driver without locks.

Words: A *task* is one call of `schedule`. A *step* is a task that trains; all others are
*functions*. An *assignment* is one part of a task on one worker. The *incarnation* counts how often
the servers went back to a snapshot.

Synchronous steps (`staleness=0`) run one after the other. All parts of step k pull version k. When
they have finished, the step is committed. Only then do servers apply gradients, so a part that is
repeated computes the same values. Assignments carry the last commit, because a worker may reach a
server before the commit does. The worker of a step with one part commits it with the pull of the
next step; servers keep the results of the last commit, in case the worker is lost then.

Asynchronous steps have one part, and servers apply it at once. A step starts only if at most k
others are in flight, and none of them has been overtaken k times: by steps that were in flight when
it started, or that started since. Then no gradient is more than k updates late, at any speed.
Without a bound, a worker has the next step before it has answered the last one.

A lost worker: its part returns to the head of the queue. The worker may still be running, and what
it pushes counts as the push of its task; servers ignore the second one.

A lost server: all servers go back to the kept snapshot, in the next incarnation. Assignments of
earlier incarnations are refused by the servers, and their answers are late. Steps that finished
since the snapshot are repeated before all others. Their values were delivered already. A snapshot
is taken while no step is in flight; only after it are the steps that it covers dropped.

An error of a function: the first is kept, tasks that have not started are canceled, steps that have
started are finished, and `wait` returns the error once nothing runs.
"""

import asyncio
import collections
import dataclasses
import heapq
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, final

from mirror._src.ps.engine import RayEngine
from mirror._src.ps.handles import CancelledError, ParameterServerLostError, RemoteValue
from mirror._src.ps.messages import (
    Assignment,
    Committed,
    LostError,
    Raised,
    ServerSnapshot,
)

_logger = logging.getLogger("mirror")

_MAX_QUEUED = 1000
"""Most tasks that wait for a worker; then `schedule` waits, because their batches are in memory."""

_STUCK_SECS = 30.0

Snapshot = tuple[Any, ServerSnapshot, Any]
"""The pickled `Definition` of a server, its snapshot, and a reference to the one of its tables."""

Condition = Callable[[], Any]


@dataclasses.dataclass(eq=False, slots=True, weakref_slot=True)
class Task:
    """A scheduled function, and how far it is.

    Attributes:
        method: The method of the worker that runs it.
        arguments: The arguments of the method, after the assignment, for each part of its batch.
        join: Returns its result, given the results of its parts.
        is_step: Whether it trains.
        value: What is resolved at its end.
        number: The order of tasks.
        waiting: The parts that wait for a worker, in increasing order.
        running: The assignment of each part that runs.
        results: The result of each part that has finished.
        losses: For each part, how many workers were lost with it.
        overtaken: How many steps were in flight when it started, or have started since.
    """

    method: str
    arguments: Sequence[tuple[Any, ...]]
    join: Callable[[Sequence[Any]], Any]
    is_step: bool
    value: RemoteValue = dataclasses.field(default_factory=RemoteValue)
    number: int = -1
    waiting: list[int] = dataclasses.field(default_factory=list)
    running: dict[int, Assignment] = dataclasses.field(default_factory=dict)
    results: dict[int, Any] = dataclasses.field(default_factory=dict)
    losses: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    overtaken: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def __lt__(self, other: "Task") -> bool:
        return self.number < other.number

    def reset(self) -> None:
        """Makes all parts wait for workers; replies to earlier assignments are late from now on."""
        self.waiting = list(range(len(self.arguments)))
        self.running, self.results = {}, {}


@final
class Driver:
    """Runs scheduled functions and steps on the workers; all methods run in one event loop.

    Args:
        engine: The processes.
        staleness: 0 for synchronous steps, k for asynchronous steps whose gradients are applied at
            most k updates late, None for asynchronous steps without a bound.
        snapshot_every: How many steps lie between two snapshots. 0: the loss of a server is an
            error.

    Attributes:
        max_losses: How many workers a part of a task may lose before the task fails, and how many
            times servers may be lost without a new result in between.
        kept: What the servers return to.
        ended: The error of all calls after the end.
        losses: How many `workers` and `servers` were lost, and workers have `rejoined`.
    """

    max_losses = 8

    def __init__(self, engine: RayEngine, staleness: int | None, snapshot_every: int) -> None:
        self._engine, self._staleness = engine, staleness
        self._snapshot_every = snapshot_every
        self.incarnation = self._version = self._num_tasks = 0
        self.kept: Sequence[Snapshot] = ()
        self._commit: Committed | None = None
        self._unsettled: dict[int, Task] = {}  # without result or error, and not canceled
        self._steps: list[Task] = []  # that have not started; heaps
        self._functions: list[Task] = []
        # Started, and not finished. In the order of their numbers, because they start in it.
        self._in_flight: dict[int, Task] = {}
        self._finished: list[Task] = []  # steps that are in no kept snapshot
        self._running: list[list[Task]] = [[] for _ in range(engine.num_workers)]  # late ones too
        self.ready: set[int] = set()
        self._num_gone = 0
        self._is_restoring = self._is_requested = False  # by the servers; a snapshot
        self._num_server_losses = 0
        self._obstacle: Exception | None = None  # no servers that have values, or no workers
        self._error: BaseException | None = None
        self.ended: BaseException | None = None
        self.losses = {"workers": 0, "rejoined": 0, "servers": 0}
        self.devices_per_worker = 1
        self._progress = time.monotonic()
        self._change = asyncio.Event()
        self._group = asyncio.TaskGroup()

    @property
    def is_idle(self) -> bool:
        """Whether all tasks have ended, nothing runs, and the servers have all updates."""
        return self._is_quiet and not (self._must_repeat or self._awaits_snapshot)

    @property
    def queued(self) -> int:
        """Number of tasks that have not started."""
        return len(self._steps) + len(self._functions)

    @property
    def running(self) -> int:
        """Number of assignments that run, including late ones."""
        return sum(map(len, self._running))

    @property
    def has_error(self) -> bool:
        """Whether the next `wait` returns an error."""
        return self._error is not None or self.ended is not None

    @property
    def has_lost_values(self) -> bool:
        """Whether the servers have lost their values, and no snapshot replaced them."""
        return isinstance(self._obstacle, ParameterServerLostError) or self.ended is not None

    @property
    def _must_repeat(self) -> bool:
        return bool(self._in_flight or self._steps)

    @property
    def _awaits_snapshot(self) -> bool:
        is_due = self._snapshot_every and len(self._finished) >= self._snapshot_every
        return bool(self._is_requested or is_due)

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing runs, and nothing will without another call."""
        is_busy = self._unsettled or self._is_restoring or self.running
        return not is_busy and (self._obstacle is not None or not self._must_repeat)

    # What the main program calls. Errors are returned: a coroutine cannot raise a StopIteration.

    async def wait(self, condition: Condition) -> BaseException | None:
        """Waits for a condition; returns what a function raised, once nothing runs any more."""
        await self._until(
            lambda: self.ended or (condition() if self._error is None else self._is_quiet)
        )
        error = self.ended or self._error
        if not self._must_repeat:  # otherwise, all workers are gone
            self._error = None
        return error

    async def submit(self, task: Task) -> BaseException | None:
        """Adds a task; only synchronous steps may have several parts.

        It is canceled at once if it cannot run.
        """
        error = await self.wait(lambda: self.queued < _MAX_QUEUED)
        if error is None:
            if not self.running:
                self._progress = time.monotonic()
            task.number = self._num_tasks
            self._num_tasks += 1
            self._unsettled[task.number] = task
            self._put(task)
            if self._obstacle is not None:
                self._keep(self._obstacle)
            self._notify()
        return error

    async def load(self, kept: Sequence[Snapshot]) -> BaseException | None:
        """Gives the servers other values, when nothing is scheduled."""
        error = await self.wait(lambda: self.is_idle)
        if error is None:
            self.kept, self._finished, self._num_server_losses = kept, [], 0
            if self.has_lost_values:
                self._obstacle = None
            self._restore()
        return error

    async def take_snapshot(self) -> BaseException | None:
        """Sets `kept` to the state of all servers after all tasks."""
        incarnation = None
        while True:
            error = await self.wait(lambda: self.is_idle)
            if error is not None or incarnation == self.incarnation:
                return error
            # The first time, and after the loss of a server, after which steps were repeated.
            incarnation, self._is_requested = self.incarnation, not self.has_lost_values
            self._notify()

    async def run(self) -> None:
        """Serves until it is canceled, or the engine fails."""
        try:
            async with self._group:
                for worker in range(self._engine.num_workers):
                    self._group.create_task(self._serve(worker))
                self._group.create_task(self._tend_servers())
                self._group.create_task(self._watch())
        except BaseExceptionGroup as failed:
            self.end(failed.exceptions[0], failed.exceptions[0])

    def end(self, error: BaseException, value: BaseException) -> None:
        """Ends all tasks with the error `value`; from now on, all calls return `error`."""
        self.ended = error
        for task in [*self._unsettled.values()]:
            self._settle(task, value)
        self._notify()

    async def _until(self, condition: Condition) -> None:
        while not condition():
            await self._change.wait()

    def _notify(self) -> None:
        """Lets everything that waits look at the state again."""
        self._change.set()
        self._change.clear()

    # Workers

    async def _serve(self, worker: int) -> None:
        """Sets a worker up and lets it work, again after each loss, until it is gone."""
        is_back = False
        while True:
            try:
                self.devices_per_worker = await self._engine.set_up_worker(worker)
            except LostError as lost:
                if lost.is_forever:
                    _logger.error("Worker %d cannot be restarted: %s", worker, lost)
                    break
                continue
            if is_back:
                self.losses["rejoined"] += 1
                _logger.warning("Worker %d has returned.", worker)
            is_back = True
            self.ready.add(worker)
            self._notify()
            # Without a bound, the next step waits at the worker.
            lanes = 2 if self._staleness is None else 1
            await asyncio.gather(*(self._work(worker) for _ in range(lanes)))
        self._num_gone += 1
        if self._num_gone == (count := self._engine.num_workers):
            self._obstacle = self._obstacle or RuntimeError(
                f"All {count} workers are lost and will not be restarted, so scheduled functions "
                "cannot run. Check the log of Ray, and the number of machines."
            )
            self._restart(self._in_flight.values())
            if self._unsettled or self._must_repeat:
                self._keep(self._obstacle)
        self._notify()

    async def _work(self, worker: int) -> None:
        """Runs one assignment after the other on a worker, until it is lost."""
        running = self._running[worker]
        while worker in self.ready:
            task = self._choose(worker)
            if task is None:
                await self._change.wait()
                continue
            assignment = self._start(task, worker)
            running.append(task)
            arguments = task.arguments[assignment.part]
            try:
                reply = await self._engine.call_worker(worker, task.method, assignment, *arguments)
            except LostError:
                self._worker_lost(worker, assignment, task)
            except Exception as error:
                self._answered(worker, assignment, task, error)
            else:
                self._answered(worker, assignment, task, reply)
            running.remove(task)
            self._notify()

    def _choose(self, worker: int) -> Task | None:
        """Returns what a worker should start now, if anything."""
        if self._is_restoring or self._obstacle is not None:
            return None
        running = self._running[worker]
        if not running:
            steps = self._next_step(may_start=True)
            return min([*self._functions[:1], *steps], default=None)
        # How long a function takes is not known.
        if self._functions or not all(task.is_step for task in running):
            return None
        if len(running) > 1 or not all(self._running[other] for other in self.ready):
            return None
        # At the end, the last steps go to the workers that are idle first.
        steps = self._next_step(may_start=len(self._steps) > self._engine.num_workers)
        return min(steps, default=None)

    def _next_step(self, *, may_start: bool) -> list[Task]:
        """Returns the first step with a part that waits, if any.

        Args:
            may_start: Whether a step that has not started may start.
        """
        for task in self._in_flight.values():
            if task.waiting:
                return [task]
        if not may_start or self._awaits_snapshot:
            return []
        # The gradient of a step is late by the updates between its pull and its push. They are of
        # steps that are in flight when it starts, or that start until it finishes.
        # (So of at most k: the first of them has been overtaken by all others.)
        is_within_bound = self._staleness is None or all(
            task.overtaken < self._staleness for task in self._in_flight.values()
        )
        return self._steps[:1] if is_within_bound else []

    def _start(self, task: Task, worker: int) -> Assignment:
        if not task.is_step:
            heapq.heappop(self._functions)
        elif task.number not in self._in_flight:
            # A step whose worker is lost stays in flight until it is repeated: the lost worker may
            # still push its gradient.
            heapq.heappop(self._steps)
            for other in self._in_flight.values():
                other.overtaken += 1
            task.overtaken = len(self._in_flight)
            self._in_flight[task.number] = task
        # A worker keeps its part from step to step: parts may differ in size, and each size is
        # compiled where it runs first.
        part = worker if worker in task.waiting else task.waiting[0]
        step = self._version if task.is_step and self._staleness == 0 else None
        assignment = Assignment(
            *(task.number, part, len(task.arguments), self.incarnation, self._commit, step)
        )
        task.waiting.remove(part)
        task.running[part] = assignment
        return assignment

    def _answered(self, worker: int, assignment: Assignment, task: Task, reply: Any) -> None:
        """Handles the answer of a worker, unless the task has ended or started again since."""
        self._progress = time.monotonic()
        is_late = task.running.get(assignment.part) is not assignment
        if isinstance(reply, LostError):  # which the worker returned: of a server
            if not is_late:
                self._put_back(task, assignment.part)
            self._server_lost(assignment.incarnation, reply.index)
        elif is_late:
            return
        elif isinstance(reply, Raised):
            self._fail(task, error_of(reply, worker, self._engine.loads))
        elif isinstance(reply, BaseException):
            self._fail(task, reply)
        else:
            del task.running[assignment.part]
            task.results[assignment.part] = reply
            if len(task.results) == len(task.arguments):
                self._complete(task)

    def _worker_lost(self, worker: int, assignment: Assignment, task: Task) -> None:
        if worker in self.ready:
            self.ready.remove(worker)
            self.losses["workers"] += 1
            step = assignment.step
            what = f"function {task.number}" if step is None else f"step {step}"
            text = "Worker %d was lost in %s; its work goes to another worker."
            _logger.warning(text, worker, what)
        part = assignment.part
        if task.running.get(part) is not assignment:
            return
        task.losses[part] += 1
        if task.losses[part] <= self.max_losses:
            self._put_back(task, part)
            return
        text = (
            f"{task.losses[part]} workers were lost while they ran scheduled function "
            f"{task.number}. Check what it does to its process: for example, how much memory it "
            "takes."
        )
        self._fail(task, RuntimeError(text))

    # Tasks

    def _put(self, task: Task) -> None:
        heapq.heappush(self._steps if task.is_step else self._functions, task)

    def _put_back(self, task: Task, part: int) -> None:
        """Lets a part that has started run again. After an error, only a step."""
        del task.running[part]
        task.waiting = sorted([*task.waiting, part])
        if not task.is_step:
            self._put(task)
            if self._error is not None:
                self._withdraw()

    def _restart(self, steps: Iterable[Task]) -> None:
        """Makes steps, and all that are in flight, wait as if they had not started."""
        for task in steps:
            task.reset()
            self._put(task)
        self._in_flight.clear()

    def _complete(self, task: Task) -> None:
        """Commits a task that has finished, and remembers it if it is a step."""
        if task.is_step:
            del self._in_flight[task.number]
            if self._staleness == 0:
                self._commit = Committed(self._version, task.number, len(task.arguments))
                self._version += 1
                if not all(result.is_committed for result in task.results.values()):
                    self._send_commit()
            if self._snapshot_every:
                self._finished.append(task)
        results = [task.results[part] for part in sorted(task.results)]
        task.results = {}
        if task.number in self._unsettled:  # otherwise, it was delivered before it was repeated
            self._num_server_losses = 0
            # Later: the main program, which it wakes, would delay what starts.
            asyncio.get_running_loop().call_soon(self._deliver, task, results)

    def _deliver(self, task: Task, results: Sequence[Any]) -> None:
        if self._unsettled.pop(task.number, None) is not None:
            try:
                task.value._resolve(task.join(results))
            except Exception as error:
                task.value._resolve(error=error)
            self._notify()

    def _fail(self, task: Task, error: BaseException) -> None:
        """Ends a task with its error; a synchronous step is not committed."""
        self._in_flight.pop(task.number, None)
        task.running = {}
        self._settle(task, error)
        self._keep(error)

    def _keep(self, error: BaseException) -> None:
        """Keeps the first error, and cancels what has not started."""
        self._error = self._error or error
        self._withdraw()

    def _withdraw(self) -> None:
        waiting, self._functions = sorted([*self._steps, *self._functions]), []
        self._steps = [task for task in waiting if task.number not in self._unsettled]
        for task in waiting:
            text = (
                "An earlier scheduled function failed before this one ran. Handle its error, then "
                "schedule this function again."
            )
            self._settle(task, CancelledError(text))

    def _settle(self, task: Task, error: BaseException) -> None:
        """Resolves the value of a task with an error, unless it is a repetition."""
        if self._unsettled.pop(task.number, None) is not None:
            task.value._resolve(error=error)

    # Servers

    async def _tend_servers(self) -> None:
        """Restores what was kept after a loss, and takes snapshots that are due."""
        while True:
            await self._until(
                lambda: self._is_restoring or (self._awaits_snapshot and not self._in_flight)
            )
            incarnation, kept = self.incarnation, self.kept
            if self._is_restoring:
                loads = [(*each, incarnation) for each in kept]
                await self._call_servers(incarnation, "load", loads)
                self._is_restoring &= incarnation != self.incarnation
            else:
                self._send_commit()  # the commit of a worker may still be on its way
                snapshots = await self._call_servers(incarnation, "snapshot", [()] * len(kept))
                if snapshots is not None and incarnation == self.incarnation:
                    self.kept = [(old[0], *new) for old, new in zip(kept, snapshots, strict=True)]
                    self._finished.clear()
                    self._is_requested, self._num_server_losses = False, 0
            self._notify()

    def _send_commit(self) -> None:
        """Lets the servers commit the last synchronous step, unless they have."""
        if self._commit is not None:
            commits = [(self.incarnation, *self._commit)] * self._engine.num_servers
            self._group.create_task(self._call_servers(self.incarnation, "commit", commits))

    def _call_servers(
        self, incarnation: int, method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> Coroutine[Any, Any, list[Any] | None]:
        """Calls a method of each server, at once: the order of calls matters.

        Returns:
            What waits for the replies: None if a server was lost.
        """
        call = self._engine.call_server
        replies = asyncio.gather(*(call(i, method, *own) for i, own in enumerate(arguments)))
        return self._replies(incarnation, replies)

    async def _replies(self, incarnation: int, replies: Awaitable[list[Any]]) -> list[Any] | None:
        try:
            return await replies
        except LostError as lost:
            self._server_lost(incarnation, lost.index)
            self._notify()
            return None

    def _server_lost(self, incarnation: int, server: int | None) -> None:
        """Handles the loss of the values of a server.

        Args:
            incarnation: The incarnation of the call that failed. The loss of values that were
                replaced since is ignored.
            server: Index of the server, for the message.
        """
        if incarnation != self.incarnation or self.has_lost_values:
            return
        self._num_server_losses += 1
        self._restart([*self._finished, *self._in_flight.values()])
        self._finished.clear()
        name = "A parameter server" if server is None else f"Parameter server {server}"
        is_sync = self._staleness == 0
        progress = f"step {self._version}" if is_sync else f"{self._num_tasks} tasks"
        if not self._snapshot_every:
            self._lose(
                f"{name} was lost after {progress}, and there is no snapshot of its values. Restore"
                " a checkpoint, or pass `snapshot_every=100` to recover from snapshots."
            )
        elif self._num_server_losses > self.max_losses:
            self._lose(
                f"{name} was lost after {progress}: {self._num_server_losses} losses without a new"
                " result. Check the memory of the parameter servers, then restore a checkpoint."
            )
        else:
            self.losses["servers"] += 1
            _logger.warning("%s was lost; all servers return to their last snapshot.", name)
            self._restore()
            if self._obstacle is not None and self._must_repeat:  # all workers are gone
                self._keep(self._obstacle)

    def _lose(self, message: str) -> None:
        """Ends training: the servers have no values, and only `load` can give them some."""
        self._obstacle = ParameterServerLostError(message)
        self._is_restoring = self._is_requested = False
        self._keep(self._obstacle)
        self._steps.clear()

    def _restore(self) -> None:
        self.incarnation += 1
        self._version, self._commit = self.kept[0][1].version, None
        self._is_restoring = True
        self._notify()

    async def _watch(self) -> None:
        """Logs when nothing has ended for long."""
        while True:
            await asyncio.sleep(_STUCK_SECS)
            self.log_if_stuck()

    def log_if_stuck(self) -> None:
        """Logs what waits and runs if no function has ended for long."""
        idle = time.monotonic() - self._progress
        if not self.is_idle and idle >= _STUCK_SECS:
            num_workers = self._engine.num_workers
            _logger.warning(
                "No scheduled function has ended for %.0f s: %d wait, %d run, and %d of %d workers "
                "are lost and have not returned.",
                *(idle, self.queued, self.running),
                *(num_workers - len(self.ready), num_workers),
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
