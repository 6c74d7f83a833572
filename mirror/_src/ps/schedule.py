"""The scheduler of the coordinator: events in, actions out.

It has no thread, no clock and no connection. The engine calls a method for each event, in any
order in which a network can deliver them, and carries out the returned actions in their order.

Words: A *task* is one call of `schedule`. A *step* is a task that trains; all others are
*functions*. An *assignment* is one part of a task on one worker. The *incarnation* counts how often
the servers went back to a snapshot.

Synchronous steps (`staleness=0`) run one after the other. All parts of step k pull version k. When
they have finished, the scheduler emits `Commit`. Only then do servers apply gradients, so a part
that is repeated computes the same values. Assignments carry the last commit, because a worker may
reach a server before `Commit` does.

Asynchronous steps have one part, and servers apply it at once. A step starts only if at most k
others are in flight, and none of them has been overtaken k times: by steps that were in flight when
it started, or that started since. Then no gradient is more than k updates late, at any speed.
Without a bound, a worker has the next step before it has answered the last one.

A lost worker: its part returns to the head of the queue. The worker may still be running, and what
it pushes counts as the push of its task; servers ignore the second one.

A lost server: all servers go back to the kept snapshot, in the next incarnation. Assignments of
earlier incarnations are refused by the servers, and their answers are late. Steps that finished
since the snapshot are repeated before all others. Their values were delivered already. A snapshot
is taken while no step is in flight; only after it are the tasks that it covers forgotten.

An error of a function: the first is kept, tasks that have not started are canceled, steps that have
started are finished, and `take_error` returns the error once nothing runs.
"""

from typing import Any, final

from mirror._src.ps import errors
from mirror._src.ps.tasks import (
    Action,
    Assignment,
    Commit,
    Committed,
    FunctionQueue,
    History,
    KeepSnapshot,
    Ledger,
    Restore,
    Revive,
    Start,
    StepQueue,
    TakeSnapshot,
    Task,
    Workers,
)


@final
class Scheduler:
    """Decides which worker runs which part of which task, and what happens after a loss.

    Workers are not ready at first. Servers are at version `first_step` of incarnation 0, and the
    kept snapshot is what they have loaded.

    Args:
        num_workers: Number of workers, at least 1.
        staleness: 0 for synchronous steps, k for asynchronous steps whose gradients are applied at
            most k updates late, None for asynchronous steps without a bound.
        snapshot_every: How many steps lie between two snapshots. 0: the loss of a server is an
            error.
        first_step: The version of the servers, of synchronous steps.
        max_losses: How many workers a part of a task may lose before the task fails, and how many
            times servers may be lost without a new result in between.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        staleness: int | None,
        snapshot_every: int = 0,
        first_step: int = 0,
        max_losses: int = 8,
    ) -> None:
        self._is_sync, self._max_losses = staleness == 0, max_losses
        self._is_free = staleness is None
        self.incarnation = 0
        self._version = first_step
        self._commit: Committed | None = None
        self._steps = StepQueue(staleness)
        self._functions = FunctionQueue()
        self._workers = Workers(num_workers)
        self._history = History(snapshot_every, first_step)
        self._ledger = Ledger()
        self.is_restoring = False  # whether the servers are loading a snapshot
        self._num_server_losses = 0
        self._loss: str | None = None  # why the servers have no values any more
        self._error: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """Whether all tasks have ended, nothing runs, and the servers have all updates."""
        return not (
            self._ledger.num_unsettled
            or self._workers.running
            or self._must_repeat
            or self.is_restoring
            or self._history.is_pending
        )

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
        return len(self._workers.running)

    @property
    def _must_repeat(self) -> bool:
        return bool(self._steps.in_flight or len(self._steps))

    def submit(self, num_parts: int = 1, *, is_step: bool) -> tuple[int, list[Action]]:
        """Adds a task.

        Args:
            num_parts: Into how many parts its batch is split: 1 except for synchronous steps.
            is_step: Whether it trains.

        Returns:
            The number of the task, and actions. It is canceled at once if an earlier error has not
            been taken yet, or if it cannot run.

        Raises:
            ValueError: If `num_parts` does not fit the kind of task.
        """
        task = self._ledger.add(num_parts, is_step=is_step, is_sync=self._is_sync)
        if self._error is None and self._loss is not None:
            self._error = errors.ParameterServerLostError(self._loss)
        if self._error is None and self._workers.are_all_gone:
            self._error = errors.workers_gone(self._workers.num_workers)
        if self._error is not None:
            return task.number, self._ledger.cancel([task])
        (self._steps if is_step else self._functions).put(task)
        return task.number, self._next()

    def finished(self, number: int, result: Any) -> list[Action]:
        """Takes the result of an assignment.

        Args:
            number: The number of the assignment. An unknown one is ignored.
            result: What the task is delivered with.
        """
        assignment, task = self._release(number)
        if assignment is None or task is None:
            return self._next()
        del task.running[assignment.part]
        task.results[assignment.part] = result
        if len(task.results) < task.num_parts:
            return self._next()
        return [*self._complete(task), *self._next()]

    def failed(self, number: int, error: BaseException) -> list[Action]:
        """Takes the error that the user's function raised in an assignment."""
        assignment, task = self._release(number)
        if assignment is None:
            return []
        failures = [] if task is None else self._fail(task, error)
        return [*failures, *self._next()]

    def lost_server_in(self, number: int, server: int | None = None) -> list[Action]:
        """Takes the answer of a worker that a server has no values, or others than it expects.

        Args:
            number: The number of the assignment, which is repeated.
            server: Index of the server, for the message.
        """
        assignment, task = self._release(number)
        if assignment is None:
            return []
        actions = [] if task is None else self._put_back(task, assignment.part)
        return [*actions, *self.server_lost(assignment.incarnation, server), *self._next()]

    def server_lost(self, incarnation: int, server: int | None = None) -> list[Action]:
        """Takes the news that a server has lost its values.

        Args:
            incarnation: The incarnation of the call that failed. The loss of values that were
                replaced since is ignored.
            server: Index of the server, for the message.
        """
        if incarnation != self.incarnation or self._loss is not None:
            return []
        self._num_server_losses += 1
        progress = f"step {self._version}" if self._is_sync else f"{self._ledger.num_tasks} tasks"
        if not self._history.snapshot_every:
            return self._lose(errors.no_snapshot(server, progress))
        if self._num_server_losses > self._max_losses:
            return self._lose(errors.lost_again(server, progress, self._num_server_losses))
        self.incarnation += 1
        self._version, self._commit = self._history.version, None
        self.is_restoring = True
        self._steps.stop()
        for task in self._history.roll_back():
            self._steps.put(task)
        return [Restore(self.incarnation)]

    def restored(self, incarnation: int) -> list[Action]:
        """Takes the news that all servers have loaded the kept snapshot."""
        if incarnation != self.incarnation or not self.is_restoring:
            return []
        self.is_restoring = False
        return self._next()

    def worker_ready(self, worker: int) -> list[Action]:
        """Takes the news that a worker is set up and can run assignments."""
        self._workers.add(worker)
        return self._next()

    def worker_lost(self, worker: int) -> list[Action]:
        """Takes the news that the process of a worker has ended, or cannot be reached."""
        if self._workers.is_gone(worker):
            return []
        return [*self._drop(worker, is_gone=False), Revive(worker), *self._next()]

    def worker_gone(self, worker: int) -> list[Action]:
        """Takes the news that a worker is lost and that it will not be restarted."""
        if self._workers.is_gone(worker):
            return []
        actions = self._drop(worker, is_gone=True)
        if not self._workers.are_all_gone:
            return [*actions, *self._next()]
        self._steps.stop()
        if self._ledger.num_unsettled or self._must_repeat:
            actions += self._keep(errors.workers_gone(self._workers.num_workers))
        return actions

    def request_snapshot(self) -> list[Action]:
        """Takes a snapshot as soon as no step is in flight; none starts before."""
        self._history.is_due = self._loss is None
        return self._next()

    def snapshot_taken(self, number: int) -> list[Action]:
        """Takes the news that the state of all servers is collected."""
        if self._history.snapshot != TakeSnapshot(number):
            return []  # void: servers were lost since
        self._num_server_losses = 0
        forgotten = self._ledger.forget(self._history.keep())
        return [KeepSnapshot(number), *forgotten, *self._next()]

    def load(self, step: int) -> list[Action]:
        """Starts again from other values, which the engine has made the kept snapshot.

        Args:
            step: The version of these values, of synchronous steps.

        Raises:
            RuntimeError: If tasks have not ended.
        """
        if self._ledger.num_unsettled:
            raise RuntimeError(
                f"{self._ledger.num_unsettled} scheduled functions have not ended. Call `join()`"
                " before loading other values."
            )
        actions = self._forget_finished()
        self.incarnation += 1
        self._version = self._history.version = step
        self._commit = self._loss = None
        self._num_server_losses, self.is_restoring = 0, True
        return [*actions, Restore(self.incarnation)]

    def take_error(self) -> BaseException | None:
        """Returns the first error, when nothing runs any more; None before that."""
        is_stuck = self._workers.are_all_gone and self._must_repeat
        is_running = self._workers.running or self.is_restoring
        if is_running or (self._must_repeat and not is_stuck):
            return None
        error = self._error
        if not is_stuck:
            self._error = None
        return error

    def _next(self) -> list[Action]:
        """Takes a snapshot that is due, and starts what idle workers can run."""
        if self.is_restoring or self._loss is not None:
            return []
        actions: list[Action] = []
        if self._history.is_due and not self._history.snapshot and not self._steps.in_flight:
            actions.append(self._history.take(self._version))
        for worker in self._workers.idle:
            step = self._steps.next_task(may_start=not self._history.is_pending)
            function = self._functions.next_task()
            tasks = [task for task in (step, function) if task is not None]
            if tasks:
                actions.append(self._start(min(tasks, key=lambda task: task.number), worker))
        return [*actions, *(self._start_ahead() if self._is_free else ())]

    def _start_ahead(self) -> list[Action]:
        """Lets steps wait at workers that have a step, unless a function waits for a worker."""
        actions: list[Action] = []
        if self._functions.next_task() is not None:
            return actions
        for assignment in self._workers.with_room:
            current = self._ledger.find(assignment)
            if current is None or not current.is_step:
                continue
            # At the end, the last steps go to the workers that are idle first.
            many_follow = len(self._steps) > self._workers.num_workers
            may_start = many_follow and not self._history.is_pending
            step = self._steps.next_task(may_start=may_start)
            if step is not None:
                actions.append(self._start(step, assignment.worker))
        return actions

    def _start(self, task: Task, worker: int) -> Start:
        (self._steps if task.is_step else self._functions).start(task)
        # A worker keeps its part from step to step: parts may differ in size, and each size is
        # compiled where it runs first.
        part = worker if worker in task.pending else task.pending[0]
        step = self._version if task.is_step and self._is_sync else None
        assignment = Assignment(
            *(self._workers.num_assignments, task.number, part, task.num_parts, worker),
            *(self.incarnation, self._commit, step),
        )
        task.take(part, assignment.number)
        self._workers.start(assignment)
        return Start(assignment)

    def _release(self, number: int) -> tuple[Assignment | None, Task | None]:
        """Ends an assignment; the task is None if the assignment is late."""
        assignment = self._workers.finish(number)
        return assignment, self._ledger.find(assignment)

    def _drop(self, worker: int, *, is_gone: bool) -> list[Action]:
        """Takes its assignments from a worker that is lost."""
        actions: list[Action] = []
        for assignment in self._workers.remove(worker, is_gone=is_gone):
            task = self._ledger.find(assignment)
            if task is None:
                continue
            task.losses[assignment.part] += 1
            num_losses = task.losses[assignment.part]
            if num_losses > self._max_losses:
                actions += self._fail(task, errors.worker_lost_again(task.number, num_losses))
            else:
                actions += self._put_back(task, assignment.part)
        return actions

    def _put_back(self, task: Task, part: int) -> list[Action]:
        """Lets a part that has started run again. After an error, only a step."""
        task.put_back(part)
        if task.is_step:
            return []
        self._functions.put(task)
        return self._withdraw() if self._error is not None else []

    def _complete(self, task: Task) -> list[Action]:
        """Commits and delivers a task that has finished, and remembers it if it is a step."""
        commits = []
        if task.is_step:
            self._steps.finish(task)
            if self._is_sync:
                self._commit = Committed(self._version, task.number, task.num_parts)
                self._version += 1
                commits.append(Commit(self.incarnation, *self._commit))
        deliveries = self._ledger.deliver(task)
        if deliveries:
            self._num_server_losses = 0
        if self._history.snapshot_every and task.is_step:
            self._history.add(task)
            return [*commits, *deliveries]
        return [*commits, *deliveries, *self._ledger.forget([task])]

    def _fail(self, task: Task, error: BaseException) -> list[Action]:
        """Ends a task with its error; a synchronous step is not committed."""
        if task.is_step:
            self._steps.finish(task)
        return [*self._ledger.fail(task, error), *self._keep(error)]

    def _keep(self, error: BaseException) -> list[Action]:
        """Keeps the first error, and cancels what has not started."""
        if self._error is None:
            self._error = error
        return self._withdraw()

    def _withdraw(self) -> list[Action]:
        return self._ledger.cancel([*self._steps.withdraw(), *self._functions.withdraw()])

    def _lose(self, message: str) -> list[Action]:
        """Ends training: the servers have no values, and only `load` can give them some."""
        self._loss, self.is_restoring = message, False
        self._steps.stop()
        return [*self._keep(errors.ParameterServerLostError(message)), *self._forget_finished()]

    def _forget_finished(self) -> list[Action]:
        """Drops what has finished, and what would be repeated."""
        self._steps.stop()
        return self._ledger.forget([*self._history.clear(), *self._steps.clear()])
