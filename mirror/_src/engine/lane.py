"""`Lane`: replicas that run a stage as one program, and the transfer of values to their devices."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.types import Array
from mirror._src.devices.op_log import unlogged
from mirror._src.devices.replicas import Kind, ReplicaDevices
from mirror._src.devices.transfer import NoMesh, UnstackedArrays, copies_of, with_axis
from mirror._src.engine.executor import MeshExecutor, MeshProgram, ReplicaProgram
from mirror._src.engine.per_replica import rows_on_devices
from mirror._src.jaxprs.text import SMALL_INTEGERS
from mirror._src.jaxprs.trace import struct_of
from mirror._src.passes.lower import lowered, rules_for
from mirror._src.passes.program import Constant, Value
from mirror._src.passes.staged import StagedJaxpr

_SUB_BYTE = (*SMALL_INTEGERS, "float4_e2m1fn")


class Lane:
    """Replicas that run a stage as one program. Their devices are distinct and of one type.

    Attributes:
        ids: Indices of the replicas.
        replicas: Their devices.
    """

    def __init__(self, ids: tuple[int, ...], every: ReplicaDevices) -> None:
        self.ids = ids
        devices = tuple(every.devices[i] for i in ids)
        self.replicas = ReplicaDevices(devices, axis_name=every.axis_name)
        self.executor = MeshExecutor(self.replicas, collectives=False, replica_ids=ids)
        with unlogged():
            self.replica_ids = self.replicas.stack(np.asarray(ids, np.int32))
        self._same_mesh = self.replicas.mesh == every.mesh
        self._is_whole = self._same_mesh and len(ids) == len(every)

    def on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager for the lane's mesh, which `jax.pmap` requires in place of `run`'s."""
        return contextlib.nullcontext() if self._same_mesh else jax.set_mesh(self.replicas.mesh)

    def select(self, leaves: Sequence[Any], per_replica: Sequence[bool]) -> list[Any]:
        """Returns the lane's part of arrays on all devices."""
        if self._is_whole:
            return list(leaves)
        return [
            self._slices(leaf) if differs else self.mirrored(leaf)
            for leaf, differs in zip(leaves, per_replica, strict=True)
        ]

    def mirrored(self, leaf: Array) -> Array:
        """Returns a mirrored array on the lane's devices. Uses existing copies if there are any."""
        if self.replicas.is_mirrored(leaf):
            return leaf
        copies = copies_of(leaf) if leaf.sharding.is_fully_replicated else {}
        if any(device not in copies for device in self.replicas.devices):
            return self.replicas.broadcast(leaf)
        arrays = [copies[device] for device in self.replicas.devices]
        mirrored = self.replicas.mirrored
        return jax.make_array_from_single_device_arrays(leaf.shape, mirrored, arrays)

    def copy(self, array: Array) -> Array:
        """Returns a mirrored copy on the lane's devices that shares no memory with the array."""
        with NoMesh():
            return self.replicas.mirror(array)

    def _slices(self, leaf: Any) -> Array:
        if isinstance(leaf, UnstackedArrays):
            arrays = [leaf.arrays[i] for i in self.ids]
            return self.replicas.from_rows(list(map(with_axis, arrays, self.replicas.devices)))
        slices = rows_on_devices(leaf)
        assert slices is not None  # `run` has placed it
        return self.replicas.from_rows([slices[i] for i in self.ids])

    def broadcast(self, value: Any) -> Array:
        """Returns a mirrored array of a host array, or of an array on another device."""
        if isinstance(value, np.ndarray):  # takes a third of the time of `jax.device_put`
            return jax.make_array_from_callback(
                value.shape, self.replicas.mirrored, lambda _: value
            )
        return self.replicas.broadcast(value)

    def slices_of(self, stacked: Array) -> dict[int, Array]:
        """Returns the slice `(1, *shape)` of each of the lane's replicas."""
        return {replica: self.slice(stacked, place) for place, replica in enumerate(self.ids)}

    def slice(self, stacked: Array, place: int) -> Array:
        """Returns the slice `(1, *shape)` of the lane's replica at a position."""
        return stacked.addressable_data(place)  # in the order of the mesh


def compile_stage(
    lane: Lane,
    staged: StagedJaxpr,
    number: int,
    program: ReplicaProgram,
    donated: Sequence[int],
    *,
    keeps_all: bool,
) -> MeshProgram:
    """Returns the program of one stage on one lane. XLA compiles it when it first runs.

    Args:
        lane: The lane.
        staged: The staged program.
        number: Index of the stage.
        program: The whole program.
        donated: Positions of the program's inputs that its last stage may donate.
        keeps_all: Whether to return mirrored outputs, which otherwise come from another lane.
    """
    stage = staged.stages[number]
    is_last = number == len(staged.stages) - 1
    mirrored = staged.mirrored_outputs if is_last else [False] * len(stage.outputs)
    pairs = list(zip(stage.outputs, mirrored, strict=True))
    if not keeps_all:
        pairs = [(atom, is_mirrored) for atom, is_mirrored in pairs if not is_mirrored]

    def run(*leaves: Any) -> list[Any]:
        values: dict[Value, Any] = dict(zip(stage.inputs, leaves, strict=True))

        def read(atom: Any) -> Any:
            return atom.value if isinstance(atom, Constant) else values[atom]

        for computation in stage.computations:
            results = computation.run(*map(read, computation.inputs))
            values.update(zip(computation.outputs, results, strict=True))
        return [jnp.asarray(read(atom)) for atom, _ in pairs]

    donated_values = {staged.inputs[i] for i in donated} if is_last else set[Value]()
    return lane.executor.compile_function(
        program,
        program.name if len(staged.stages) == 1 else f"{program.name}_stage_{number + 1}",
        lowered(run, rules_for(lane.replicas)),
        [Kind(not value.is_mirrored) for value in stage.inputs],
        [Kind(not is_mirrored) for _, is_mirrored in pairs],
        [i for i, value in enumerate(stage.inputs) if value in donated_values],
        [struct_of(value.aval) for value in stage.inputs],
        # An executable demands another layout of these than other programs give them (JAX 0.10.2).
        is_fixed=not any(str(value.aval.dtype) in _SUB_BYTE for value in stage.inputs),
    )
