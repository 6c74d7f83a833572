"""Datasets of global batches, for `strategy.distribute_dataset` and `Trainer.fit`."""

from mirror._src.base.tracebacks import make_public as _make_public
from mirror._src.data.arrays import ArrayDataset as ArrayDataset
from mirror._src.data.arrays import from_arrays as from_arrays

_make_public("mirror.data")
