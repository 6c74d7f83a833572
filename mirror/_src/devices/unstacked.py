"""`UnstackedArrays`: the replicas' arrays where they are no rows of one array."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mirror._src.utils.types import Array


class UnstackedArrays:
    """One array for each replica, which differ in length or lie on devices that no mesh spans.

    It is to a `PerReplica` what the stacked array is elsewhere: its one leaf.

    Args:
        arrays: in replica order, of one dtype and number of dimensions.
    """

    __slots__ = ("arrays",)

    def __init__(self, arrays: Sequence[Array | np.ndarray]) -> None:
        self.arrays = tuple(arrays)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The number of replicas, then each one's shape: what programs are told apart by."""
        return (len(self.arrays), *self.shapes)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Each replica's shape."""
        return tuple(array.shape for array in self.arrays)

    @property
    def dtype(self) -> np.dtype:
        """The dtype, the same on every replica."""
        return self.arrays[0].dtype

    @property
    def are_equal(self) -> bool:
        """Whether all have one shape."""
        return len(set(self.shapes)) == 1

    def __repr__(self) -> str:
        return f"UnstackedArrays({self.dtype}, {', '.join(map(str, self.shapes))})"
