"""The devices of the replicas, and how a value gets there: the owner of `jax.device_put`."""

import operator
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mirror._types import REPLICA_AXIS, Array
from mirror.devices.backend import names, type_of

_is_deleted = operator.methodcaller("is_deleted")


class ReplicaDevices:
    """The device of each replica, and the mesh of those devices, with the replica axis.

    Args:
        devices: in replica order. Several replicas may share a device: equally many on each, and
            those of one device next to each other.

    Attributes:
        devices: the same.
        distinct: each device once.
        mesh: the one-axis mesh over the distinct devices.
        mirrored: sharding of a mirrored array: a whole copy on each device.
        stacked: sharding of a stacked array `(num_replicas, *shape)`: row r on replica r's device.

    Raises:
        ValueError: the devices carry unequal numbers of replicas, or the order mixes them.
    """

    def __init__(self, devices: tuple[jax.Device, ...]) -> None:
        self.devices = devices
        self.distinct = tuple(dict.fromkeys(devices))
        self.replicas_per_device = len(devices) // len(self.distinct)
        major = tuple(d for d in self.distinct for _ in range(self.replicas_per_device))
        if major != devices:
            raise ValueError(
                f"The replicas lie on {names(devices)}. Each device must carry equally many, next "
                f"to each other: as {names(major)}, say."
            )
        self.mesh = Mesh(np.asarray(self.distinct), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))
        self.mirrored = NamedSharding(self.mesh, PartitionSpec())
        self.stacked = NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def on_host(self) -> bool:
        """Whether they exchange among several host devices, which share one thread pool."""
        return type_of(self.devices[0]) == "CPU" and len(self.distinct) > 1

    def is_mirrored(self, value: Array) -> bool:
        """Whether the array already has a whole copy on each of the devices, in replica order."""
        sharding = value.sharding
        if sharding is self.mirrored or sharding == self.mirrored:
            return True
        return (
            isinstance(sharding, NamedSharding)
            and isinstance(sharding.mesh, Mesh)
            and tuple(sharding.mesh.devices.flat) == self.distinct
            and sharding.is_equivalent_to(self.mirrored, value.ndim)
        )

    def mirror(self, value: Array | np.ndarray | np.generic | float) -> Array:
        """A mirrored copy that shares no buffer with `value`, so that it may be donated.

        `jax.device_put` keeps the source's buffer on its own device, also with `may_alias=False`
        (JAX 0.10.2, 0.12.0.1): donating such a copy would delete the user's array. So it is
        copied once more.
        """
        if isinstance(value, jax.Array):
            return jnp.copy(jax.device_put(value, self.mirrored))
        if isinstance(value, np.ndarray):
            value = value.copy()
        return jax.device_put(value, self.mirrored)

    def stack(self, value: Array | np.ndarray) -> Array:
        """Lays the rows of `(num_replicas, *shape)` onto the replicas' devices, one row each.

        A host array is cut on the host and each row goes to its own device. It is copied first: a
        data loader may fill the same buffer again while the transfer is still under way.
        """
        fresh = value if isinstance(value, jax.Array) else np.array(value)
        return jax.device_put(fresh, self.stacked)


def move(array: Array, device: jax.Device) -> Array:
    """The array on one device, and bound to it. Differentiable."""
    return jax.device_put(array, device)


def any_deleted(arrays: Iterable[Array]) -> bool:
    """Whether one of them has been deleted: launching it would end JAX 0.10.2."""
    return any(map(_is_deleted, arrays))


def buffers_of(array: Array) -> set[int]:
    """Addresses of the array's memory: two arrays share one only if they share memory.

    Waits until the array is there.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) or array.size == 0:
        return {id(array)}
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
