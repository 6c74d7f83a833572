"""Tasks, and the two queues from which workers take them: of steps, and of other functions."""

import collections
import dataclasses
import heapq
from typing import Any


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
