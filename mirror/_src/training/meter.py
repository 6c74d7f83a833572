"""Metrics on the host: sums that come in from the devices, which are never made to wait for it."""

import math
from collections import deque
from typing import Any, NamedTuple, final

import numpy as np

from mirror._src.training.objective import LOSS, Sums

MOST_RUNNING = 8
"""How many launches may run while the host looks at older ones."""


class CollectedMetrics(NamedTuple):
    """What has come in of a launch.

    Attributes:
        step: its last step.
        means: of its own examples.
        empty: the names of the means that are NaN because their weights add up to 0.
    """

    step: int
    means: dict[str, float]
    empty: frozenset[str] = frozenset()


@final
class Meter:
    """Adds up what launches return, in order; whole numbers exactly, the rest in float64.

    Attributes:
        totals: the sums of what has been collected.
        count: the number of examples in it.
        weights: what the totals of `Weighted` losses and metrics are divided by, in place of that.
    """

    def __init__(
        self,
        totals: dict[str, float] | None = None,
        count: int = 0,
        weights: dict[str, float] | None = None,
    ) -> None:
        self.totals: dict[str, float] = dict(totals or {})
        self.count = count
        self.weights: dict[str, float] = dict(weights or {})
        self._pending: deque[tuple[int, Sums]] = deque()

    def add(self, step: int, sums: Sums) -> None:
        """Takes the sums of the launch that ended with that step; they need not be computed yet."""
        self._pending.append((step, sums))

    def collect(self, *, running: int = 0) -> list[CollectedMetrics]:
        """Adds up what is there, but for the last few launches, which may be running still.

        Args:
            running: how many of the last ones to leave.

        Returns:
            Of each launch its last step and the means of its own examples.
        """
        collected = []
        while len(self._pending) > running:
            step, sums = self._pending.popleft()
            totals, weights = _numbers(sums.totals), _numbers(sums.weights)
            count = int(np.asarray(sums.count))
            _add(self.totals, totals)
            _add(self.weights, weights)
            self.count += count
            empty = frozenset(name for name in weights if not totals[name] and not weights[name])
            collected.append(CollectedMetrics(step, means(totals, count, weights), empty))
        return collected

    @property
    def means(self) -> dict[str, float]:
        """The means over all examples so far."""
        return means(self.totals, self.count, self.weights)

    def to_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint holds; a checkpoint of an earlier version has no weights."""
        return {"totals": self.totals, "count": self.count, "weights": self.weights}


def means(
    totals: dict[str, float], count: int, weights: dict[str, float] | None = None
) -> dict[str, float]:
    """Divides sums by their weights, or by the number of examples; NaN of nothing."""
    over = dict.fromkeys(totals, count) | (weights or {})
    names = sorted(totals, key=lambda name: name != LOSS)  # JAX has sorted them: the loss first
    return {name: totals[name] / over[name] if over[name] else math.nan for name in names}


def _numbers(sums: dict[str, Any]) -> dict[str, float]:
    return {name: np.asarray(x).item() for name, x in sums.items()}


def _add(sums: dict[str, float], more: dict[str, float]) -> None:
    for name, number in more.items():
        sums[name] = sums.get(name, 0) + number
