"""Metrics on the host: sums that come in from the devices, which are never made to wait for it."""

import math
from collections import deque
from typing import Any, final

import numpy as np

from mirror.training.objective import LOSS, Sums

MOST_RUNNING = 8
"""How many launches may run while the host looks at older ones."""


@final
class Meter:
    """Adds up what launches return, in order; whole numbers exactly, the rest in float64.

    Attributes:
        totals: the sums of what has been collected.
        count: the number of examples in it.
    """

    def __init__(self, totals: dict[str, float] | None = None, count: int = 0) -> None:
        self.totals: dict[str, float] = dict(totals or {})
        self.count = count
        self._pending: deque[tuple[int, Sums]] = deque()

    def add(self, step: int, sums: Sums) -> None:
        """Takes the sums of the launch that ended with that step; they need not be computed yet."""
        self._pending.append((step, sums))

    def collect(self, *, running: int = 0) -> list[tuple[int, dict[str, float]]]:
        """Adds up what is there, but for the last few launches, which may be running still.

        Args:
            running: how many of the last ones to leave.

        Returns:
            Of each launch its last step and the means of its own examples.
        """
        collected = []
        while len(self._pending) > running:
            step, sums = self._pending.popleft()
            totals = {name: np.asarray(x).item() for name, x in sums.totals.items()}
            count = int(np.asarray(sums.count))
            for name, total in totals.items():
                self.totals[name] = self.totals.get(name, 0) + total
            self.count += count
            collected.append((step, means(totals, count)))
        return collected

    @property
    def means(self) -> dict[str, float]:
        """The means over all examples so far."""
        return means(self.totals, self.count)

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"totals": self.totals, "count": self.count}


def means(totals: dict[str, float], count: int) -> dict[str, float]:
    """Sums over their number; NaN of nothing."""
    names = sorted(totals, key=lambda name: name != LOSS)  # JAX has sorted them: the loss first
    return {name: totals[name] / count if count else math.nan for name in names}
