"""Predictions and metrics that are not means, on the host, from all examples of a dataset."""

import contextlib
import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np
from flax import nnx

from mirror._src.base.errors import describe, expected
from mirror._src.base.naming import keys, name_of
from mirror._src.base.types import PyTree, StepFunction
from mirror._src.data.distribute import DistributedDataset
from mirror._src.devices.launch import wait_for
from mirror._src.engine.per_replica import PerReplica, is_per_replica
from mirror._src.inspection.measurement import gathered
from mirror._src.strategy.strategy import Strategy
from mirror._src.training.inputs import whole_pass
from mirror._src.training.metric import Metric
from mirror._src.training.named_loss import LossFunction, NamedLoss, inputs_unknown
from mirror._src.training.progress import MOST_RUNNING
from mirror._src.training.row_check import RowCheck


@final
class ModelOutputs:
    """The outputs of the model for the inputs of a batch.

    An array is the inputs. Which entries of other batches are the inputs, only a named loss knows.
    """

    def __init__(self, loss_fn: LossFunction | NamedLoss) -> None:
        self.__name__ = "the model"  # for messages
        self._loss_fn = loss_fn

    def __call__(self, model: Any, batch: PyTree) -> PyTree:
        """Returns what the model returns."""
        if isinstance(self._loss_fn, NamedLoss):
            return model(self._loss_fn.inputs_of(batch))
        if len(jax.tree.leaves(batch)) == 1 and hasattr(batch, "shape"):
            return model(batch)
        raise inputs_unknown(batch, f"the loss is the function {name_of(self._loss_fn)}")


def require_prediction(fn: Any, data: Any, outputs: ModelOutputs) -> Callable[[Any, PyTree], Any]:
    """Returns the function of `Trainer.predict(data, fn)`, or the outputs of the model.

    Raises:
        TypeError: If it is not callable, or the arguments are swapped.
    """
    if callable(data) and not isinstance(data, Iterable) and not callable(fn):
        name = name_of(data)
        name = "lambda model, batch: ..." if name == "<lambda>" else name
        raise TypeError(
            f"`data` must be arrays or an iterable of batches, got the function {name_of(data)}. "
            f"The data are the first argument: trainer.predict(data, {name})."
        )
    if fn is None:
        return outputs
    if not callable(fn):
        fix = "Pass a function (model, batch) that returns one row per example."
        if isinstance(fn, int) and not isinstance(fn, bool):
            fix = f"The number of examples per batch is trainer.predict(data, batch_size={fn})."
        raise TypeError(expected("fn", fn, "callable", fix))
    try:
        hash(fn)
    except TypeError:  # of an object such as a dataclass; its methods have one
        fn = fn.__call__
    prediction: Callable[[Any, PyTree], Any] = fn
    return prediction


def predictions(
    strategy: Strategy,
    fn: Callable[[Any, PyTree], PyTree],
    step: StepFunction,
    model: nnx.Module,
    data: DistributedDataset[Any],
    check: RowCheck,
    fix: str,
    looks: bool,
) -> PyTree:
    """Returns the results of `fn` in the order of the data; see `Trainer.predict`.

    Args:
        strategy: The strategy that runs the step.
        fn: The user's function, for messages.
        step: The function as a step of one replica.
        model: First argument of the step.
        data: Batches for the step.
        check: Checks that padding does not change the results.
        fix: As for `whole_pass`.
        looks: Whether to warn of results for which the other rows of a replica count.

    Raises:
        ValueError: If the data is empty, a result does not have one row per example, or the rows of
            two batches differ in shape, dtype or structure.
    """
    rows, running = list[PyTree](), deque[Any]()
    for launch in whole_pass(data, fix=fix):
        check.warn_of_training_mode(step, model, launch)
        (padded,) = check.without_padding(step, model, launch)
        if looks:
            check.warn_of_own_rows(step, model, launch)
        results = strategy.run(step, (model, padded.batch, padded.mask))
        running.append(gathered(strategy._runner, (results, padded.mask)))
        if len(running) > MOST_RUNNING:
            _add(rows, rows_of(name_of(fn), *running.popleft()), name_of(fn))
    for pair in running:
        _add(rows, rows_of(name_of(fn), *pair), name_of(fn))
    return jax.tree.map(lambda *pieces: np.concatenate(pieces), *rows)


def _add(rows: list[PyTree], new: PyTree, what: str) -> None:
    """Adds the rows of a batch, which must be like those before."""
    for before in rows[:1]:
        pairs = itertools.zip_longest(_types_of(before), _types_of(new), fillvalue="nothing more")
        for old, other in pairs:
            if old != other:
                raise ValueError(
                    f"{what} returned {other} for batch {len(rows)}, but {old} for batch 0, so "
                    "that their rows cannot be joined. Pad the inputs to one shape, or predict "
                    "the batches of each shape in a call of its own."
                )
    rows.append(new)


def _types_of(rows: PyTree) -> list[str]:
    leaves = jax.tree_util.tree_flatten_with_path(rows)[0]
    return [f"result{keys(path)} with rows {x.dtype}{list(x.shape[1:])}" for path, x in leaves]


def rows_of(what: str, results: PyTree, mask: PerReplica) -> PyTree:
    """Returns one row per example of a batch, without the padding; `what` is for messages."""
    wait_for(results)
    n, size = mask.stacked.shape
    is_example = np.asarray(mask).reshape(-1)

    def rows(path: Any, leaf: Any) -> np.ndarray:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"result{keys(path)} of {what} has PRNG keys, which NumPy does not have. Return "
                "jax.random.key_data(key)."
            )
        array = np.asarray(leaf)
        if not is_per_replica(leaf):  # all replicas returned the same value
            array = np.broadcast_to(array, (n, *array.shape))
        if array.shape[:2] != (n, size):
            raise ValueError(
                f"result{keys(path)} of {what} must have shape ({size}, ...), one row per "
                f"example of the replica's batch, got an array of shape {array.shape[1:]}."
            )
        return array.reshape(n * size, *array.shape[2:])[is_example]

    if not jax.tree.leaves(results):
        raise ValueError(f"{what} returned {describe(results)}, which contains no arrays.")
    return jax.tree_util.tree_map_with_path(rows, results, is_leaf=is_per_replica)


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
    with contextlib.suppress(TypeError, ValueError):
        if np.shape(value) == ():
            return float(value)
    raise TypeError(
        f"compute() of the metric {name!r} must return a number, got {describe(value)}. Return "
        "one mirror.Metric for each number."
    )
