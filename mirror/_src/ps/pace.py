"""`Pace`: which workers get fewer asynchronous steps, because the others would wait for them."""

import collections
from collections.abc import Collection

_SAMPLES = 3
"""Number of steps of which the shortest counts: one may have compiled, or waited for a core."""

_MIN_GAIN = 1.25
"""Smallest speed-up of the others for which a worker rests; less may be chance."""

_REST = 10
"""Durations of its own step for which a worker rests, until it is tried again."""


class Pace:
    """Measures the steps of each worker.

    With a bound of k, at most k other steps start and finish while a step runs. So k + 1 steps take
    as long as the step of the slowest worker, which can be less than what the others do alone.

    Args:
        staleness: The bound. Without one, and in synchronous training, all workers get steps.
    """

    def __init__(self, staleness: int | None) -> None:
        self._staleness = staleness or 0
        self._samples: dict[int, collections.deque[float]] = {}
        self._rested: dict[int, float] = {}  # seconds since its last step

    def add(self, worker: int, secs: float, ready: Collection[int]) -> None:
        """Takes note of a step that a worker has finished.

        Args:
            worker: Index of the worker.
            secs: How long the step took, in seconds.
            ready: The workers that are not lost.
        """
        if not self._staleness:
            return
        self._samples.setdefault(worker, collections.deque(maxlen=_SAMPLES)).append(secs)
        self._rested[worker] = 0.0
        slow = self._slow(ready)
        for other in slow - {worker}:
            self._rested[other] += secs / (len(ready) - len(slow))

    def forget(self, worker: int) -> None:
        """Forgets the steps of a worker whose process has ended."""
        self._samples.pop(worker, None)

    def secs(self, worker: int) -> float | None:
        """Returns how long a step of a worker takes, in seconds; None if it is not known yet."""
        samples = self._samples.get(worker, ())
        return max(min(samples), 1e-9) if len(samples) >= 2 else None

    def resting(self, ready: Collection[int]) -> set[int]:
        """Returns the workers that get no step now, unless nothing else runs.

        Args:
            ready: The workers that are not lost.
        """
        return {
            worker
            for worker in self._slow(ready)
            if self._rested[worker] < _REST * (self.secs(worker) or 0.0)
        }

    def _slow(self, ready: Collection[int]) -> set[int]:
        """Returns the workers without which the others make more steps per second."""
        if not self._samples:
            return set()
        secs = {worker: self.secs(worker) for worker in ready}
        known = [each for each in secs.values() if each is not None]
        if not known:
            return set()
        # A worker that is not known yet must be tried: it counts as one of the fastest.
        ordered = sorted((min(known) if s is None else s, worker) for worker, s in secs.items())
        rates = []
        for count, (slowest, _) in enumerate(ordered, 1):
            steps = sum(slowest / each for each, _ in ordered[:count])
            rates.append(min(self._staleness + 1, steps) / slowest)
        enough = max(rates) / _MIN_GAIN
        kept = max(count for count, rate in enumerate(rates, 1) if rate >= enough)
        return {worker for _, worker in ordered[kept:]}
