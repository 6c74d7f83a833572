"""`ReduceOp`, the dtypes of reductions, and reductions with NumPy in host memory."""

import enum
import math
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import describe, expected, nearest_name
from mirror._src.base.public_names import set_module
from mirror._src.base.types import Array, accumulator


@set_module("mirror")
class ReduceOp(enum.Enum):
    """Reduction over the replicas: `SUM`, `MEAN`, `MIN` or `MAX`.

    A sum keeps the dtype of its operands, except that booleans are counted in int32. The mean of
    integers or booleans is float32. `MIN` and `MAX` keep the dtype, propagate NaN, and do not
    accept complex numbers. Half-precision values are summed in float32, except in steps with
    `AllReduce(narrow=True)`.

    >>> ReduceOp("mean")
    <ReduceOp.MEAN: 'mean'>
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


Reduction: TypeAlias = ReduceOp | Literal["sum", "mean", "min", "max"]
"""A `ReduceOp`, or its name."""


_SYNONYMS = {"avg": "mean", "average": "mean", "add": "sum", "minimum": "min", "maximum": "max"}


def require_op(method: str, op: Any, value: Any) -> ReduceOp:
    """Returns the `ReduceOp` for the `op` argument of a method `(op, value)`.

    Args:
        method: The call as the user writes it, such as "strategy.reduce".
        op: First argument.
        value: Second argument.

    Raises:
        ValueError: If `op` is a string, but not the name of a reduction.
        TypeError: If `op` is neither a string nor a `ReduceOp`, or the arguments are swapped.
    """
    if not isinstance(op, str | ReduceOp) and isinstance(value, str | ReduceOp):
        shown = value.value if isinstance(value, ReduceOp) else value
        raise TypeError(
            f"The arguments of {method} are swapped: `op` must come first, got {describe(op)} and "
            f"then {shown!r}. Write {method}({shown!r}, x)."
        )
    if isinstance(op, ReduceOp):
        return op
    one_of = "one of " + ", ".join(repr(member.value) for member in ReduceOp)
    if not isinstance(op, str):
        name = getattr(op, "__name__", "mean")
        meant = next((m.value for m in ReduceOp if m.value in name), "mean")
        fix = f'Pass its name: all_reduce("{meant}", x).'
        raise TypeError(expected("op", op, one_of, fix))
    try:
        return ReduceOp(op.lower())
    except ValueError:
        near = _SYNONYMS.get(op.lower()) or nearest_name(op, [m.value for m in ReduceOp])
        fix = f" Did you mean {near!r}?" if near is not None else ""
        raise ValueError(f"`op` must be {one_of}, got {op!r}.{fix}") from None


def require_axis(method: str, value: Any, axis: Any) -> None:
    """Rejects the arguments of a method `(value, axis)` if they are swapped.

    Raises:
        TypeError: If `value` is an int, and `axis` is not.
    """
    if isinstance(value, int) and not isinstance(axis, int | np.integer | None):
        raise TypeError(
            f"The arguments of {method} are swapped: the value must come first, got {value!r} and "
            f"then {describe(axis)}. Write {method}(x, axis={value!r})."
        )


def prepare(op: ReduceOp, leaf: Array) -> Array:
    """Returns the leaf converted to the dtype of its reduction; see `result_dtype`."""
    leaf = jnp.asarray(leaf)
    dtype = result_dtype(op, leaf.dtype)
    return leaf if dtype == leaf.dtype else leaf.astype(dtype)


def result_dtype(op: ReduceOp, dtype: Any) -> Any:
    """Returns the dtype that a reduction of arrays of `dtype` has.

    Raises:
        TypeError: If arrays of `dtype` cannot be reduced by `op`.
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            "PRNG keys cannot be reduced. Sample with the key first, or reduce "
            "jax.random.key_data(key)."
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX) and jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"Cannot compute the {op.value!r} of {dtype}: complex numbers have no order. Reduce "
            "abs(x), or the real and imaginary parts."
        )
    exact = jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_
    if op is ReduceOp.MEAN and exact:
        return jnp.dtype(jnp.float32)
    if op is ReduceOp.SUM and exact:  # as `jnp.sum`: 8 bits hold no sum of two replicas
        wide = jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32
        return jnp.dtype(wide) if dtype == jnp.bool_ or jnp.iinfo(dtype).bits < 32 else dtype
    return dtype


_UFUNCS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def wrapped(totals: Any, estimates: Any) -> np.ndarray:
    """Returns the estimates, in float32, of those sums of integers that do not fit their dtype."""
    exact, rough = np.asarray(totals), np.asarray(estimates, np.float64)
    return rough[np.abs(exact.astype(np.float64) - rough) > 2.0 ** (8 * exact.itemsize - 2)]


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
