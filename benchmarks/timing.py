"""Measuring: contenders in turn within each round, so that a busy moment meets all of them."""

import gc
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.contenders import Contender
from benchmarks.plan import Timing

_MOST_STEPS = 200
_CHECK_STEPS = 3
_RTOL = 1e-4


class ContendersDifferError(ValueError):
    """Two contenders did not compute the same: their times mean nothing."""


def advance(contender: Contender, steps: int) -> float:
    """Seconds for so many steps, everything awaited."""
    start = time.perf_counter()
    for _ in range(steps):
        contender.launch()
    jax.block_until_ready(contender.arrays())
    return time.perf_counter() - start


def require_same(contenders: Sequence[Contender], rtol: float = _RTOL) -> None:
    """Takes a few steps with each, and compares the parameters.

    Raises:
        ContendersDifferError: they differ.
    """
    for contender in contenders:
        advance(contender, _CHECK_STEPS)
    first = contenders[0]
    expected = jax.tree.map(np.asarray, first.params())
    for other in contenders[1:]:
        found = jax.tree.map(np.asarray, other.params())
        _require_close(first.name, expected, other.name, found, rtol)


def _require_close(first: str, expected: Any, other: str, found: Any, rtol: float) -> None:
    structures: list[Any] = [jax.tree.structure(expected), jax.tree.structure(found)]
    if structures[0] != structures[1]:
        raise ContendersDifferError(f"{first} and {other} have different parameters.")
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    far = [
        f"{jax.tree_util.keystr(path)}: {np.abs(a - b).max():.2e}"
        for (path, a), b in pairs
        if not np.allclose(a, b, rtol=rtol, atol=rtol * np.abs(a).max())
    ]
    if far:
        raise ContendersDifferError(
            f"{first} and {other} differ after {_CHECK_STEPS} steps by at most {', '.join(far)}."
        )


def steps_per_round(contenders: Sequence[Contender], round_secs: float) -> int:
    """How many steps make the fastest contender's part of a round long enough."""
    fastest = min(min(advance(c, 3) for _ in range(3)) / 3 for c in contenders)
    return min(max(math.ceil(round_secs / fastest), 3), _MOST_STEPS)


def in_order(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The contenders in the order of that round: another first each time, every other backwards."""
    start = number // 2 % len(contenders)
    turned = [*contenders[start:], *contenders[:start]]
    return turned[::-1] if number % 2 else turned


def measure(
    contenders: Sequence[Contender], timing: Timing, rtol: float = _RTOL
) -> dict[str, list[float]]:
    """Milliseconds a launch of each contender, one number for each round.

    Args:
        contenders: what is measured.
        timing: how long.
        rtol: how far their parameters may be apart after a few launches.
    """
    require_same(contenders, rtol)
    steps = steps_per_round(contenders, timing.round_secs)
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    gc.collect()
    gc.freeze()  # what is there to stay is not walked through again in someone's round
    try:
        for number in range(timing.rounds):
            for contender in in_order(contenders, number):
                times[contender.name].append(advance(contender, steps) / steps * 1e3)
    finally:
        gc.unfreeze()
    return times
