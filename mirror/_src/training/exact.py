"""Exact sums of integers: arrays of digits, which the host joins to Python's integers.

Without x64, JAX has no integers of more than 32 bits, and a sum of 32-bit integers wraps. The bytes
of the integers are therefore added up separately. For booleans and 8-bit integers, a sum in int32
is exact for millions of examples.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from mirror._src.base.types import Array

_BASE = 256
_MOST_EXACT = 2**24  # float32 has all integers up to it


def exact_sum(values: Array, mask: Array) -> Array:
    """Returns the sum of the integers or booleans where the mask is True: int32 or digits."""
    size = values.dtype.itemsize
    if size == 1:
        return jnp.sum(values, where=mask, dtype=jnp.int32)
    low = [(values >> 8 * i) & (_BASE - 1) for i in range(size - 1)]
    high = values >> 8 * (size - 1)  # has the sign
    columns = [x.astype(jnp.int32) for x in (*low, high)]
    sums = [jnp.sum(x, where=mask, dtype=jnp.int32) for x in columns]
    return carried(jnp.stack([*sums, jnp.zeros((), jnp.int32)]))


def fit_floats(num_examples: int) -> bool:
    """Whether float32 has all sums of digits, 8-bit integers or booleans of this many examples."""
    return num_examples * _BASE <= _MOST_EXACT


def carried(total: Array) -> Array:
    """Returns the digits with all but the last below 256, so that equal sums have equal digits."""
    if not total.ndim:
        return total
    digits = list(total)
    for i in range(len(digits) - 1):
        digits[i + 1] = digits[i + 1] + (digits[i] >> 8)
        digits[i] = digits[i] & (_BASE - 1)
    return jnp.stack(digits)


def as_float(total: Array, dtype: Any) -> Array:
    """Returns a sum as a float; digits are joined."""
    floats = total.astype(dtype)
    if not total.ndim:
        return floats
    result = floats[-1]
    for i in reversed(range(len(floats) - 1)):
        result = result * _BASE + floats[i]
    return result


def number_of(total: Any) -> float | int:
    """Returns a sum as a number of Python; digits are joined exactly.

    >>> number_of(np.asarray([255, 1, 0])), number_of(np.asarray([0, 0, -1]))
    (511, -65536)
    """
    array = np.asarray(total)
    if not array.ndim:
        number: float | int = array.item()
        return number
    return sum(int(digit) * _BASE**i for i, digit in enumerate(array))
