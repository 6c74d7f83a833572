"""Actions: the scheduler returns them, and the engine carries them out."""

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
