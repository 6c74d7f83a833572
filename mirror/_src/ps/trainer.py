"""`ServedSteps`: runs the steps of a `mirror.Trainer` on parameter servers."""

import functools
import math
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
from flax import nnx

from mirror._src.base.types import PyTree
from mirror._src.data.padded import PaddedBatch
from mirror._src.engine.per_replica import PerReplica
from mirror._src.inspection.trial_objects import copy_of
from mirror._src.inspection.verify import (
    CAUSES,
    Difference,
    VerifyReport,
    checked,
    compare_variables,
    relative_difference,
    variables_of,
)
from mirror._src.ps.coordinator import ClusterCoordinator
from mirror._src.ps.messages import ArgumentOfStep, Result
from mirror._src.ps.remote_value import CancelledError, RemoteValue
from mirror._src.training.objective import Sums
from mirror._src.training.runners import Training, divisor_of, host_batch

_NAMES = ("model", "optimizer")
_OBJECTS = tuple(map(ArgumentOfStep, _NAMES))


@final
class ServedSteps:
    """The steps of a trainer whose model is on parameter servers.

    Args:
        coordinator: Schedules the steps.
        training: The step, the model and the optimizer of the trainer.
    """

    def __init__(
        self,
        coordinator: ClusterCoordinator,
        training: Training,
    ) -> None:
        strategy = coordinator.strategy
        self._coordinator, self._training = coordinator, training
        self._model, self._optimizer = training.objects["model"], training.objects["optimizer"]
        self._num_parts = strategy.num_parts
        self.multiple = training.accumulate_steps * strategy.num_replicas_in_sync
        self.most_running = 2 * strategy.num_workers + 2
        self.may_fail_later, self.has_lost_values, self._runs = True, False, False
        self._names: Sums | None = None  # the structure of what the step returns

    def run(self, batch: PaddedBatch) -> Sums:
        """See `StepRunner.run`."""
        self._training.trace_once(batch)
        return self._schedule(*host_batch(batch))

    def _schedule(self, batch: PyTree, mask: Any) -> Sums:
        # Padding is at the end. The gradient of a part without examples would be a division by 0.
        rows = mask.size // self._num_parts
        num_parts = max(1, math.ceil(np.count_nonzero(mask) / rows))
        value = self._coordinator._schedule_step(
            self._training.step,
            self._model,
            self._optimizer,
            [
                ((*_OBJECTS, *_rows((batch, mask), start, start + rows)), {})
                for start in range(0, num_parts * rows, rows)
            ],
            weight_of=divisor_of,
            batch_of=_batch_of,
            join=add_sums,
        )
        self._runs, self.has_lost_values = True, False
        result = _Pending(value, self._coordinator)
        if self._names is None:
            self._names = result.sums
        leaves: list[Any]
        treedef: Any
        leaves, treedef = jax.tree.flatten(self._names)
        return treedef.unflatten([_Number(result, i) for i in range(len(leaves))])

    def synchronize(self) -> None:
        """See `StepRunner.synchronize`."""
        if not self._runs:  # also after the strategy was closed
            return
        try:
            self._coordinator.join()
        except (KeyboardInterrupt, SystemExit):  # steps still run
            raise
        except BaseException:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        self._runs = False
        self.has_lost_values = not self._coordinator.strategy._training.is_collected

    def lowered_text(self, batch: PaddedBatch | None) -> str:
        """See `StepRunner.lowered_text`."""
        raise NotImplementedError(
            f"{type(self._coordinator.strategy).__name__} compiles steps on the workers, whose "
            "programs cannot be returned. Use the same step with mirror.MirroredStrategy."
        )

    def verify(self, batch: PaddedBatch, rtol: float) -> VerifyReport:
        """See `StepRunner.verify`."""
        self.synchronize()
        self._training.trace_once(batch)
        batch, mask = host_batch(batch)
        objects = (self._model, self._optimizer)
        saved, single = copy_of(objects), copy_of(objects)
        before = variables_of(objects, _NAMES)
        try:
            sums = self._schedule(batch, mask)
            self.synchronize()
            after = variables_of(objects, _NAMES)
        finally:
            for mine, old in zip(objects, saved, strict=True):
                nnx.update(mine, nnx.state(old))
        row = functools.partial(jax.tree.map, lambda x: PerReplica([x]))
        local = self._coordinator.strategy.local
        expected = local.run(self._training.step, (*single, row(batch), row(mask)))
        pairs = zip(
            jax.tree_util.tree_leaves_with_path(sums), jax.tree.leaves(expected), strict=True
        )
        rows = [
            Difference("result" + jax.tree_util.keystr(path), _distance(a, b))
            for (path, a), b in pairs
        ]
        rows += compare_variables(before, after, variables_of(single, _NAMES))
        return checked(VerifyReport(self.multiple, rtol, tuple(rows)), CAUSES)


def add_sums(parts: Sequence[Result]) -> Sums:
    """Returns the sums of a step, given the results of its parts."""

    def add(*values: np.ndarray) -> np.ndarray:
        return np.sum(values, axis=0, dtype=np.asarray(values[0]).dtype)

    total: Sums = jax.tree.map(add, *(part.value for part in parts))
    return total


def _batch_of(batch: PyTree, mask: Any) -> tuple[PyTree]:
    """Returns what the user's functions of a batch receive."""
    del mask
    return (batch,)


def _rows(tree: PyTree, start: int, stop: int) -> PyTree:
    return jax.tree.map(lambda x: x[start:stop], tree)


def _distance(a: Any, b: Any) -> float:
    return relative_difference(np.asarray(a), np.asarray(b))


@final
class _Pending:
    """The sums of a step that may still be running."""

    def __init__(self, value: RemoteValue, coordinator: ClusterCoordinator) -> None:
        self._value, self._coordinator = value, coordinator

    @functools.cached_property
    def sums(self) -> Sums:
        """The sums.

        Raises:
            Exception: What this step, or one before it, raised.
        """
        try:
            sums: Sums = self._value.fetch()
        except CancelledError:
            self._coordinator.join()  # raises the error because of which it was canceled
            raise
        return sums


@final
class _Number:
    """One number of the sums of a step, which is fetched when NumPy needs it."""

    def __init__(self, pending: _Pending, index: int) -> None:
        self._pending, self._index = pending, index

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(jax.tree.leaves(self._pending.sums)[self._index], dtype)
