"""Which workers are idle, which assignments each of the others has, and which are gone."""

from mirror._src.ps.actions import Assignment


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
