"""The scheduler, whose methods return what it lets happen, as a list."""

from typing import Any, NamedTuple

from mirror._src.ps.handles import CancelledError
from mirror._src.ps.messages import Assignment, Committed
from mirror._src.ps.schedule import Scheduler, Task


class Start(NamedTuple):
    assignment: Assignment


class Commit(NamedTuple):
    incarnation: int
    step: int
    task: int
    num_parts: int


class Deliver(NamedTuple):
    task: int
    results: tuple[Any, ...]


class Fail(NamedTuple):
    task: int
    error: BaseException


class Cancel(NamedTuple):
    task: int


class Revive(NamedTuple):
    worker: int


class TakeSnapshot(NamedTuple):
    number: int


class Restore(NamedTuple):
    incarnation: int


class Recorder:
    """The actions of a scheduler."""

    def __init__(self) -> None:
        self.actions: list[Any] = []

    def run(self, assignment: Assignment, task: Task) -> None:
        assert task.number == assignment.task
        self.actions.append(Start(assignment))

    def commit(self, incarnation: int, commit: Committed) -> None:
        self.actions.append(Commit(incarnation, *commit))

    def revive(self, worker: int) -> None:
        self.actions.append(Revive(worker))

    def collect(self, number: int) -> None:
        self.actions.append(TakeSnapshot(number))

    def restore(self, incarnation: int, kept: Any) -> None:
        self.actions.append(Restore(incarnation))


class Value:
    """The value of a task."""

    def __init__(self, recorder: Recorder) -> None:
        self._actions, self.task = recorder.actions, Task("", [], tuple, False)

    def _resolve(self, value: Any = None, error: BaseException | None = None) -> None:
        number = self.task.number
        action: Any = Deliver(number, value) if error is None else Fail(number, error)
        self._actions.append(Cancel(number) if isinstance(error, CancelledError) else action)


class Recorded:
    """A scheduler whose methods return the actions; `submit` returns the task's number too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._recorder = Recorder()
        self.scheduler = Scheduler(self._recorder, *args, **options)

    def submit(self, num_parts: int = 1, *, is_step: bool) -> tuple[int, list[Any]]:
        value: Any = Value(self._recorder)
        value.task = Task("", [()] * num_parts, tuple, is_step, value)
        self.scheduler.submit(value.task)
        return value.task.number, self._taken()

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.scheduler, name)
        if not callable(member) or name.startswith("_") or name in ("take_error", "is_running"):
            return member

        def method(*args: Any) -> list[Any]:
            member(*args)
            return self._taken()

        return method

    def _taken(self) -> list[Any]:
        # The results of a task are delivered last, which no test of the order depends on.
        starts = (Start, TakeSnapshot)
        actions = sorted(self._recorder.actions, key=lambda action: isinstance(action, starts))
        self._recorder.actions.clear()
        return actions
