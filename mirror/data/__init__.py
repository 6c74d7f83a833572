"""Data: global batches cut up for the replicas."""

from mirror.data.arrays import ArrayDataset as ArrayDataset
from mirror.data.arrays import from_arrays as from_arrays
