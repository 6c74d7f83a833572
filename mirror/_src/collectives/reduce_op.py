"""`ReduceOp`, and the dtypes in which values are reduced and returned."""

import enum
from typing import Any

import jax
import jax.numpy as jnp

from mirror._src.utils.modules import set_module
from mirror._src.utils.types import Array


@set_module("mirror")
class ReduceOp(enum.Enum):
    """How the replicas' values become one.

    >>> ReduceOp.canonicalize("mean")
    <ReduceOp.MEAN: 'mean'>
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"

    @classmethod
    def canonicalize(cls, op: "ReduceOp | str") -> "ReduceOp":
        """The op that is meant by an op or its name, in capitals or not.

        Raises:
            ValueError: a string that names no op.
            TypeError: neither a string nor a `ReduceOp`.
        """
        if isinstance(op, cls):
            return op
        known = ", ".join(repr(member.value) for member in cls)
        if not isinstance(op, str):
            raise TypeError(f"op={op!r} ({type(op).__name__}) is no reduction. Pass {known}.")
        try:
            return cls(op.lower())
        except ValueError:
            raise ValueError(f"op={op!r} is no reduction. Pass one of {known}.") from None


def prepare(op: ReduceOp, leaf: Array) -> Array:
    """The leaf in the dtype in which it is reduced, which is that of the result."""
    leaf = jnp.asarray(leaf)
    dtype = result_dtype(op, leaf.dtype)
    return leaf if dtype == leaf.dtype else leaf.astype(dtype)


def result_dtype(op: ReduceOp, dtype: Any) -> Any:
    """The dtype of what a leaf of that dtype is reduced to.

    Raises:
        TypeError: it cannot be reduced.
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            "A PRNG key cannot be reduced. Draw with it first, or reduce jax.random.key_data(key)."
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX) and jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{op.value!r} of {dtype}: complex numbers have no order. Reduce abs(x), or real and "
            "imaginary parts."
        )
    exact = jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_
    if op is ReduceOp.MEAN and exact:
        return jnp.dtype(jnp.float32)
    if op is ReduceOp.SUM and dtype == jnp.bool_:
        return jnp.dtype(jnp.int32)
    return dtype


def accumulator(dtype: Any) -> Any:
    """The dtype in which a mean is summed up: half precision would overflow, or lose."""
    half = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.float32 if half else dtype
