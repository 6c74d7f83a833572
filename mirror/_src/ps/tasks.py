"""Tasks of the scheduler, the workers that have them, and the actions that it returns."""

import collections
import dataclasses
import heapq
from collections.abc import Iterable
from typing import Any, NamedTuple


class Committed(NamedTuple):
    """A finished synchronous step: what a server applies, once, at version `step`.

    Attributes:
        step: The version of all servers until this commit; afterwards it is `step + 1`.
        task: The number of the task whose gradients are applied. All other gradients are dropped.
        num_parts: The number of its parts.
    """

    step: int
    task: int
    num_parts: int


class Assignment(NamedTuple):
    """One part of a task on one worker.

    Attributes:
        number: Names this assignment in the events that answer it; never used twice.
        task: The number of the task.
        part: The index of the part.
        num_parts: The number of parts of the task.
        worker: The index of the worker.
        incarnation: How often the servers have gone back to a snapshot.
        commit: The last commit of this incarnation, for servers that have not received it yet.
            None for asynchronous steps.
        step: The version of the servers that a synchronous step needs, otherwise None.
    """

    number: int
    task: int
    part: int
    num_parts: int
    worker: int
    incarnation: int
    commit: Committed | None
    step: int | None


class Start(NamedTuple):
    """Runs an assignment on its worker."""

    assignment: Assignment


class Commit(NamedTuple):
    """Sends a commit to all servers. The order of commits matters; their answers do not."""

    incarnation: int
    step: int
    task: int
    num_parts: int


class Deliver(NamedTuple):
    """Resolves the value of a task with the results of its parts."""

    task: int
    results: tuple[Any, ...]


class Fail(NamedTuple):
    """Resolves the value of a task with the error that it raised."""

    task: int
    error: BaseException


class Cancel(NamedTuple):
    """Resolves the value of a task as canceled: another task failed before it was started."""

    task: int


class Revive(NamedTuple):
    """Sets a restarted worker up, and reports it with `worker_ready`."""

    worker: int


class TakeSnapshot(NamedTuple):
    """Collects the state of all servers, and reports it with `snapshot_taken(number)`."""

    number: int


class KeepSnapshot(NamedTuple):
    """Makes a taken snapshot the one that servers are restored from."""

    number: int


class Restore(NamedTuple):
    """Loads the kept snapshot on all servers, and reports it with `restored(incarnation)`."""

    incarnation: int


class Forget(NamedTuple):
    """Drops the batch and the function of a task: it never runs again."""

    task: int


Action = (
    Start
    | Commit
    | Deliver
    | Fail
    | Cancel
    | Revive
    | TakeSnapshot
    | KeepSnapshot
    | Restore
    | Forget
)


@dataclasses.dataclass(slots=True)
class Task:
    """A scheduled function, and how far it is.

    Attributes:
        number: The order of tasks.
        num_parts: Into how many parts its batch is split.
        is_step: Whether it trains.
        pending: The parts that wait for a worker, in increasing order.
        running: The assignment number of each part that runs.
        results: The result of each part that has finished.
        is_settled: Whether its value is resolved.
        losses: For each part, how many workers were lost with it.
    """

    number: int
    num_parts: int
    is_step: bool
    pending: list[int] = dataclasses.field(default_factory=list)
    running: dict[int, int] = dataclasses.field(default_factory=dict)
    results: dict[int, Any] = dataclasses.field(default_factory=dict)
    is_settled: bool = False
    losses: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Makes all parts wait for workers; replies to earlier assignments are late from now on."""
        self.pending = list(range(self.num_parts))
        self.running, self.results = {}, {}

    def take(self, part: int, assignment: int) -> None:
        """Moves a part from `pending` to `running`."""
        self.pending.remove(part)
        self.running[part] = assignment

    def put_back(self, part: int) -> None:
        """Moves a part from `running` to `pending`."""
        del self.running[part]
        self.pending = sorted([*self.pending, part])


class StepQueue:
    """Steps in the order of their numbers, and which of them may start.

    Args:
        staleness: 0: one step at a time. k: a gradient is applied at most k updates late. None: no
            bound.
    """

    def __init__(self, staleness: int | None) -> None:
        self._staleness = staleness
        self._waiting: list[tuple[int, Task]] = []  # a heap
        # Started, and not finished. In the order of their numbers, because they start in it.
        self.in_flight: dict[int, Task] = {}
        self._overtaken: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, task: Task) -> None:
        """Adds a task that has not started."""
        heapq.heappush(self._waiting, (task.number, task))

    def finish(self, task: Task) -> None:
        """Removes a task that is in flight."""
        del self.in_flight[task.number]
        del self._overtaken[task.number]

    def stop(self) -> None:
        """Makes the steps that are in flight wait again, as if they had not started."""
        for task in self.in_flight.values():
            task.reset()
            self.put(task)
        self.in_flight.clear()
        self._overtaken.clear()

    def withdraw(self) -> list[Task]:
        """Removes and returns the waiting steps whose values are not resolved yet, in order."""
        withdrawn = sorted(number for number, task in self._waiting if not task.is_settled)
        tasks = dict(self._waiting)
        self._waiting = [(number, task) for number, task in self._waiting if task.is_settled]
        heapq.heapify(self._waiting)
        return [tasks[number] for number in withdrawn]

    def clear(self) -> list[Task]:
        """Removes and returns all waiting steps."""
        tasks = [task for _, task in sorted(self._waiting, key=lambda item: item[0])]
        self._waiting.clear()
        return tasks

    def next_task(self, *, may_start: bool) -> Task | None:
        """Returns the first task with a part that waits, or None.

        Args:
            may_start: Whether a step that has not started may start.
        """
        for task in self.in_flight.values():
            if task.pending:
                return task
        return self._waiting[0][1] if may_start and self._may_start() else None

    def _may_start(self) -> bool:
        if not self._waiting:
            return False
        if self._staleness == 0:
            return not self.in_flight
        # The gradient of a step is late by the updates between its pull and its push. They are of
        # steps that are in flight when it starts, or that start until it finishes.
        # (So of at most k: the first of them has been overtaken by all others.)
        return self._staleness is None or all(
            count < self._staleness for count in self._overtaken.values()
        )

    def start(self, task: Task) -> None:
        """Puts the first waiting task in flight, if it is not in flight yet.

        A step whose worker is lost stays in flight until it is repeated: the lost worker may still
        push its gradient.
        """
        if task.number in self.in_flight:
            return
        heapq.heappop(self._waiting)
        for number in self._overtaken:
            self._overtaken[number] += 1
        self._overtaken[task.number] = len(self.in_flight)
        self.in_flight[task.number] = task


class FunctionQueue:
    """Functions that do not train, in the order of their numbers."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Task]] = []  # a heap

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, task: Task) -> None:
        """Adds a task that has not started, or whose worker was lost."""
        heapq.heappush(self._waiting, (task.number, task))

    def next_task(self) -> Task | None:
        """Returns the first task, or None."""
        return self._waiting[0][1] if self._waiting else None

    def start(self, task: Task) -> None:
        """Removes the first task."""
        assert task is self._waiting[0][1]
        heapq.heappop(self._waiting)

    def withdraw(self) -> list[Task]:
        """Removes and returns all tasks, in order."""
        tasks = [task for _, task in sorted(self._waiting, key=lambda item: item[0])]
        self._waiting.clear()
        return tasks


class Workers:
    """The workers of a scheduler. None of them is ready at first.

    A worker runs one assignment at a time. Another one may wait at the worker, so that it starts
    without a message from the scheduler in between.

    Args:
        num_workers: How many there are.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.num_assignments = 0
        self.running: dict[int, Assignment] = {}
        self._idle: dict[int, None] = {}  # the one that has been idle longest comes first
        self._busy: dict[int, list[int]] = {}  # the numbers of its assignments
        self._gone: set[int] = set()

    @property
    def idle(self) -> list[int]:
        """The workers without an assignment, the one that has been idle longest first."""
        return list(self._idle)

    @property
    def with_room(self) -> list[Assignment]:
        """The assignments of busy workers at which another one may wait."""
        alone = [numbers[0] for numbers in self._busy.values() if len(numbers) == 1]
        return [self.running[number] for number in alone]

    @property
    def are_all_gone(self) -> bool:
        """Whether no worker will ever be ready again."""
        return len(self._gone) == self.num_workers

    def is_gone(self, worker: int) -> bool:
        """Whether a worker will not be restarted."""
        return worker in self._gone

    def add(self, worker: int) -> None:
        """Makes a worker idle, if it is not busy."""
        self._gone.discard(worker)
        if worker not in self._busy:
            self._idle.setdefault(worker)

    def start(self, assignment: Assignment) -> None:
        """Gives a worker an assignment."""
        self.num_assignments += 1
        self._idle.pop(assignment.worker, None)
        self._busy.setdefault(assignment.worker, []).append(assignment.number)
        self.running[assignment.number] = assignment

    def finish(self, number: int) -> Assignment | None:
        """Takes an assignment from its worker. None: no worker has it."""
        assignment = self.running.pop(number, None)
        if assignment is not None:
            numbers = self._busy[assignment.worker]
            numbers.remove(number)
            if not numbers:
                del self._busy[assignment.worker]
                self._idle[assignment.worker] = None
        return assignment

    def remove(self, worker: int, *, is_gone: bool) -> list[Assignment]:
        """Removes a lost worker; returns the assignments that it had."""
        if is_gone:
            self._gone.add(worker)
        self._idle.pop(worker, None)
        return [self.running.pop(number) for number in self._busy.pop(worker, ())]


class Ledger:
    """All tasks of a scheduler until they are forgotten.

    Attributes:
        num_tasks: How many tasks there have been.
        num_unsettled: How many of them have neither a result nor an error, and are not canceled.
    """

    def __init__(self) -> None:
        self.num_tasks = self.num_unsettled = 0
        self._tasks: dict[int, Task] = {}

    def add(self, num_parts: int, *, is_step: bool, is_sync: bool) -> Task:
        """Returns a new task.

        Raises:
            ValueError: If a task of this kind cannot have this number of parts.
        """
        most = "at least 1" if is_step and is_sync else "1, except for synchronous steps"
        if num_parts < 1 or (num_parts > 1 and not (is_step and is_sync)):
            raise ValueError(f"`num_parts` must be {most}, got {num_parts}.")
        task = self._tasks[self.num_tasks] = Task(self.num_tasks, num_parts, is_step)
        self.num_tasks += 1
        self.num_unsettled += 1
        return task

    def find(self, assignment: Assignment | None) -> Task | None:
        """Returns the task of an assignment, or None if the assignment is late."""
        if assignment is None:
            return None
        task = self._tasks.get(assignment.task)
        is_late = task is None or task.running.get(assignment.part) != assignment.number
        return None if is_late else task

    def deliver(self, task: Task) -> list[Action]:
        """Resolves a task with the results of its parts, unless it is a repetition."""
        results, task.results, task.running = task.results, {}, {}
        if task.is_settled:
            return []
        self._settle(task)
        return [Deliver(task.number, tuple(results[part] for part in sorted(results)))]

    def fail(self, task: Task, error: BaseException) -> list[Action]:
        """Resolves a task with its error, unless it is a repetition, and forgets it."""
        failures: list[Action] = []
        if not task.is_settled:
            self._settle(task)
            failures.append(Fail(task.number, error))
        return [*failures, *self.forget([task])]

    def cancel(self, tasks: Iterable[Task]) -> list[Action]:
        """Resolves tasks as canceled, and forgets them."""
        actions: list[Action] = []
        for task in tasks:
            self._settle(task)
            actions += [Cancel(task.number), *self.forget([task])]
        return actions

    def forget(self, tasks: Iterable[Task]) -> list[Action]:
        """Removes tasks that never run again."""
        actions: list[Action] = []
        for task in tasks:
            del self._tasks[task.number]
            actions.append(Forget(task.number))
        return actions

    def _settle(self, task: Task) -> None:
        task.is_settled = True
        self.num_unsettled -= 1


class History:
    """The finished steps that no snapshot covers yet.

    Args:
        snapshot_every: After how many steps a snapshot is due. 0: nothing is remembered.
        version: The version of the servers' first values, which are the first snapshot.

    Attributes:
        version: The version of the kept snapshot.
        snapshot: The snapshot that is being taken, or None.
        is_due: Whether a snapshot must be taken before the next step starts.
    """

    def __init__(self, snapshot_every: int, version: int) -> None:
        self.snapshot_every, self.version = snapshot_every, version
        self.snapshot: TakeSnapshot | None = None
        self.is_due = False
        self._tasks: collections.deque[Task] = collections.deque()
        self._num_covered = self._next_number = 0
        self._taken_version = version

    @property
    def is_pending(self) -> bool:
        """Whether steps wait for a snapshot."""
        return self.is_due or self.snapshot is not None

    def add(self, task: Task) -> None:
        """Remembers a finished step."""
        self._tasks.append(task)
        self.is_due |= len(self._tasks) >= self.snapshot_every

    def take(self, version: int) -> TakeSnapshot:
        """Begins a snapshot, which covers what has finished so far."""
        self.is_due = False
        self.snapshot = TakeSnapshot(self._next_number)
        self._next_number += 1
        self._num_covered, self._taken_version = len(self._tasks), version
        return self.snapshot

    def keep(self) -> list[Task]:
        """Ends the snapshot that was begun; returns the tasks that never run again."""
        assert self.snapshot is not None
        self.snapshot, self.version = None, self._taken_version
        return [self._tasks.popleft() for _ in range(self._num_covered)]

    def roll_back(self) -> list[Task]:
        """Voids a snapshot that was begun; returns the tasks to repeat, in order."""
        self.is_due |= self.snapshot is not None
        self.snapshot = None
        tasks = list(self._tasks)
        for task in tasks:
            task.reset()
        self._tasks.clear()
        return tasks

    def clear(self) -> list[Task]:
        """Forgets everything, and that a snapshot is due; returns the tasks that it held."""
        tasks = self.roll_back()
        self.is_due = False
        return tasks
