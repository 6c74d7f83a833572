"""Measuring alternatives in turns, and quartiles.

`benchmarks/` has an equivalent of its own: its parent process and its hand-written contenders must
not import `mirror`.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def in_turns(measurements: Sequence[Callable[[], _T]], rounds: int) -> list[list[_T]]:
    """Takes every measurement once per round, and returns the results of each measurement.

    Measuring one alternative after the other would charge a busy moment of the machine to one of
    them. Every other round runs backwards, so that the measurements change neighbors.

    >>> in_turns([lambda: "a", lambda: "b"], rounds=3)
    [['a', 'a', 'a'], ['b', 'b', 'b']]
    """
    results: list[list[_T]] = [[] for _ in measurements]
    for number in range(rounds):
        turns = list(zip(measurements, results, strict=True))
        for measure, values in reversed(turns) if number % 2 else turns:
            values.append(measure())
    return results


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Returns the first and third quartile.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 4.0)
    """
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third
