"""Medians, spreads and ratios that are robust against noise.

Times are a list with a number per round or, for several starts of own processes, a list of such
lists. Two contenders are compared round by round.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict = Literal["holds", "holds?", "broken?", "BROKEN"]
Times: TypeAlias = Mapping[str, Sequence[float] | Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Estimate:
    """A median with a confidence interval of about 95%."""

    median: float
    low: float
    high: float

    def at_most(self, limit: float) -> Verdict:
        """Returns whether a limit holds; with a question mark if it is inside the interval."""
        is_certain = not self.low <= limit < self.high
        if self.median <= limit:
            return "holds" if is_certain else "holds?"
        return "BROKEN" if is_certain else "broken?"


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the median with the interval of a sign test, between two order statistics."""
    ordered, n = sorted(values), len(values)
    below = max(math.floor(n / 2 - 0.98 * math.sqrt(n)), 0)
    return Estimate(statistics.median(ordered), ordered[below], ordered[n - 1 - below])


def flat(values: Sequence[float] | Sequence[Sequence[float]]) -> list[float]:
    """Returns the times of all starts as one list."""
    return list(
        itertools.chain.from_iterable(v if isinstance(v, Sequence) else [v] for v in values)
    )


def median(values: Sequence[float] | Sequence[Sequence[float]]) -> float:
    """Returns the median over all rounds and starts."""
    return statistics.median(flat(values))


def spread(values: Sequence[float] | Sequence[Sequence[float]]) -> float:
    """Returns the interquartile range as a fraction of the median."""
    numbers = flat(values)
    if len(numbers) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(numbers, n=4, method="inclusive")
    return (third - first) / middle


def widest(times: Times) -> float:
    """Returns the largest spread of all contenders."""
    return max(spread(values) for values in times.values() if flat(values))


def best_of(times: Times, names: Iterable[str]) -> str:
    """Returns the contender with the smallest median."""
    return min((n for n in names if n in times and flat(times[n])), key=lambda n: median(times[n]))


def pairs(times: Times, name: str, base: str) -> list[tuple[float, float]]:
    """Returns the times of two contenders in the rounds that both took part in.

    A process that failed takes part in no further rounds, and a process that was not started again
    in no round of that start.
    """
    rounds: list[tuple[float, float]] = []
    for a, b in zip(times[name], times[base], strict=False):
        if isinstance(a, Sequence) and isinstance(b, Sequence):
            rounds += zip(a, b, strict=False)
        else:
            assert isinstance(a, float | int)
            assert isinstance(b, float | int)
            rounds.append((a, b))
    return rounds


def ratio(times: Times, name: str, base: str) -> Estimate:
    """Returns the ratio of two contenders' times, computed in every round.

    `{"a": [2., 9., 4.], "b": [1., 3., 4.]}` has the ratios 2, 3 and 1, whose median is 2.
    """
    return estimate([a / b for a, b in pairs(times, name, base)])


def difference(times: Times, name: str, base: str) -> Estimate:
    """Returns the difference of two contenders' times, computed in every round."""
    return estimate([a - b for a, b in pairs(times, name, base)])
