"""The tasks that may still run, and whether their values are resolved: each of them once."""

from collections.abc import Iterable

from mirror._src.ps.actions import Action, Assignment, Cancel, Deliver, Fail, Forget
from mirror._src.ps.tasks import Task


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
