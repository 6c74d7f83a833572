"""Data: global batches cut up for the replicas."""

from mirror._src.data.arrays import ArrayDataset as ArrayDataset
from mirror._src.data.arrays import from_arrays as from_arrays
