"""The devices of the replicas, their mesh, and how arrays are laid out on them."""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mirror._src.devices.backend import names, type_of
from mirror._src.devices.transfer import NoMesh, move
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.utils.types import REPLICA_AXIS, Array


class Kind(NamedTuple):
    """How the replicas hold an array.

    Attributes:
        is_own: Whether each replica has its own; they are the rows of a stacked array.
        axis: The axis along which a mirrored array is sharded: each replica's device stores one
            slice. `None`: each stores all of it.
    """

    is_own: bool = False
    axis: int | None = None

    @classmethod
    def of(cls, per_replica: Iterable[bool]) -> "list[Kind]":
        """Kinds of which none is sharded."""
        return [cls(is_own) for is_own in per_replica]


class ReplicaDevices:
    """The device of each replica, and the mesh of those devices, with the replica axis.

    Devices of several types have no mesh in common. Then a mirrored array lies on one device, its
    home, and is copied to the others when a step runs; per-replica values are `UnstackedArrays`.

    Args:
        devices: in replica order. Several replicas may share a device: equally many on each, and
            those of one device next to each other.
        home: where mirrored arrays lie if the devices are of several types; `None`: on the first.
        axis_name: The name of the replica axis.

    Attributes:
        devices: the same.
        distinct: each device once.
        are_mixed: whether they are of several types.
        mesh: the one-axis mesh over the distinct devices; over the home where they are mixed.
        mirrored: sharding of a mirrored array: a whole copy on each device of the mesh.
        stacked: sharding of a stacked array `(num_replicas, *shape)`: row r on replica r's device.

    Raises:
        ValueError: the devices carry unequal numbers of replicas, or the order mixes them.
    """

    def __init__(
        self,
        devices: tuple[jax.Device, ...],
        home: jax.Device | None = None,
        axis_name: str = REPLICA_AXIS,
    ) -> None:
        self.devices = devices
        self.axis_name = axis_name
        self.distinct = tuple(dict.fromkeys(devices))
        self.replicas_per_device = len(devices) // len(self.distinct)
        major = tuple(d for d in self.distinct for _ in range(self.replicas_per_device))
        if major != devices:
            raise ValueError(
                f"The replicas lie on {names(devices)}. Each device must carry equally many, next "
                f"to each other: as {names(major)}, say."
            )
        self.are_mixed = len(set(map(type_of, self.distinct))) > 1
        self.on_mesh = (home or self.distinct[0],) if self.are_mixed else self.distinct
        self.mesh = Mesh(np.asarray(self.on_mesh), (axis_name,), axis_types=(AxisType.Auto,))
        self.mirrored = NamedSharding(self.mesh, PartitionSpec())
        self.stacked = NamedSharding(self.mesh, PartitionSpec(axis_name))

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def on_host(self) -> bool:
        """Whether they communicate across several host devices, which share one thread pool."""
        return type_of(self.devices[0]) == "CPU" and len(self.on_mesh) > 1

    def is_mirrored(self, value: Array) -> bool:
        """Whether the array already has a whole copy on each of the devices, in replica order."""
        sharding = value.sharding
        if sharding is self.mirrored or sharding == self.mirrored:
            return True
        return (
            isinstance(sharding, NamedSharding)
            and isinstance(sharding.mesh, Mesh)
            and tuple(sharding.mesh.devices.flat) == self.on_mesh
            and sharding.is_equivalent_to(self.mirrored, value.ndim)
        )

    @functools.cached_property
    def _shardings(self) -> dict[Kind, NamedSharding]:
        return {Kind(): self.mirrored, Kind(is_own=True): self.stacked}

    def sharding(self, kind: Kind) -> NamedSharding:
        """The sharding of arrays of this kind, the same object each time."""
        known = self._shardings.get(kind)
        if known is None:
            assert kind.axis is not None
            spec = PartitionSpec(*[None] * kind.axis, self.axis_name)
            known = self._shardings.setdefault(kind, NamedSharding(self.mesh, spec))
        return known

    def is_sharded(self, value: Array) -> bool:
        """Whether each of the devices stores one slice of the array, in replica order."""
        sharding = value.sharding
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            return False
        axes = [axis for axis, name in enumerate(sharding.spec) if name is not None]
        return (
            len(axes) == 1
            and sharding.spec[axes[0]] in (self.axis_name, (self.axis_name,))
            and tuple(sharding.mesh.devices.flat) == self.on_mesh
        )

    def shard(self, value: Array, axis: int) -> Array:
        """A copy of which each device stores one slice."""
        return jax.device_put(value, self.sharding(Kind(axis=axis)))

    def copy(self, value: Array) -> Array:
        """A copy that lies as the value does, mirrored or sharded, and shares no buffer with it."""
        if self.is_sharded(value):
            return jax.device_put(jnp.copy(value), value.sharding)
        return self.mirror(value)

    def mirror(self, value: Array | np.ndarray | np.generic | float) -> Array:
        """A mirrored copy that shares no buffer with `value`, so that it may be donated.

        `jax.device_put` keeps the source's buffer on its own device, also with `may_alias=False`
        (JAX 0.10.2, 0.12.0.1): donating such a copy would delete the user's array. So it is
        copied once more.
        """
        if isinstance(value, jax.Array):
            if self.on_host and self.is_sharded(value):
                # Through the host's memory: JAX would launch an all-gather for each array, which
                # the launch guard does not know of.
                return jax.device_put(np.array(value), self.mirrored)
            return jnp.copy(jax.device_put(value, self.mirrored))
        if isinstance(value, np.ndarray):
            value = value.copy()
        return jax.device_put(value, self.mirrored)

    def broadcast(self, value: Array | np.ndarray) -> Array:
        """A mirrored array that may share memory with `value`, which nobody must change then."""
        return jax.device_put(value, self.mirrored)

    def broadcast_through_host(self, array: Array) -> Array:
        """A mirrored array of one device's: not every GPU can write into another's memory."""
        if type_of(self.on_mesh[0]) == "CPU":  # their memory is the host's
            return self.broadcast(array)
        if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return self.broadcast(np.asarray(array))
        with NoMesh():
            bits = np.asarray(jax.random.key_data(array))
        return jax.random.wrap_key_data(self.broadcast(bits), impl=jax.random.key_impl(array))

    def stack(self, value: Array | np.ndarray) -> Array | UnstackedArrays:
        """Lays the rows of `(num_replicas, *shape)` onto the replicas' devices, one row each.

        A host array is cut on the host and each row goes to its own device. It is copied first: a
        data loader may fill the same buffer again while the transfer is still under way.
        """
        fresh = value if isinstance(value, jax.Array) else np.array(value)
        if self.are_mixed:
            return UnstackedArrays(list(map(move, fresh, self.devices)))
        rows = jax.device_put(fresh, self.stacked)
        # JAX keeps the buffers of rows that are there already, and they may be donated.
        is_there = isinstance(fresh, jax.Array) and fresh.sharding.is_equivalent_to(
            self.stacked, fresh.ndim
        )
        return jnp.copy(rows) if is_there else rows

    def from_rows(self, rows: Sequence[Array]) -> Array:
        """The stacked array of rows `(1, *shape)` that lie on the replicas' devices. No copies."""
        shape = (len(rows), *rows[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.stacked, list(rows))

    def from_copies(self, copies: Sequence[Array]) -> Array:
        """The mirrored array of copies that lie on the mesh's devices, in order. No copies more."""
        shape = copies[0].shape
        return jax.make_array_from_single_device_arrays(shape, self.mirrored, list(copies))
