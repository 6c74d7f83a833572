"""Times contenders, and orders their turns.

It does not use `mirror._src.inspection.measurement`, because processes of hand-written contenders
must not import `mirror`.
"""

import math
import time
from collections.abc import Sequence
from typing import TypeVar

from benchmarks.contender import Contender

_TRIALS = 3
_Item = TypeVar("_Item")


def seconds(contender: Contender, steps: int) -> float:
    """Returns the duration of some steps in seconds, until all results are computed."""
    start = time.perf_counter()
    contender.advance(steps)
    return time.perf_counter() - start


def steps_for(contenders: Sequence[Contender], secs: float, fewest: int, most: int) -> int:
    """Returns the number of steps that the fastest contender takes in `secs`, within bounds."""
    fastest = min(min(seconds(c, fewest) for _ in range(_TRIALS)) for c in contenders)
    return min(max(math.ceil(secs / (fastest / fewest)), fewest), most)


def in_order(contenders: Sequence[_Item], number: int) -> list[_Item]:
    """Returns the order of a round: the first contender rotates, every other round is reversed."""
    start = number // 2 % len(contenders)
    rotated = [*contenders[start:], *contenders[:start]]
    return rotated[::-1] if number % 2 else rotated
