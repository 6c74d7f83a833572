"""Partitioners: into how many shards a variable is cut along axis 0, as in TensorFlow."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mirror._src.base.errors import require_int
from mirror._src.base.modules import set_module


class Partitioner:
    """Base class of the partitioners: called with a shape and a dtype, returns a number of shards.

    Any function of the same arguments is a partitioner too. A variable never has more shards than
    rows, nor more than there are parameter servers, because a server holds at most one of them.
    """

    def __call__(self, shape: Sequence[int], dtype: Any) -> int:
        """Returns into how many shards a variable is cut, at least 1."""
        raise NotImplementedError


@set_module("mirror.ps")
class MinSizePartitioner(Partitioner):
    """Cuts a variable into as many shards as have at least `min_shard_bytes` each.

    Args:
        min_shard_bytes: Least size of a shard. Smaller variables stay whole.
        max_shards: Most shards of a variable; `None` means one per parameter server.

    Raises:
        ValueError: If an argument is less than 1.
        TypeError: If an argument is not an integer.

    >>> mirror.ps.MinSizePartitioner(min_shard_bytes=1024)((1000, 4), "float32")
    15
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int | None = None) -> None:
        require_int("min_shard_bytes", min_shard_bytes, fix="For example 256 << 10.")
        if max_shards is not None:
            require_int("max_shards", max_shards, fix="None means one per parameter server.")
        self.min_shard_bytes, self.max_shards = min_shard_bytes, max_shards

    def __call__(self, shape: Sequence[int], dtype: Any) -> int:
        """Returns into how many shards a variable is cut, at least 1."""
        shards = min(_num_bytes(shape, dtype) // self.min_shard_bytes, _rows(shape))
        return max(1, shards if self.max_shards is None else min(shards, self.max_shards))

    def __repr__(self) -> str:
        return f"MinSizePartitioner({self.min_shard_bytes}, max_shards={self.max_shards})"


@set_module("mirror.ps")
class MaxSizePartitioner(Partitioner):
    """Cuts a variable into as few shards as have at most `max_shard_bytes` each.

    A row is never cut, and there is at most one shard per parameter server: shards are larger where
    rows are large or servers are few.

    Args:
        max_shard_bytes: Largest size of a shard.

    Raises:
        ValueError: If the size is less than 1.
        TypeError: If the size is not an integer.

    >>> mirror.ps.MaxSizePartitioner(max_shard_bytes=1024)((1000, 4), "float32")
    16
    """

    def __init__(self, max_shard_bytes: int) -> None:
        require_int("max_shard_bytes", max_shard_bytes, fix="For example 64 << 20.")
        self.max_shard_bytes = max_shard_bytes

    def __call__(self, shape: Sequence[int], dtype: Any) -> int:
        """Returns into how many shards a variable is cut, at least 1."""
        if not (rows := _rows(shape)) or not (size := _num_bytes(shape, dtype)):
            return 1
        rows_per_shard = max(1, self.max_shard_bytes // -(-size // rows))
        return -(-rows // rows_per_shard)

    def __repr__(self) -> str:
        return f"MaxSizePartitioner({self.max_shard_bytes})"


@set_module("mirror.ps")
class FixedShardsPartitioner(Partitioner):
    """Cuts every variable into the same number of shards.

    Args:
        num_shards: Number of shards. Variables with fewer rows have one shard per row, and no
            variable has more shards than there are parameter servers.

    Raises:
        ValueError: If the number is less than 1.
        TypeError: If the number is not an integer.

    >>> mirror.ps.FixedShardsPartitioner(2)((1000, 4), "float32")
    2
    """

    def __init__(self, num_shards: int) -> None:
        require_int("num_shards", num_shards)
        self.num_shards = num_shards

    def __call__(self, shape: Sequence[int], dtype: Any) -> int:
        """Returns into how many shards a variable is cut, at least 1."""
        del dtype
        return max(1, min(self.num_shards, _rows(shape)))

    def __repr__(self) -> str:
        return f"FixedShardsPartitioner({self.num_shards})"


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _num_bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize
