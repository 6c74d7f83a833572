"""`UnstackedArrays`: per-replica arrays that cannot be stacked into one array."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mirror._src.base.types import Array


class UnstackedArrays:
    """Per-replica arrays that differ in length, or whose devices cannot form a mesh.

    The single leaf of a `PerReplica` value, in place of a stacked array.

    Args:
        arrays: Arrays in replica order, with the same dtype and number of dimensions.
    """

    __slots__ = ("arrays",)

    def __init__(self, arrays: Sequence[Array | np.ndarray]) -> None:
        self.arrays = tuple(arrays)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The number of replicas, then the shape of each replica's array; identifies programs."""
        return (len(self.arrays), *self.shapes)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each replica's array."""
        return tuple(array.shape for array in self.arrays)

    @property
    def dtype(self) -> np.dtype:
        """The dtype, the same on every replica."""
        return self.arrays[0].dtype

    @property
    def are_equal(self) -> bool:
        """Whether all arrays have the same shape."""
        return len(set(self.shapes)) == 1

    def __repr__(self) -> str:
        return f"UnstackedArrays({self.dtype}, {', '.join(map(str, self.shapes))})"
