"""The scheduler of the coordinator: events in, calls of `Actions` out.

It has no thread, no clock and no connection. The conductor calls a method for each event, in any
order in which a network can deliver them.

Words: A *task* is one call of `schedule`. A *step* is a task that trains; all others are
*functions*. An *assignment* is one part of a task on one worker. The *incarnation* counts how often
the servers went back to a snapshot.

Synchronous steps (`staleness=0`) run one after the other. All parts of step k pull version k. When
they have finished, the step is committed. Only then do servers apply gradients, so a part that is
repeated computes the same values. Assignments carry the last commit, because a worker may reach a
server before the commit does.

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
started are finished, and `take_error` returns the error once nothing runs.
"""

import collections
import dataclasses
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, final

from mirror._src.ps.handles import CancelledError, ParameterServerLostError, RemoteValue
from mirror._src.ps.messages import Assignment, Committed


class Actions(Protocol):
    """Effects of the scheduler's decisions. None calls the scheduler before it has returned."""

    def run(self, assignment: Assignment, task: "Task") -> None:
        """Runs an assignment on its worker."""

    def commit(self, incarnation: int, commit: Committed) -> None:
        """Sends a commit to all servers. The order of commits matters; their answers do not."""

    def revive(self, worker: int) -> None:
        """Sets a restarted worker up, and reports it with `worker_ready`."""

    def collect(self, number: int) -> None:
        """Collects the state of all servers, and reports it with `snapshot_taken`."""

    def restore(self, incarnation: int, kept: Any) -> None:
        """Loads a snapshot on all servers, and reports it with `restored(incarnation)`."""


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
        pending: The parts that wait for a worker, in increasing order.
        running: The assignment number of each part that runs.
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
    pending: list[int] = dataclasses.field(default_factory=list)
    running: dict[int, int] = dataclasses.field(default_factory=dict)
    results: dict[int, Any] = dataclasses.field(default_factory=dict)
    losses: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    overtaken: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Makes all parts wait for workers; replies to earlier assignments are late from now on."""
        self.pending = list(range(len(self.arguments)))
        self.running, self.results = {}, {}

    def put_back(self, part: int) -> None:
        """Moves a part from `running` to `pending`."""
        del self.running[part]
        self.pending = sorted([*self.pending, part])


@final
class Scheduler:
    """Decides which worker runs which part of which task, and what happens after a loss.

    Workers are not ready at first. Servers are at version 0 of incarnation 0.

    Args:
        actions: Lets it happen.
        num_workers: Number of workers, at least 1.
        staleness: 0 for synchronous steps, k for asynchronous steps whose gradients are applied at
            most k updates late, None for asynchronous steps without a bound.
        snapshot_every: How many steps lie between two snapshots. 0: the loss of a server is an
            error.
        kept: The snapshot that servers have loaded.
        max_losses: How many workers a part of a task may lose before the task fails, and how many
            times servers may be lost without a new result in between.
    """

    def __init__(
        self,
        actions: Actions,
        num_workers: int,
        *,
        staleness: int | None,
        snapshot_every: int = 0,
        kept: Any = None,
        max_losses: int = 8,
    ) -> None:
        self._actions, self._num_workers, self._max_losses = actions, num_workers, max_losses
        self._staleness, self._is_sync = staleness, staleness == 0
        self.incarnation = 0
        self._version = 0
        self._commit: Committed | None = None
        self.unsettled: dict[int, Task] = {}  # without result or error, and not canceled
        self._steps: list[tuple[int, Task]] = []  # that have not started; heaps
        self._functions: list[tuple[int, Task]] = []
        # Started, and not finished. In the order of their numbers, because they start in it.
        self._in_flight: dict[int, Task] = {}
        self._running: dict[int, tuple[Assignment, Task]] = {}  # late ones too
        self._idle: dict[int, None] = {}  # the worker that has been idle longest comes first
        self._gone: set[int] = set()
        self._num_tasks = self._num_assignments = self._num_snapshots = 0
        self._snapshot_every = snapshot_every
        self.kept, self._kept_version = kept, 0
        self._finished: collections.deque[Task] = collections.deque()  # in no kept snapshot
        self._is_due = False  # whether a snapshot must be taken before the next step starts
        self._snapshot: tuple[int, int, int] | None = None  # number, steps covered, version
        self.is_restoring = False  # whether the servers are loading a snapshot
        self._num_server_losses = 0
        self._loss: str | None = None  # why the servers have no values any more
        self._error: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """Whether all tasks have ended, nothing runs, and the servers have all updates."""
        is_busy = self.unsettled or self._running or self._must_repeat
        return not (is_busy or self.is_restoring or self._awaits_snapshot)

    @property
    def has_error(self) -> bool:
        """Whether an error is kept that `take_error` has not returned yet."""
        return self._error is not None

    @property
    def has_lost_values(self) -> bool:
        """Whether servers have lost their values, which no snapshot replaced."""
        return self._loss is not None

    @property
    def queued(self) -> int:
        """Number of tasks that have not started."""
        return len(self._steps) + len(self._functions)

    @property
    def running(self) -> int:
        """Number of assignments that run, including late ones."""
        return len(self._running)

    def is_running(self, number: int) -> bool:
        """Whether an assignment has neither ended nor been taken from its worker."""
        return number in self._running

    @property
    def _must_repeat(self) -> bool:
        return bool(self._in_flight or self._steps)

    @property
    def _awaits_snapshot(self) -> bool:
        return self._is_due or self._snapshot is not None

    def submit(self, task: Task) -> None:
        """Adds a task; only synchronous steps may have several parts.

        It is canceled at once if an earlier error has not been taken yet, or if it cannot run.
        """
        task.number = self._num_tasks
        self._num_tasks += 1
        self.unsettled[task.number] = task
        if self._error is None and self._loss is not None:
            self._error = ParameterServerLostError(self._loss)
        if self._error is None and self._are_all_gone:
            self._error = self._workers_gone()
        if self._error is not None:
            self._cancel([task])
            return
        self._put(task)
        self._next()

    def finished(self, number: int, result: Any) -> None:
        """Handles the result of an assignment; an unknown number is ignored."""
        assignment, task = self._release(number)
        is_complete = False
        if assignment is not None and task is not None:
            del task.running[assignment.part]
            task.results[assignment.part] = result
            is_complete = len(task.results) == len(task.arguments)
        if task is None or not is_complete:
            self._next()
            return
        results = self._complete(task)
        try:
            self._next()
        finally:  # last: the main program, which it wakes, would delay what starts
            if results is not None:
                _deliver(task, results)

    def failed(self, number: int, error: BaseException) -> None:
        """Handles the error that the user's function raised in an assignment."""
        _, task = self._release(number)
        if task is not None:
            self._fail(task, error)
        self._next()

    def lost_server_in(self, number: int, server: int | None = None) -> bool:
        """Handles the answer of a worker that a server has no values, or other ones.

        Args:
            number: The number of the assignment, which is repeated.
            server: Index of the server, for the message.

        Returns:
            Whether the servers return to the snapshot because of it.
        """
        assignment, task = self._release(number)
        if assignment is None:
            return False
        if task is not None:
            self._put_back(task, assignment.part)
        is_new = self.server_lost(assignment.incarnation, server)
        self._next()
        return is_new

    def server_lost(self, incarnation: int, server: int | None = None) -> bool:
        """Handles the loss of the values of a server.

        Args:
            incarnation: The incarnation of the call that failed. The loss of values that were
                replaced since is ignored.
            server: Index of the server, for the message.

        Returns:
            Whether the servers return to the snapshot because of it.
        """
        if incarnation != self.incarnation or self._loss is not None:
            return False
        self._num_server_losses += 1
        name = "A parameter server" if server is None else f"Parameter server {server}"
        progress = f"step {self._version}" if self._is_sync else f"{self._num_tasks} tasks"
        if not self._snapshot_every:
            self._lose(
                f"{name} was lost after {progress}, and there is no snapshot of its values. Restore"
                " a checkpoint, or pass `snapshot_every=100` to recover from snapshots."
            )
            return False
        if self._num_server_losses > self._max_losses:
            self._lose(
                f"{name} was lost after {progress}: {self._num_server_losses} losses without a new"
                " result. Check the memory of the parameter servers, then restore a checkpoint."
            )
            return False
        self._stop()
        for task in self._roll_back():
            self._put(task)
        self._restore(self._kept_version)
        return True

    def restored(self, incarnation: int) -> None:
        """Handles that all servers have loaded the kept snapshot."""
        if incarnation == self.incarnation and self.is_restoring:
            self.is_restoring = False
            self._next()

    def worker_ready(self, worker: int) -> None:
        """Handles that a worker is set up and can run assignments."""
        self._gone.discard(worker)
        if not self._has_work(worker):
            self._idle.setdefault(worker)
        self._next()

    def worker_lost(self, worker: int) -> None:
        """Handles that the process of a worker has ended, or cannot be reached."""
        if worker not in self._gone:
            self._drop(worker)
            self._actions.revive(worker)
            self._next()

    def worker_gone(self, worker: int) -> None:
        """Handles that a worker is lost and will not be restarted."""
        if worker in self._gone:
            return
        self._gone.add(worker)
        self._drop(worker)
        if not self._are_all_gone:
            self._next()
            return
        self._stop()
        if self.unsettled or self._must_repeat:
            self._keep(self._workers_gone())

    def request_snapshot(self) -> None:
        """Takes a snapshot as soon as no step is in flight; none starts before."""
        self._is_due = self._loss is None
        self._next()

    def snapshot_taken(self, number: int, snapshot: Any) -> None:
        """Keeps a snapshot of all servers, unless servers were lost since it was begun."""
        if self._snapshot is None or self._snapshot[0] != number:
            return
        _, num_covered, self._kept_version = self._snapshot
        self._snapshot, self.kept = None, snapshot
        self._num_server_losses = 0
        for _ in range(num_covered):
            self._finished.popleft()
        self._next()

    def load(self, step: int, snapshot: Any) -> None:
        """Starts again from other values, which are at this version of synchronous steps.

        Raises:
            RuntimeError: If tasks have not ended.
        """
        if self.unsettled:
            raise RuntimeError(
                f"{len(self.unsettled)} scheduled functions have not ended. Call `join()` before"
                " loading other values."
            )
        self._forget_finished()
        self.kept, self._kept_version = snapshot, step
        self._loss, self._num_server_losses = None, 0
        self._restore(step)

    def take_error(self) -> BaseException | None:
        """Returns the first error, when nothing runs any more; None before that."""
        is_stuck = self._are_all_gone and self._must_repeat
        if self._running or self.is_restoring or (self._must_repeat and not is_stuck):
            return None
        error = self._error
        if not is_stuck:
            self._error = None
        return error

    def _next(self) -> None:
        """Takes a snapshot that is due, and starts what idle workers can run."""
        if self.is_restoring or self._loss is not None:
            return
        if self._is_due and self._snapshot is None and not self._in_flight:
            self._is_due = False
            self._snapshot = (self._num_snapshots, len(self._finished), self._version)
            self._num_snapshots += 1
            self._actions.collect(self._snapshot[0])
        for worker in [*self._idle]:
            tasks = [*(task for _, task in self._functions[:1]), *self._next_step()]
            if not tasks:
                break
            self._start(min(tasks, key=lambda task: task.number), worker)
        if self._staleness is None:
            self._start_ahead()

    def _next_step(self, *, may_start: bool = True) -> list[Task]:
        """Returns the first step with a part that waits, if any.

        Args:
            may_start: Whether a step that has not started may start.
        """
        for task in self._in_flight.values():
            if task.pending:
                return [task]
        if not may_start or self._awaits_snapshot:
            return []
        # The gradient of a step is late by the updates between its pull and its push. They are of
        # steps that are in flight when it starts, or that start until it finishes.
        # (So of at most k: the first of them has been overtaken by all others.)
        is_within_bound = self._staleness is None or all(
            task.overtaken < self._staleness for task in self._in_flight.values()
        )
        return [task for _, task in self._steps[:1] if is_within_bound]

    def _start_ahead(self) -> None:
        """Lets steps wait at workers that have a step, unless a function waits for a worker."""
        if self._functions:
            return
        counts = collections.Counter(each.worker for each, _ in self._running.values())
        for assignment, task in [*self._running.values()]:
            if counts[assignment.worker] > 1 or not task.is_step or self._is_late(assignment, task):
                continue
            # At the end, the last steps go to the workers that are idle first.
            for step in self._next_step(may_start=len(self._steps) > self._num_workers):
                self._start(step, assignment.worker)

    def _start(self, task: Task, worker: int) -> None:
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
        part = worker if worker in task.pending else task.pending[0]
        step = self._version if task.is_step and self._is_sync else None
        assignment = Assignment(
            *(self._num_assignments, task.number, part, len(task.arguments), worker),
            *(self.incarnation, self._commit, step),
        )
        self._num_assignments += 1
        task.pending.remove(part)
        task.running[part] = assignment.number
        self._idle.pop(worker, None)
        self._running[assignment.number] = assignment, task
        self._actions.run(assignment, task)

    def _release(self, number: int) -> tuple[Assignment | None, Task | None]:
        """Ends an assignment; the task is None if the assignment is late."""
        if number not in self._running:
            return None, None
        assignment, task = self._running.pop(number)
        if not self._has_work(assignment.worker):
            self._idle[assignment.worker] = None
        return assignment, None if self._is_late(assignment, task) else task

    def _is_late(self, assignment: Assignment, task: Task) -> bool:
        return task.running.get(assignment.part) != assignment.number

    def _has_work(self, worker: int) -> bool:
        return any(each.worker == worker for each, _ in self._running.values())

    def _drop(self, worker: int) -> None:
        """Takes its assignments from a worker that is lost."""
        lost = [each for each in self._running.values() if each[0].worker == worker]
        for assignment, task in lost:
            del self._running[assignment.number]
            if self._is_late(assignment, task):
                continue
            task.losses[assignment.part] += 1
            num_losses = task.losses[assignment.part]
            if num_losses > self._max_losses:
                text = (
                    f"{num_losses} workers were lost while they ran scheduled function "
                    f"{task.number}. Check what it does to its process: for example, how much "
                    "memory it takes."
                )
                self._fail(task, RuntimeError(text))
            else:
                self._put_back(task, assignment.part)
        self._idle.pop(worker, None)

    def _put(self, task: Task) -> None:
        heapq.heappush(self._steps if task.is_step else self._functions, (task.number, task))

    def _put_back(self, task: Task, part: int) -> None:
        """Lets a part that has started run again. After an error, only a step."""
        task.put_back(part)
        if not task.is_step:
            self._put(task)
            if self._error is not None:
                self._withdraw()

    def _complete(self, task: Task) -> list[Any] | None:
        """Commits a task that has finished, and remembers it if it is a step.

        Returns:
            The results of its parts; None if they were delivered before it was repeated.
        """
        if task.is_step:
            del self._in_flight[task.number]
            if self._is_sync:
                self._commit = Committed(self._version, task.number, len(task.arguments))
                self._version += 1
                self._actions.commit(self.incarnation, self._commit)
        results = [task.results[part] for part in sorted(task.results)]
        task.results = {}
        is_new = self.unsettled.pop(task.number, None) is not None
        if is_new:
            self._num_server_losses = 0
        if self._snapshot_every and task.is_step:
            self._finished.append(task)
            self._is_due |= len(self._finished) >= self._snapshot_every
        return results if is_new else None

    def _fail(self, task: Task, error: BaseException) -> None:
        """Ends a task with its error; a synchronous step is not committed."""
        if task.is_step:
            del self._in_flight[task.number]
        task.running = {}
        self._settle(task, error)
        self._keep(error)

    def _keep(self, error: BaseException) -> None:
        """Keeps the first error, and cancels what has not started."""
        if self._error is None:
            self._error = error
        self._withdraw()

    def _withdraw(self) -> None:
        waiting, self._functions = sorted([*self._steps, *self._functions]), []
        self._steps = [each for each in waiting if each[0] not in self.unsettled]
        self._cancel(task for number, task in waiting if number in self.unsettled)

    def _cancel(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            text = (
                "An earlier scheduled function failed before this one ran. Handle its error, then "
                "schedule this function again."
            )
            self._settle(task, CancelledError(text))

    def _settle(self, task: Task, error: BaseException) -> None:
        """Resolves the value of a task with an error, unless it is a repetition."""
        if self.unsettled.pop(task.number, None) is not None:
            task.value._resolve(error=error)

    def _lose(self, message: str) -> None:
        """Ends training: the servers have no values, and only `load` can give them some."""
        self._loss, self.is_restoring = message, False
        self._stop()
        self._keep(ParameterServerLostError(message))
        self._forget_finished()

    def _restore(self, version: int) -> None:
        self.incarnation += 1
        self._version, self._commit = version, None
        self.is_restoring = True
        self._actions.restore(self.incarnation, self.kept)

    def _stop(self) -> None:
        """Makes the steps that are in flight wait again, as if they had not started."""
        for task in self._in_flight.values():
            task.reset()
            self._put(task)
        self._in_flight.clear()

    def _roll_back(self) -> list[Task]:
        """Voids a snapshot that was begun; returns the finished steps to repeat."""
        self._is_due |= self._snapshot is not None
        self._snapshot = None
        tasks = [*self._finished]
        for task in tasks:
            task.reset()
        self._finished.clear()
        return tasks

    def _forget_finished(self) -> None:
        """Drops what has finished, and what would be repeated."""
        self._stop()
        self._roll_back()
        self._is_due = False
        self._steps.clear()

    @property
    def _are_all_gone(self) -> bool:
        return len(self._gone) == self._num_workers

    def _workers_gone(self) -> RuntimeError:
        return RuntimeError(
            f"All {self._num_workers} workers are lost and will not be restarted, so scheduled"
            " functions cannot run. Check the log of Ray, and the number of machines."
        )


def _deliver(task: Task, results: Sequence[Any]) -> None:
    try:
        value = task.join(results)
    except Exception as error:
        task.value._resolve(error=error)
    else:
        task.value._resolve(value)
