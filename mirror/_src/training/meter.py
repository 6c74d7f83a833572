"""Metrics on the host: collects the sums of launches without blocking the devices."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, final

import jax
import numpy as np

from mirror._src.devices.launch import wait_for
from mirror._src.training.exact import number_of
from mirror._src.training.objective import LOSS, Sums

MOST_RUNNING = 8
"""Number of launches that may run while the host reads the metrics of older ones."""


class CollectedMetrics(NamedTuple):
    """The metrics of one launch.

    Attributes:
        step: Last step of the launch.
        means: Means over the examples of the launch.
        empty: Names of the means that are NaN because their weights add up to 0.
    """

    step: int
    means: dict[str, float]
    empty: frozenset[str] = frozenset()


@final
class Meter:
    """Adds up the sums of launches, in order: integers exactly, floats in float64.

    Attributes:
        totals: Sums of the losses and metrics collected so far.
        count: Number of examples collected so far.
        weights: Sums of the weights of `Weighted` losses and metrics.
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
        self._pending: deque[tuple[int, Sums, Any]] = deque()

    def add(self, step: int, sums: Sums, before: Any = None) -> None:
        """Adds the sums of the launch that ended with `step`, which may still be running.

        Args:
            step: Last step of the launch.
            sums: Its sums.
            before: What `drop_failed` returns if the launch fails.
        """
        self._pending.append((step, sums, before))
        for leaf in jax.tree.leaves(sums):  # else every read on a GPU waits for a copy of its own
            if hasattr(leaf, "copy_to_host_async"):  # not an array of NumPy
                leaf.copy_to_host_async()

    def drop_failed(self) -> Any:
        """Drops the first launch that failed and all later ones.

        Returns:
            The `before` of the first launch that failed, or None.
        """
        for index, (_, sums, before) in enumerate(self._pending):
            try:
                _read(sums)
            except Exception:
                while len(self._pending) > index:
                    self._pending.pop()
                return before
        return None

    def collect(self, *, running: int = 0) -> list[CollectedMetrics]:
        """Collects the launches added so far, except for the last few.

        Args:
            running: Number of last launches not to wait for.

        Returns:
            The metrics of each collected launch.
        """
        collected = []
        while len(self._pending) > running:
            step, sums, _ = self._pending[0]
            totals, weights, count = _read(sums)
            self._pending.popleft()  # not if it failed
            _add(self.totals, totals)
            _add(self.weights, weights)
            self.count += count
            empty = frozenset(name for name in weights if not totals[name] and not weights[name])
            collected.append(CollectedMetrics(step, means(totals, count, weights), empty))
        return collected

    @property
    def means(self) -> dict[str, float]:
        """The means over all examples collected so far."""
        return means(self.totals, self.count, self.weights)

    def to_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint; checkpoints of earlier versions lack `weights`."""
        return {"totals": self.totals, "count": self.count, "weights": self.weights}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "Meter":
        """Returns the meter of a `to_dict` result.

        Raises:
            TypeError: If it is not the result of `to_dict`.
        """
        meter = cls(**state)
        numbers = [meter.count, *meter.totals.values(), *meter.weights.values()]
        if not all(type(number) in (int, float) for number in numbers):
            raise TypeError(f"expected numbers, got {state}")
        return meter


def means(
    totals: dict[str, float], count: int, weights: dict[str, float] | None = None
) -> dict[str, float]:
    """Divides sums by their weights, or by the number of examples; NaN if that is 0."""
    divisors = dict.fromkeys(totals, count) | (weights or {})
    return {
        name: totals[name] / divisors[name] if divisors[name] else math.nan
        for name in in_order(totals)
    }


def in_order(names: Iterable[str]) -> list[str]:
    """Returns the names of metrics with the loss first; JAX has sorted them."""
    return sorted(names, key=lambda name: name != LOSS)


def in_words(logs: Mapping[str, float]) -> str:
    """Formats metrics: `loss 0.1234, accuracy 0.9876`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in logs.items())


def _read(sums: Sums) -> tuple[dict[str, float], dict[str, float], int]:
    wait_for(sums)
    return _numbers(sums.totals), _numbers(sums.weights), int(np.asarray(sums.count))


def _numbers(sums: dict[str, Any]) -> dict[str, float]:
    return {name: number_of(x) for name, x in sums.items()}


def _add(sums: dict[str, float], more: dict[str, float]) -> None:
    for name, number in more.items():
        sums[name] = sums.get(name, 0) + number
