"""Measures contenders in turns in one process, so that background load affects all equally."""

import gc
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.contender import Contender
from benchmarks.devices import first_devices
from benchmarks.jax_contender import JaxContender
from benchmarks.plan import Timing
from benchmarks.timing import in_order, seconds, steps_for

_MOST_STEPS = 200
_RTOL = 1e-4
_RTOL_ON_GPU = 2e-2  # products of TensorFloat-32, by kernels that may differ


class ContendersDifferError(ValueError):
    """Error for contenders that compute different results, whose times are not comparable."""


def require_same(
    contenders: Sequence[JaxContender], rtol: float = _RTOL, launches: int = Contender.fewest_steps
) -> None:
    """Takes a few steps with each contender, and compares the parameters.

    Raises:
        ContendersDifferError: If the parameters differ.
    """
    if first_devices(1)[0].platform != "cpu":
        rtol = max(rtol, _RTOL_ON_GPU)
    for contender in contenders:
        contender.advance(launches)
    first = contenders[0]
    expected = jax.tree.map(np.asarray, first.params())
    for other in contenders[1:]:
        actual = jax.tree.map(np.asarray, other.params())
        _require_close(first.name, expected, other.name, actual, rtol, launches)


def _require_close(
    first: str, expected: Any, other: str, actual: Any, rtol: float, steps: int
) -> None:
    structures: list[Any] = [jax.tree.structure(expected), jax.tree.structure(actual)]
    if structures[0] != structures[1]:
        raise ContendersDifferError(f"{first} and {other} have different parameters.")
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(actual), strict=True)
    differences = [
        f"{jax.tree_util.keystr(path)}: {np.abs(a - b).max():.2e}"
        for (path, a), b in pairs
        if not np.allclose(a, b, rtol=rtol, atol=rtol * np.abs(a).max())
    ]
    if differences:
        raise ContendersDifferError(
            f"{first} and {other} differ after {steps} steps by at most {', '.join(differences)}."
        )


def measure(
    contenders: Sequence[JaxContender],
    timing: Timing,
    rtol: float = _RTOL,
    fewest: int = Contender.fewest_steps,
) -> dict[str, list[float]]:
    """Returns the milliseconds per launch of each contender, one number per round.

    Args:
        contenders: The contenders.
        timing: Number and duration of the turns.
        rtol: Relative tolerance between their parameters after a few launches.
        fewest: Least number of launches in a turn; also the number before the comparison.
    """
    require_same(contenders, rtol, fewest)
    steps = steps_for(contenders, timing.round_secs, fewest, _MOST_STEPS)
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    gc.collect()
    gc.freeze()  # a collection during a turn then skips the objects that already exist
    try:
        for number in range(timing.rounds):
            for contender in in_order(contenders, number):
                times[contender.name].append(seconds(contender, steps) / steps * 1e3)
    finally:
        gc.unfreeze()
    return times
