"""Datasets of other libraries: copies their batches, and advises how to batch them."""

import itertools
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from mirror._src.base.foreign_arrays import is_array
from mirror._src.devices.transfer import host_view

T = TypeVar("T")
"""A batch."""

_MAKES_BATCHES = {
    "datasets": "Batch the dataset first: dataset.with_format('numpy').batch(batch_size).",
    "grain": "Batch the dataset first: dataset.batch(batch_size).",
    "tensorflow": "Batch the dataset first: dataset.batch(batch_size).",
    "torch": "Batch the dataset first: torch.utils.data.DataLoader(dataset, batch_size).",
}


def advice(source: Any) -> str:
    """Returns the line of code that batches such a dataset, or `""` if its library is unknown."""
    libraries = [base.__module__.partition(".")[0] for base in type(source).__mro__]
    return next((_MAKES_BATCHES[name] for name in libraries if name in _MAKES_BATCHES), "")


def copied(tree: T) -> T:
    """Returns a batch whose buffers are its own: loaders overwrite theirs after each `next`."""
    copy: T = jax.tree.map(_copied, tree)
    return copy


def taken(batches: Iterator[T], count: int) -> list[T]:
    """Returns up to `count` next batches, of which a later `next` overwrites none but the last."""
    group: list[T] = []
    for batch in itertools.islice(batches, count):
        group.append(batch if len(group) == count - 1 else copied(batch))
    return group


def _copied(leaf: Any) -> Any:
    leaf = host_view(leaf) if isinstance(leaf, jax.Array) else leaf
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        return leaf.clone()
    if isinstance(leaf, np.generic | jax.Array):
        return leaf
    if not (is_array(leaf) or hasattr(leaf, "__array_interface__")):
        return leaf
    return np.asarray(leaf).copy()
