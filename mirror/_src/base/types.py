"""Types of arrays and trees, the name of the replica axis, and dtypes that JAX restricts."""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np

Array: TypeAlias = jax.Array
ArrayLike: TypeAlias = jax.typing.ArrayLike
PyTree: TypeAlias = Any
Shard: TypeAlias = Literal["none", "optimizer", "model", "auto"]
StepFunction: TypeAlias = Callable[..., Any]

K = TypeVar("K")
A = TypeVar("A", bound=np.ndarray | jax.Array)


@final
class Unknown:
    """Type of batches that type checkers know nothing about: only `Any` is assignable to it."""


ARRAY_LIKE = (jax.Array, np.ndarray, np.generic, int, float, complex)
"""Types of arrays and numbers, for `isinstance`. A bool is an int."""

REPLICA_AXIS = "replica"
"""Name of the replica axis: `jax.lax.pmean(x, mirror.REPLICA_AXIS)` works inside `run`."""

MOST_REPLICAS = 4096
"""The largest number of replicas, and of devices: to create a strategy then takes seconds."""


def is_numeric(dtype: Any) -> bool:
    """Whether JAX supports arrays of this dtype: booleans and numbers, including small floats."""
    return dtype == np.bool_ or (jnp.issubdtype(dtype, jnp.number) and not is_long(dtype))


def is_long(dtype: Any) -> bool:
    """Whether this is `np.longdouble` or its complex dtype, where these have more than 64 bits."""
    # By its type: the character "G" is also one of float8_e4m3fnuz.
    is_one = np.dtype(dtype) in (np.longdouble, np.clongdouble)
    return is_one and dtype not in (np.float64, np.complex128)


def needs_64_bits(dtype: Any) -> bool:
    """Whether JAX, as it is configured, would cut numbers of this dtype to 32 bits."""
    return is_numeric(dtype) and jax.dtypes.canonicalize_dtype(dtype) != dtype


def is_half(dtype: Any) -> bool:
    """Whether a dtype is bfloat16, float16 or a smaller float."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


def accumulator(dtype: Any) -> Any:
    """Returns the dtype to sum in: float32 for half precision, which overflows and loses digits."""
    return jnp.float32 if is_half(dtype) else dtype


def widened(array: Any) -> Any:
    """Returns an array in the dtype to sum in."""
    return array.astype(accumulator(array.dtype))


def long_fix(leaf: Any, otherwise: str) -> str:
    """Returns the line that converts a host array of long doubles, or another text."""
    if not isinstance(leaf, np.ndarray | np.generic) or not is_long(leaf.dtype):
        return otherwise
    return f"Convert it: x.astype('{'complex64' if leaf.dtype.kind == 'c' else 'float32'}')."


def is_float0(leaf: Any) -> bool:
    """Whether the leaf has the dtype float0, which JAX uses for gradients of integers."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def num_bytes(aval: Any) -> int:
    """Returns the size of an array of this shape and dtype."""
    return int(math.prod(aval.shape) * aval.dtype.itemsize)


def keys_like(bits: Any, like: Any) -> Any:
    """Returns PRNG keys with this key data, of the implementation of other keys, or of a type."""
    # JAX tells the implementation of an array alone, also of a traced one.
    impls: list[Any] = []
    struct = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), struct)
    return jax.random.wrap_key_data(bits, impl=impls[0])
