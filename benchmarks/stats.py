"""The arithmetic: medians, spreads, and ratios that a noisy machine cannot fool easily."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["holds", "holds?", "broken?", "BROKEN"]


@dataclass(frozen=True)
class Estimate:
    """A median, and the interval that holds the true one with about 95%."""

    median: float
    low: float
    high: float

    def at_most(self, limit: float) -> Verdict:
        """Whether a limit holds; with a question mark where the interval has it inside."""
        sure = not self.low <= limit < self.high
        if self.median <= limit:
            return "holds" if sure else "holds?"
        return "BROKEN" if sure else "broken?"


def estimate(values: Sequence[float]) -> Estimate:
    """The median, with the interval between two order statistics (a sign test's)."""
    ordered, n = sorted(values), len(values)
    below = max(math.floor(n / 2 - 0.98 * math.sqrt(n)), 0)
    return Estimate(statistics.median(ordered), ordered[below], ordered[n - 1 - below])


def spread(values: Sequence[float]) -> float:
    """The interquartile range as a part of the median."""
    if len(values) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / middle


def best_of(times: Mapping[str, Sequence[float]], names: Iterable[str]) -> str:
    """Which of these contenders has the smallest median."""
    return min((n for n in names if n in times), key=lambda n: statistics.median(times[n]))


def ratio(times: Mapping[str, Sequence[float]], name: str, base: str) -> Estimate:
    """One contender's time over another's, compared within each round.

    `{"a": [2., 9., 4.], "b": [1., 3., 4.]}` has the ratios 2, 3 and 1, so the median 2.
    """
    return estimate([a / b for a, b in zip(times[name], times[base], strict=True)])


def difference(times: Mapping[str, Sequence[float]], name: str, base: str) -> Estimate:
    """One contender's time less another's, compared within each round."""
    return estimate([a - b for a, b in zip(times[name], times[base], strict=True)])
