"""Arrays on their way between single devices: moving them, and looking at where they lie."""

import contextlib
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.devices.op_log import unlogged
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.utils.types import Array

_is_deleted = operator.methodcaller("is_deleted")


def with_axis(row: Array | np.ndarray, device: jax.Device) -> Array:
    """A replica's array as a row `(1, *shape)` on its device."""
    with NoMesh():
        return move(row, device)[None]


def without_axis(row: Array) -> Array:
    """A row `(1, *shape)` as a replica's array, on the same device."""
    with NoMesh():
        return row.reshape(row.shape[1:])


class NoMesh:
    """Lets one device's array be computed with: a mesh that is set would refuse it.

    No generator: one that an interrupt leaves suspended sets the old mesh again when it is closed,
    whenever that is.
    """

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        if not jax.sharding.get_abstract_mesh().empty:
            self._stack.enter_context(unlogged())
            self._stack.enter_context(jax.set_mesh(None))

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def is_tracing() -> bool:
    """Whether JAX traces a function here and now: it sets no mesh then."""
    try:
        with unlogged(), jax.set_mesh(None):
            return False
    except ValueError:
        return True


def copies_of(array: Array) -> dict[jax.Device, Array]:
    """What of an array lies on each device."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def move(array: Array | np.ndarray, device: jax.Device) -> Array:
    """The array on one device, and bound to it. Differentiable."""
    return jax.device_put(array, device)


def place_like(array: Array | np.ndarray, like: Array | np.ndarray) -> Array:
    """The array where another one lies; anywhere, if that is on the host."""
    if isinstance(like, jax.Array):
        return jax.device_put(array, like.sharding)
    return jnp.asarray(array)


def any_deleted(arrays: Sequence[Array]) -> bool:
    """Whether one of them has been deleted: launching it would end JAX 0.10.2."""
    try:  # a third of the time, where all have the type of the first
        return bool(arrays) and any(map(type(arrays[0]).is_deleted, arrays))
    except (TypeError, AttributeError):  # random keys beside other arrays
        return any(map(_is_deleted, arrays))


def buffers_of(array: Array | UnstackedArrays) -> set[int]:
    """Addresses of the array's memory: two arrays share one only if they share memory.

    Waits until the array is there.
    """
    if isinstance(array, UnstackedArrays):
        parts = [part for part in array.arrays if isinstance(part, jax.Array)]
        return set().union(*map(buffers_of, parts))
    if array.size == 0:
        return {id(array)}
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        with NoMesh(), unlogged():
            array = jax.random.key_data(array)  # the very array that holds its bits
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
