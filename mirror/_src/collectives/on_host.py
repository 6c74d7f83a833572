"""Reductions with NumPy in the host's memory."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from mirror._src.collectives.reduce_op import ReduceOp, accumulator

_ON_HOST: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def fold(op: ReduceOp, values: Iterable[np.ndarray]) -> np.ndarray:
    """Reduces arrays one after the other into one buffer.

    Args:
        op: `SUM`, `MIN` or `MAX`.
        values: arrays of one shape and dtype, one at least. Half precision is summed in float32.
    """
    values = iter(values)
    first = next(values)
    dtype = first.dtype
    wide = accumulator(dtype) if op is ReduceOp.SUM else dtype
    total = aligned(first.shape, wide)
    total[...] = first
    del first  # one total, and one replica's value at a time
    with np.errstate(all="ignore"):  # infinity and NaN are values, as on the devices
        for value in values:
            _ON_HOST[op](total, value.astype(wide, copy=False), out=total)
        return total.astype(dtype, copy=False)


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that begins at a multiple of 64 bytes, as XLA wants host memory to be."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + 64, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
