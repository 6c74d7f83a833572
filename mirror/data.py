"""Datasets of global batches, for `strategy.distribute_dataset` and `Trainer.fit`."""

from mirror._src.base.unknown_names import explain_unknown_names as _explain_unknown_names
from mirror._src.data.arrays import ArrayDataset as ArrayDataset
from mirror._src.data.arrays import from_arrays as from_arrays

_explain_unknown_names("mirror.data")
