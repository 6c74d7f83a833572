"""Steps that finished since the last snapshot of the servers, and are repeated after a loss."""

import collections

from mirror._src.ps.actions import TakeSnapshot
from mirror._src.ps.tasks import Task


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
