"""The arithmetic: medians, spreads, and ratios that a noisy machine cannot fool easily.

Times come as one list, of a number per round; or, from several starts of own processes, as one
list per start. Both compare number by number.
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
    """Returns the median, with the interval between two order statistics (a sign test's)."""
    ordered, n = sorted(values), len(values)
    below = max(math.floor(n / 2 - 0.98 * math.sqrt(n)), 0)
    return Estimate(statistics.median(ordered), ordered[below], ordered[n - 1 - below])


def flat(values: Sequence[float] | Sequence[Sequence[float]]) -> list[float]:
    """Returns the numbers of all starts."""
    return list(
        itertools.chain.from_iterable(v if isinstance(v, Sequence) else [v] for v in values)
    )


def median(values: Sequence[float] | Sequence[Sequence[float]]) -> float:
    """Returns the median over all rounds and starts."""
    return statistics.median(flat(values))


def spread(values: Sequence[float] | Sequence[Sequence[float]]) -> float:
    """Returns the interquartile range as a part of the median."""
    numbers = flat(values)
    if len(numbers) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(numbers, n=4, method="inclusive")
    return (third - first) / middle


def widest(times: Times) -> float:
    """Returns the spread of the least steady contender."""
    return max(spread(values) for values in times.values() if flat(values))


def best_of(times: Times, names: Iterable[str]) -> str:
    """Returns which of these contenders has the smallest median."""
    return min((n for n in names if n in times and flat(times[n])), key=lambda n: median(times[n]))


def pairs(times: Times, name: str, base: str) -> list[tuple[float, float]]:
    """Returns the times of two contenders in the same rounds.

    A process that was lost has no more rounds, and one that was not started again has no rounds
    of that start; only rounds that both have count.
    """
    found: list[tuple[float, float]] = []
    for a, b in zip(times[name], times[base], strict=False):
        if isinstance(a, Sequence) and isinstance(b, Sequence):
            found += zip(a, b, strict=False)
        else:
            assert isinstance(a, float | int)
            assert isinstance(b, float | int)
            found.append((a, b))
    return found


def ratio(times: Times, name: str, base: str) -> Estimate:
    """Returns one contender's time over another's, compared within each round.

    `{"a": [2., 9., 4.], "b": [1., 3., 4.]}` has the ratios 2, 3 and 1, so the median 2.
    """
    return estimate([a / b for a, b in pairs(times, name, base)])


def difference(times: Times, name: str, base: str) -> Estimate:
    """Returns one contender's time less another's, compared within each round."""
    return estimate([a - b for a, b in pairs(times, name, base)])
