"""`Lane`: devices of one type that run a stage as one program, and how values get onto them."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import NoMesh, copies_of, with_axis
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.executors.pmap import PmapExecutor
from mirror._src.utils.types import Array
from mirror._src.values.per_replica import rows_on_devices


class Lane:
    """Replicas that run a stage as one program.

    Attributes:
        ids: which replicas.
        replicas: their devices.
        is_all: whether those are all replicas.
    """

    def __init__(self, ids: tuple[int, ...], every: ReplicaDevices) -> None:
        self.ids = ids
        own = tuple(every.devices[i] for i in ids)
        self.replicas = ReplicaDevices(own, axis_name=every.axis_name)
        self.executor = PmapExecutor(self.replicas, collectives=False)
        self.is_all = len(ids) == len(every)
        self.replica_ids = self.replicas.stack(np.asarray(ids, np.int32))
        self._same_mesh = self.replicas.mesh == every.mesh

    def on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """Its own mesh, which `jax.pmap` demands; `run` has set that of all replicas."""
        return contextlib.nullcontext() if self._same_mesh else jax.set_mesh(self.replicas.mesh)

    def takes(self, leaves: Sequence[Any], per_replica: Sequence[bool]) -> list[Any]:
        """Its part of what lies on all devices."""
        if self.is_all and self._same_mesh:
            return list(leaves)
        return [
            self._rows(leaf) if differs else self.copies(leaf)
            for leaf, differs in zip(leaves, per_replica, strict=True)
        ]

    def copies(self, leaf: Array) -> Array:
        """A mirrored array on its devices, made of what lies there already, if it does."""
        if self.replicas.is_mirrored(leaf):
            return leaf
        there = copies_of(leaf) if leaf.sharding.is_fully_replicated else {}
        if any(device not in there for device in self.replicas.devices):
            return self.replicas.broadcast(leaf)
        return self.replicas.from_copies([there[device] for device in self.replicas.devices])

    def copied(self, array: Array) -> Array:
        """A mirrored copy on its devices, which shares no memory with the array."""
        with NoMesh():
            return self.replicas.mirror(array)

    def _rows(self, leaf: Any) -> Array:
        if isinstance(leaf, UnstackedArrays):
            own = [leaf.arrays[i] for i in self.ids]
            rows = list(map(with_axis, own, self.replicas.devices))
            return self.replicas.from_rows(rows)
        every = rows_on_devices(leaf)
        assert every is not None  # `run` has put it there
        return self.replicas.from_rows([every[i] for i in self.ids])

    def broadcast(self, value: Any) -> Array:
        """A mirrored array of a host array, or of one on another device."""
        if isinstance(value, np.ndarray):  # a third of the time of `jax.device_put`
            return jax.make_array_from_callback(
                value.shape, self.replicas.mirrored, lambda _: value
            )
        return self.replicas.broadcast(value)

    def scatter(self, values: Sequence[Any]) -> Any:
        """The rows of its replicas, of all replicas' values."""
        return self.replicas.stack(np.stack([values[i] for i in self.ids]))

    def rows_of(self, rows: Array) -> dict[int, Array]:
        """The row `(1, *shape)` of each of its replicas."""
        return {replica: self.row(rows, place) for place, replica in enumerate(self.ids)}

    def row(self, rows: Array, place: int) -> Array:
        """The row `(1, *shape)` of its replica at a place."""
        return rows.addressable_data(place)  # they lie in the order of the mesh
