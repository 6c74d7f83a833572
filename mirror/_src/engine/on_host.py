"""Reductions with NumPy in host memory."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from mirror._src.engine.reduce_op import ReduceOp, accumulator

_UFUNCS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def fold(op: ReduceOp, values: Iterable[np.ndarray]) -> np.ndarray:
    """Reduces arrays into one buffer, in the order in which they arrive.

    Args:
        op: `SUM`, `MIN` or `MAX`.
        values: At least one array, all of the same shape and dtype. Half precision is summed in
            float32.

    Returns:
        An array of the shape and dtype of the values.
    """
    values = iter(values)
    first = next(values)
    dtype = first.dtype
    total = aligned(first.shape, accumulator(dtype) if op is ReduceOp.SUM else dtype)
    total[...] = first
    del first  # memory holds the total and one replica's value at a time
    with np.errstate(all="ignore"):  # infinity and NaN are values, as on the devices
        for value in values:
            _UFUNCS[op](total, value.astype(total.dtype, copy=False), out=total)
        return total.astype(dtype, copy=False)


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an uninitialized array whose memory is aligned to 64 bytes, as XLA requires."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + 64, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
