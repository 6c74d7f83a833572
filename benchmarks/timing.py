"""The clock, and the order of turns."""

import math
import time
from collections.abc import Sequence
from typing import TypeVar

from benchmarks.contender import Contender

_TRIALS = 3
_Item = TypeVar("_Item")


def seconds(contender: Contender, steps: int) -> float:
    """Returns the time for some steps, everything awaited."""
    start = time.perf_counter()
    contender.advance(steps)
    return time.perf_counter() - start


def steps_for(contenders: Sequence[Contender], secs: float, fewest: int, most: int) -> int:
    """Returns how many steps take the fastest of the contenders that long, within bounds."""
    fastest = min(min(seconds(c, fewest) for _ in range(_TRIALS)) for c in contenders)
    return min(max(math.ceil(secs / (fastest / fewest)), fewest), most)


def in_order(contenders: Sequence[_Item], number: int) -> list[_Item]:
    """Returns the contenders in the order of a round: another first, every other backwards."""
    start = number // 2 % len(contenders)
    turned = [*contenders[start:], *contenders[:start]]
    return turned[::-1] if number % 2 else turned
