"""`MetricTotals`: metrics that are not means, computed on the host from all examples."""

import copy
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from mirror._src.base.errors import describe
from mirror._src.inspection.trial_objects import gathered
from mirror._src.strategy.strategy import Strategy
from mirror._src.training.metric import Metric
from mirror._src.training.prediction import rows_of
from mirror._src.training.progress import MOST_RUNNING


@final
class MetricTotals:
    """The metrics of one evaluation, computed from the examples of its batches, in their order."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._running: deque[Any] = deque()
        self._totals: dict[str, Any] = {}

    def add(self, metrics: Mapping[str, Metric], mask: Any) -> None:
        """Adds the metrics of a launch, which may still be running."""
        if metrics:
            self._running.append(gathered(self._strategy._runner, (dict(metrics), mask)))
        if len(self._running) > MOST_RUNNING:
            self._merge(*self._running.popleft())

    def _merge(self, metrics: Mapping[str, Metric], mask: Any) -> None:
        for name, metric in metrics.items():
            rows = rows_of(f"the metric {name!r}", metric.inputs, mask)
            self._totals[name] = _with_rows(self._totals.get(name), metric.metric, rows)

    def values(self) -> dict[str, float]:
        """Returns the metrics of all examples.

        Raises:
            TypeError: If one is not a number.
        """
        while self._running:
            self._merge(*self._running.popleft())
        return {name: _number(name, total.compute()) for name, total in self._totals.items()}


def _with_rows(total: Any, metric: Any, rows: dict[str, np.ndarray]) -> Any:
    """Adds examples to the state of a metric, or makes one."""
    if isinstance(total, _Unmerged):
        total.rows.append(rows)
        return total
    if hasattr(metric, "from_model_output") or not hasattr(metric, "update"):
        of_rows = getattr(metric, "from_model_output", metric)
        of_batch = of_rows(**rows)
        merge = getattr(type(of_batch), "merge", None)
        if getattr(merge, "__qualname__", "Metric.merge") == "Metric.merge":  # clu's has no code
            return _Unmerged(of_rows, [rows])
        return of_batch if total is None else total.merge(of_batch)
    if total is None:
        total = metric() if isinstance(metric, type) else copy.deepcopy(metric)
        total.reset()
    total.update(**rows)
    return total


@dataclass
class _Unmerged:
    """A metric whose results cannot be merged: it is computed from the examples of all batches."""

    of_rows: Callable[..., Any]
    rows: list[dict[str, np.ndarray]]

    def compute(self) -> Any:
        """Returns the metric."""
        names = self.rows[0]
        found = self.of_rows(**{n: np.concatenate([rows[n] for rows in self.rows]) for n in names})
        return found.compute() if hasattr(found, "compute") else found


def _number(name: str, value: Any) -> float:
    if np.shape(value) != ():
        raise TypeError(
            f"compute() of the metric {name!r} must return a number, got {describe(value)}. Return "
            "one mirror.Metric for each number."
        )
    return float(value)
