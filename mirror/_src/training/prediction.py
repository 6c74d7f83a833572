"""Predictions for all examples of a dataset, one row for each, as NumPy arrays."""

from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from mirror._src.data.distribute import DistributedDataset
from mirror._src.strategy.strategy import Strategy
from mirror._src.training.meter import MOST_RUNNING
from mirror._src.training.stream import whole_pass
from mirror._src.utils.errors import describe
from mirror._src.utils.naming import keys, name_of
from mirror._src.utils.types import PyTree, StepFunction
from mirror._src.values.per_replica import PerReplica, is_per_replica


def predictions(
    strategy: Strategy,
    fn: Callable[[Any, PyTree], PyTree],
    step: StepFunction,
    model: nnx.Module,
    data: DistributedDataset,
) -> PyTree:
    """What `fn` makes of each example, in the order of the data; see `Trainer.predict`.

    Args:
        strategy: what runs the step.
        fn: the user's function.
        step: `fn` as a step of one replica.
        model: its first argument.
        data: its batches.

    Raises:
        ValueError: there is no data; a result has not one row for each example.
    """
    rows, running = list[PyTree](), deque[Any]()
    for padded in whole_pass(data):
        results = strategy.run(step, (model, padded.batch))
        running.append((results, padded.mask))
        if len(running) > MOST_RUNNING:
            rows.append(_rows(fn, *running.popleft()))
    rows += [_rows(fn, *pair) for pair in running]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *rows)


def _rows(fn: Callable[..., Any], results: PyTree, mask: PerReplica) -> PyTree:
    """One row for each example of a batch; what only pads is left out."""
    n, size = mask.stacked.shape
    wanted = np.asarray(mask).reshape(-1)

    def rows(path: Any, leaf: Any) -> np.ndarray:
        own = np.asarray(leaf)
        if not is_per_replica(leaf):  # every replica has returned the same
            own = np.broadcast_to(own, (n, *own.shape))
        if own.shape[:2] != (n, size):
            raise ValueError(
                f"{name_of(fn)} returned an array of shape {own.shape[1:]} for result{keys(path)}; "
                f"of a replica's {size} examples it must have a row for each, ({size}, ...)."
            )
        return own.reshape(-1, *own.shape[2:])[wanted]

    if not jax.tree.leaves(results):
        raise ValueError(f"{name_of(fn)} returned {describe(results)}, which holds no arrays.")
    return jax.tree_util.tree_map_with_path(rows, results, is_leaf=is_per_replica)
