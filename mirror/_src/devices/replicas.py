"""The devices of the replicas, their mesh, and the layout of arrays on them."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mirror._src.base.types import MOST_REPLICAS, REPLICA_AXIS, Array, num_bytes
from mirror._src.devices.backend import names, type_of
from mirror._src.devices.described import topology_of
from mirror._src.devices.transfer import (
    NoMesh,
    UnstackedArrays,
    as_weak,
    host_copy,
    is_remote,
    is_tracing,
    local_copy,
    move,
)


class Kind(NamedTuple):
    """Layout of an array on the replicas.

    Attributes:
        is_own: Whether the array is per-replica: row r of a stacked array belongs to replica r.
        axis: Axis along which a mirrored array is sharded; each replica's device stores one slice.
            None means that each device stores the whole array.
    """

    is_own: bool = False
    axis: int | None = None


def shard_axis(shape: Sequence[int], num_replicas: int) -> int | None:
    """Returns the axis to shard an array along; `None` if no axis is divisible.

    It depends on the shape only, so that all programs store an array in the same slices. The first
    axis of three or more may number the layers that a loop goes through, row by row, or the rows of
    a convolution's kernel: it is the last choice.
    """
    start = 1 if len(shape) > 2 else 0
    axes = (*range(start, len(shape)), *range(start)) if 0 not in shape else ()
    return next((d for d in axes if shape[d] % num_replicas == 0), None)


def stored_axis(aval: Any, num_replicas: int, min_bytes: float) -> int | None:
    """Returns the axis along which state of this type is stored in slices; `None` if it is whole.

    Args:
        aval: Shape and dtype.
        num_replicas: Number of replicas.
        min_bytes: Size from which arrays are stored in slices.
    """
    if math.isinf(min_bytes) or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return None
    return shard_axis(aval.shape, num_replicas) if num_bytes(aval) >= min_bytes else None


class ReplicaDevices:
    """The devices of the replicas, and their mesh with the replica axis.

    JAX cannot create a mesh over devices of several types. In that case, a mirrored array is stored
    on one device, its home, and copied to the others when a step runs; per-replica values are
    `UnstackedArrays`.

    Args:
        devices: Devices in replica order. Several replicas may share a device; every device must
            then run the same number of replicas, adjacent in the order.
        home: Device that stores mirrored arrays if the devices are of several types. Defaults to
            the first device.
        axis_name: Name of the replica axis.
        in_turn: Whether each device runs its replicas in turn, which gives the same bits on any
            number of devices.

    Attributes:
        devices: Device of each replica.
        distinct: Each device once.
        are_mixed: Whether the devices are of several types.
        mesh: One-axis mesh over the distinct devices; over the home device if they are mixed.
        mirrored: Sharding of a mirrored array: a whole copy on each device of the mesh.
        stacked: Sharding of a stacked array `(num_replicas, *shape)`: row r on replica r's device.
        spans_processes: Whether some of the devices belong to other processes.
        local_ids: The replicas on devices of this process.
        only_compile: Whether the devices exist only to compile for; see `described_gpus`.
        slice_bytes: Size from which mirrored state is stored in slices, one on each device.
            Infinite if only state that no operation reads whole is; `None` if nothing is.

    Raises:
        ValueError: If the devices run unequal numbers of replicas, or replicas that share a device
            are not adjacent.
    """

    def __init__(
        self,
        devices: tuple[jax.Device, ...],
        home: jax.Device | None = None,
        axis_name: str = REPLICA_AXIS,
        *,
        in_turn: bool = False,
    ) -> None:
        if len(devices) > MOST_REPLICAS:
            raise ValueError(
                f"A strategy has at most {MOST_REPLICAS} replicas, got {len(devices)}."
            )
        self.devices = devices
        self.in_turn = in_turn
        self.slice_bytes: float | None = None
        self.axis_name = axis_name
        self.distinct = tuple(dict.fromkeys(devices))
        self.replicas_per_device = len(devices) // len(self.distinct)
        major = tuple(d for d in self.distinct for _ in range(self.replicas_per_device))
        if major != devices:
            raise ValueError(
                f"The replicas are assigned to {names(devices)}. Every device must run the same "
                f"number of replicas, adjacent to each other, for example {names(major)}."
            )
        self.are_mixed = len(set(map(type_of, self.distinct))) > 1
        self.on_mesh = (home or self.distinct[0],) if self.are_mixed else self.distinct
        self.mesh = Mesh(np.asarray(self.on_mesh), (axis_name,), axis_types=(AxisType.Auto,))
        self.mirrored = NamedSharding(self.mesh, PartitionSpec())
        self.stacked = NamedSharding(self.mesh, PartitionSpec(axis_name))
        self.spans_processes = len({device.process_index for device in self.distinct}) > 1
        here = jax.process_index() if self.spans_processes else None
        ids = (i for i, d in enumerate(devices) if here is None or d.process_index == here)
        self.local_ids = tuple(ids)
        self.only_compile = any(map(topology_of, self.distinct))

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReplicaDevices":
        return self  # copies of a `DataParallel` use the same devices

    def __copy__(self) -> "ReplicaDevices":
        twin = object.__new__(ReplicaDevices)
        vars(twin).update(vars(self))
        return twin

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Cannot pickle a strategy, or a trainer or dataset that uses one: it refers to devices "
            "of this process. multiprocessing, joblib, Ray or workers of a data loader pickle what "
            "their function captures. Create it in the process that uses it, and pass arrays "
            "there: jax.device_get(nnx.state(trainer.model))."
        )

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def on_host(self) -> bool:
        """Whether the replicas communicate across host devices, which share one thread pool."""
        return self.on_cpus and len(self.on_mesh) > 1

    @property
    def on_cpus(self) -> bool:
        """Whether the replicas of a program are on host devices."""
        return type_of(self.devices[0]) == "CPU"

    @property
    def on_gpus(self) -> bool:
        """Whether the replicas of a program are on GPUs."""
        return type_of(self.devices[0]) == "GPU"

    @property
    def local_devices(self) -> tuple[jax.Device, ...]:
        """The devices of this process's replicas, each once."""
        return tuple(dict.fromkeys(self.devices[i] for i in self.local_ids))

    def is_mirrored(self, value: Array) -> bool:
        """Whether each device stores a whole copy of the array, in replica order."""
        sharding = value.sharding
        if sharding is self.mirrored or sharding == self.mirrored:
            return True
        return self._is_on_mesh(sharding) and sharding.is_equivalent_to(self.mirrored, value.ndim)

    def _is_on_mesh(self, sharding: Any) -> bool:
        """Whether the devices of a sharding are these, in replica order."""
        is_named = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
        return is_named and tuple(sharding.mesh.devices.flat) == self.on_mesh

    @functools.cached_property
    def _shardings(self) -> dict[Kind, NamedSharding]:
        return {Kind(): self.mirrored, Kind(is_own=True): self.stacked}

    def sharding(self, kind: Kind) -> NamedSharding:
        """Returns the sharding of arrays of this kind; always the same object."""
        sharding = self._shardings.get(kind)
        if sharding is None:
            assert kind.axis is not None
            spec = PartitionSpec(*[None] * kind.axis, self.axis_name)
            sharding = self._shardings.setdefault(kind, NamedSharding(self.mesh, spec))
        return sharding

    def array_type(self, aval: jax.ShapeDtypeStruct, kind: Kind) -> jax.ShapeDtypeStruct:
        """Returns the type of an array of this kind, given its type on one replica."""
        shape = (len(self), *aval.shape) if kind.is_own else aval.shape
        weak = aval.weak_type
        return jax.ShapeDtypeStruct(shape, aval.dtype, sharding=self.sharding(kind), weak_type=weak)

    def is_sharded(self, value: Array) -> bool:
        """Whether each device stores one slice of the array, in replica order."""
        sharding: Any = value.sharding
        if not self._is_on_mesh(sharding):
            return False
        names = [name for name in sharding.spec if name is not None]
        return names in ([self.axis_name], [(self.axis_name,)])

    def shard(self, value: Any, axis: int) -> Array:
        """Returns a copy sharded along `axis`: each device stores one slice."""
        assert not self.spans_processes  # no executor shards there
        return jax.device_put(host_copy(value), self.sharding(Kind(axis=axis)))

    def store(self, value: Array | np.ndarray | np.generic | float) -> Array:
        """Returns a copy of state that shares no buffer with `value`: mirrored, or in slices."""
        axis = self.stored_axis(value)
        if axis is None:
            return self.mirror(value)
        if isinstance(value, jax.Array) and self.is_sharded(value):
            return self.copy(value)
        return self.shard(value, axis)

    def is_placed(self, value: Array) -> bool:
        """Whether state is where `store`, or a program with slices, would put it."""
        if self.slice_bytes is not None and self.is_sharded(value):
            return True
        return self.stored_axis(value) is None and self.is_mirrored(value)

    def stored_axis(self, value: Any) -> int | None:
        """Returns the axis along which state is stored in slices; `None` if it is whole."""
        if self.slice_bytes is None:
            return None
        return stored_axis(jax.typeof(value), len(self), self.slice_bytes)

    def copy(self, value: Array) -> Array:
        """Returns a copy with the same layout, mirrored or sharded, that shares no buffer."""
        if self.is_sharded(value) and not self.spans_processes:
            return jax.device_put(jnp.copy(value), value.sharding)
        return self.mirror(value)

    def mirror(self, value: Array | np.ndarray | np.generic | float) -> Array:
        """Returns a mirrored copy that shares no buffer with `value`, so that it may be donated.

        `jax.device_put` reuses the buffer on the source's device, even with `may_alias=False` (JAX
        0.10.2, 0.12.0.1): donating the result would delete the user's array. It is therefore copied
        once more.
        """
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            if self.spans_processes and self.is_mirrored(value):
                return jnp.copy(value)
            value = local_copy(value)
        if self.spans_processes:
            return self._mirror_here(value)
        if isinstance(value, jax.Array):
            if self.on_host and self.is_sharded(value):
                # Through host memory: otherwise JAX launches an all-gather for each array, which
                # bypasses the launch guard.
                return jax.device_put(np.array(value), self.mirrored)
            return jnp.copy(jax.device_put(value, self.mirrored))
        return jax.device_put(host_copy(value), self.mirrored)

    def weaken(self, value: Array) -> Array:
        """Returns a weakly typed copy with the same layout."""
        with NoMesh():
            return jax.jit(as_weak, out_shardings=value.sharding)(value)

    def input(self, value: Array | np.ndarray, kind: Kind) -> Any:
        """Returns a mirrored or stacked array, or its type if the devices only compile.

        JAX 0.10.2 ends the process by a segmentation fault if an array is placed on devices that
        exist only to compile for.
        """
        if self.only_compile:
            aval = jax.typeof(value)
            sharding, weak = self.sharding(kind), aval.weak_type
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)
        return self.stack(value) if kind.is_own else self.mirror(value)

    def broadcast(self, value: Array | np.ndarray) -> Array:
        """Returns a mirrored array that may share memory with `value`: do not modify either."""
        if self.spans_processes or (isinstance(value, jax.Array) and is_remote(value)):
            return self.mirror(value)
        return jax.device_put(value, self.mirrored)

    def borrow(self, tree: Any, sharding: NamedSharding) -> Any:
        """Returns arrays that may share memory with the host arrays of a tree: modify neither."""
        assert not self.spans_processes
        return jax.device_put(tree, sharding)

    def broadcast_through_host(self, array: Array) -> Array:
        """Returns a mirrored array, copied through the host: GPUs may lack peer-to-peer access."""
        if type_of(self.on_mesh[0]) == "CPU":  # already in host memory
            return self.broadcast(array)
        if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return self.broadcast(np.asarray(array))
        with NoMesh():
            bits = np.asarray(jax.random.key_data(array))
        return jax.random.wrap_key_data(self.broadcast(bits), impl=jax.random.key_impl(array))

    def split(self, leaves: Sequence[Array | np.ndarray]) -> list[Any]:
        """Splits global arrays along their first axis, over the distinct devices.

        An array whose first axis does not divide is mirrored instead. With one device, a compiled
        function moves host arrays there.
        """
        assert not self.spans_processes
        arrays = list(map(host_copy, leaves))
        count = len(self.on_mesh)
        if count == 1:
            home = set(self.on_mesh)
            is_away = lambda leaf: isinstance(leaf, jax.Array) and leaf.devices() != home  # noqa: E731
            return [jax.device_put(x, self.mirrored) if is_away(x) else x for x in arrays]
        layouts = [
            self.stacked if leaf.ndim and leaf.shape[0] % count == 0 else self.mirrored
            for leaf in arrays
        ]
        return list(jax.device_put(arrays, layouts))

    def stack(self, value: Array | np.ndarray) -> Array | UnstackedArrays:
        """Splits `(num_replicas, *shape)` along the first axis: one row per replica's device.

        A host array is copied, and split on the host.
        """
        array = host_copy(value)
        # In a trace, arrays are only types.
        if isinstance(array, np.ndarray) and not self.are_mixed and not is_tracing():
            return self._stack_rows(array.shape, array.__getitem__)
        if self.spans_processes:
            return self._stack_here(array)
        if self.are_mixed:
            return UnstackedArrays(list(map(move, array, self.devices)))
        rows = jax.device_put(array, self.stacked)
        # JAX reuses the buffers of rows that are already in place, and they may be donated.
        is_in_place = isinstance(array, jax.Array) and array.sharding.is_equivalent_to(
            self.stacked, array.ndim
        )
        return jnp.copy(rows) if is_in_place else rows

    def stack_local(self, rows: np.ndarray) -> Array:
        """Returns a stacked array, of which this process has the rows of its own replicas."""
        rows, count = host_copy(rows), self.replicas_per_device
        starts = {id_: i * count for i, id_ in enumerate(self.local_ids[::count])}

        def of_device(index: tuple[slice, ...]) -> np.ndarray:
            start = starts[index[0].start or 0]
            return rows[start : start + count]

        return self._stack_rows((len(self), *rows.shape[1:]), of_device)

    def _stack_rows(self, shape: tuple[int, ...], rows: Callable[[Any], np.ndarray]) -> Array:
        """Stacks host rows that do not change, in a third to half of the time of `device_put`."""
        return jax.make_array_from_callback(shape, self.stacked, rows)

    def _mirror_here(self, value: Array | np.ndarray | np.generic | float) -> Array:
        """Mirrors a value that every process has: each copies it to its own devices.

        `jax.device_put` would compare the values of all processes by a collective for each array
        (JAX 0.10.2, 0.12.0.1). That is slow, it bypasses the launch guard, and it hangs if one
        process has no such array to place.
        """
        is_weak = jax.typeof(value).weak_type  # which joined arrays lose
        joined = self._join(self.mirrored, np.shape(value), [value] * len(self.local_devices))
        return self.weaken(joined) if is_weak else joined

    def _stack_here(self, array: Array | np.ndarray) -> Array:
        """Stacks rows that every process has: each copies its own rows to its devices."""
        if isinstance(array, jax.Array) and is_remote(array):
            if array.sharding.is_equivalent_to(self.stacked, array.ndim):
                return jnp.copy(array)
            array = local_copy(array)
        ids, count = self.local_ids, self.replicas_per_device
        with NoMesh():
            pieces = [array[i : i + count] for i in ids[::count]]
        return self._join(self.stacked, array.shape, pieces)

    def _join(
        self, sharding: NamedSharding, shape: tuple[int, ...], pieces: Sequence[Any]
    ) -> Array:
        """Returns a global array of which each local device stores a copy of one of the pieces."""
        with NoMesh():
            shards = [
                # Copies, because two devices, or the caller, might share the memory.
                move(jnp.copy(piece) if isinstance(piece, jax.Array) else np.array(piece), device)
                for piece, device in zip(pieces, self.local_devices, strict=True)
            ]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def from_rows(self, rows: Sequence[Array]) -> Array:
        """Joins rows `(1, *shape)` on the replicas' devices into a stacked array without a copy."""
        shape = (len(rows), *rows[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.stacked, list(rows))
