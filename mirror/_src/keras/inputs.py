"""Wraps the calls of a model: rejects data that Keras would misread, and marks Keras' loops."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from mirror._src.base.keras_library import GLOBAL_BATCHES
from mirror._src.base.naming import parameter_names
from mirror._src.data.arrays import ArrayDataset
from mirror._src.data.prefetch import PrefetchIterator
from mirror._src.data.source import DistributedDatasetBase
from mirror._src.engine.per_replica import brief, is_per_replica
from mirror._src.keras.step_function import keras_loop

METHODS = ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"]
_MOST = 64  # a longer list is data, not a structure of inputs


def checking(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of `keras.Model` that rejects values of replicas before Keras reads them.

    Keras takes any model here, also one that was created outside all scopes. What a generator or a
    `PyDataset` yields is rejected where Keras converts it to an array. The method runs as a loop of
    Keras, which step functions return their state to in a form that Keras assigns faster.
    """
    names = parameter_names(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, value in (*zip(names[1:], args, strict=False), *kwargs.items()):
            for path, leaf in _leaves(name, value):
                _require_global(method.__name__, path, leaf)
        with keras_loop():
            return method(self, *args, **kwargs)

    return call


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what containers hold, with its name. Arrays and text are leaves."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(f"{name}[{key!r}]", each)
    elif isinstance(value, list | tuple) and len(value) <= _MOST:
        for i, each in enumerate(value):
            yield from _leaves(f"{name}[{i}]", each)
    else:
        yield name, value


def _require_global(method: str, name: str, leaf: Any) -> None:
    if is_per_replica(leaf):
        raise TypeError(f"`{name}` must be a global batch, got {brief(leaf)}. {GLOBAL_BATCHES}")
    if isinstance(leaf, DistributedDatasetBase | PrefetchIterator):
        raise TypeError(f"`{name}` must be global batches, got {leaf}. {GLOBAL_BATCHES}")
    if isinstance(leaf, ArrayDataset):
        raise TypeError(
            f"`{name}` must be arrays or a dataset that Keras reads, got {leaf}. Pass its arrays: "
            f"model.{method}(x, y, batch_size={leaf.batch_size}). mirror.data is for "
            "mirror.Trainer and strategy.distribute_dataset."
        )
