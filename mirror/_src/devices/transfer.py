"""Moves arrays between the host and devices, and inspects their buffers.

Without `jax_enable_x64`, JAX converts host arrays of 64 bits as it transfers them, and integers
lose their upper bits without a warning: the label `2**32 + 3` becomes 3. Floats are rounded. So
integers that do not fit are rejected.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import describe
from mirror._src.base.types import Array
from mirror._src.devices.op_log import unlogged


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


ENABLE_64_BITS = "jax.config.update('jax_enable_x64', True)"


def require_fits(name: str | Callable[[], str], leaf: Any) -> None:
    """Checks an array of the user before its transfer; reads only arrays of 64-bit integers.

    Args:
        name: Name of the array for the message, or a function that returns it.
        leaf: A NumPy or JAX array, `UnstackedArrays` or a number; anything else is ignored.

    Raises:
        ValueError: If an integer would change.
    """
    if isinstance(leaf, UnstackedArrays):
        for each in leaf.arrays:
            require_fits(name, each)
        return
    array = np.asarray(leaf) if type(leaf) is int else leaf
    if type(leaf) is int and array.dtype == object:  # beyond 64 bits
        raise _does_not_fit(name, leaf, leaf, jax.dtypes.canonicalize_dtype(int))
    is_array = isinstance(array, np.ndarray | np.generic | jax.Array)
    if not is_array or array.dtype not in (np.int64, np.uint64):
        return
    narrow = jax.dtypes.canonicalize_dtype(array.dtype)
    if narrow == array.dtype or isinstance(array, jax.core.Tracer) or not array.size:
        return
    values, limits = np.asarray(array), np.iinfo(narrow)
    for value in (values.max(), values.min()):
        if not limits.min <= value <= limits.max:
            raise _does_not_fit(name, leaf, int(value), narrow)


def _does_not_fit(name: str | Callable[[], str], leaf: Any, value: int, dtype: Any) -> ValueError:
    """Returns the error for an integer that does not fit a dtype of 32 bits."""
    name = name if isinstance(name, str) else name()
    contains = "" if isinstance(leaf, int) else f" and contains {value}"
    return ValueError(
        f"{name} is {describe(leaf)}{contains}, which does not fit {dtype}, JAX's default for it. "
        f"Use smaller integers or a float, or enable 64-bit types: {ENABLE_64_BITS}."
    )


def host_copy(value: Any) -> Any:
    """Returns an array of NumPy as a copy, and anything else unchanged.

    JAX reads it after it returns (0.10.2, 0.12.0.1), also in `jnp.array`, or uses its memory: its
    owner may refill it.
    """
    return value.copy() if isinstance(value, np.ndarray) else value


def as_weak(value: Any) -> Array:
    """Returns an array with a weak type, and the same bits, if numbers of Python have its dtype.

    JAX has no function for it, but an update keeps the weak type of the array that it updates.
    """
    weak = jnp.full(value.shape, np.zeros((), value.dtype).item())
    return weak.at[...].set(value) if weak.dtype == value.dtype else value


def with_axis(row: Array | np.ndarray, device: jax.Device) -> Array:
    """Returns a replica's array as a row `(1, *shape)` on its device."""
    with NoMesh():
        return move(row, device)[None]


def without_axis(row: Array) -> Array:
    """Returns a row `(1, *shape)` as a replica's array, on the same device."""
    with NoMesh():
        return row.reshape(row.shape[1:])


class NoMesh:
    """Context manager that unsets the mesh, under which JAX rejects single-device arrays.

    A class instead of a generator: a generator that an interrupt leaves suspended would restore the
    old mesh whenever it is garbage-collected.
    """

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        if not jax.sharding.get_abstract_mesh().empty:
            self._stack.enter_context(unlogged())
            self._stack.enter_context(jax.set_mesh(None))

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def is_tracing() -> bool:
    """Whether JAX is tracing a function in this thread; `jax.set_mesh` then raises."""
    try:
        with unlogged(), jax.set_mesh(None):
            return False
    except ValueError:
        return True


def copies_of(array: Array) -> dict[jax.Device, Array]:
    """Returns the shard of the array that each device stores."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def is_remote(array: Array) -> bool:
    """Whether other processes store a part of the array, or copies of it."""
    return not array.is_fully_addressable


def local_copy(array: Array) -> Array:
    """Returns this process's copy of an array that is mirrored over several processes.

    Raises:
        ValueError: If no device stores the whole array.
    """
    if array.is_fully_addressable:
        return array
    if not array.is_fully_replicated:
        raise ValueError(
            f"An array of shape {array.shape} is split across processes, so that no process has "
            "all of it. Pass the PerReplica itself to strategy.run, or join its values on every "
            "process: strategy.gather(x)."
        )
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array.addressable_data(0)
    with NoMesh(), unlogged():
        bits = jax.random.key_data(array).addressable_data(0)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(array))


def move(array: Array | np.ndarray, device: jax.Device) -> Array:
    """Copies the array to one device and commits it there. Differentiable."""
    return jax.device_put(array, device)


def copied(array: Array | np.ndarray, device: jax.Device | None = None) -> Array:
    """Copies an array of NumPy to a device, the default one unless it is given."""
    return jax.device_put(array, device, may_alias=False)


def host_view(array: Array) -> Array | np.ndarray:
    """Returns an array on one host device as one of NumPy, without a copy, and others unchanged.

    Its owner may refill memory that it shares by DLPack, as the memory of an array of NumPy.
    """
    if isinstance(array, jax.core.Tracer) or array.is_deleted():
        return array
    is_on_host = [each.platform for each in array.devices()] == ["cpu"]
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(array) if is_on_host and not is_key else array


def place_like(array: Array | np.ndarray, like: Array | np.ndarray) -> Array:
    """Moves the array to the devices of `like`; to the default device if `like` is on the host.

    Every process copies a value that it has to its own devices: `jax.device_put` would compare the
    values of all processes by a collective, outside the launch guard (JAX 0.10.2, 0.12.0.1).
    """
    if isinstance(like, jax.core.Tracer) or not isinstance(like, jax.Array):
        return jnp.asarray(array)
    if is_remote(like):
        if isinstance(array, jax.Array) and is_remote(array):
            if array.sharding.is_equivalent_to(like.sharding, array.ndim):
                return array
            array = local_copy(array)
        places = like.sharding.addressable_devices_indices_map(array.shape)
        with NoMesh():
            shards = [move(array[index], device) for device, index in places.items()]
        return jax.make_array_from_single_device_arrays(array.shape, like.sharding, shards)
    return jax.device_put(array, like.sharding)


def any_deleted(arrays: Sequence[Array]) -> bool:
    """Whether an array has been deleted; launching a program on it would crash JAX 0.10.2."""
    try:  # takes a third of the time, if all arrays have the same type
        return bool(arrays) and any(map(type(arrays[0]).is_deleted, arrays))
    except (TypeError, AttributeError):  # random keys among other arrays
        return any(array.is_deleted() for array in arrays)


def require_not_lost(name: str, arrays: Sequence[Array]) -> None:
    """Explains arrays that were donated to a launch in which JAX's check has found a NaN.

    JAX repeats the launch to find the operation. That needs the arrays, which a program donates if
    it was compiled while the check was off.

    Raises:
        FloatingPointError: If the check is on and an array has been deleted.
    """
    checks = {"jax_debug_nans": jax.debug_nans.value, "jax_debug_infs": jax.debug_infs.value}
    on = " and ".join(check for check, is_on in checks.items() if is_on)
    if on and any_deleted(arrays):
        raise FloatingPointError(
            f"{name} returned a NaN or an infinity, and JAX cannot repeat it to find the "
            f"operation: {name} was compiled before {on} was turned on, so that its arguments are "
            f"deleted. Turn it on before the first step: jax.config.update('{on.split()[0]}', "
            "True)."
        )


def buffers_of(array: Array | UnstackedArrays) -> set[int]:
    """Returns the addresses of the array's buffers; they differ unless arrays share memory.

    Waits until the array is ready.
    """
    if isinstance(array, UnstackedArrays):
        shards = [shard for shard in array.arrays if isinstance(shard, jax.Array)]
        return set().union(*map(buffers_of, shards))
    if array.size == 0:
        return {id(array)}
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        with NoMesh(), unlogged():
            array = jax.random.key_data(array)  # shares the buffer of the key array
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
