"""`StagedExecutor`: cuts a replica program at its collectives and groups the devices into lanes."""

from typing import Any, final

import jax

from mirror._src.collectives.cross_device_ops import CrossDeviceOps
from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.executors.executor import Executor, ReplicaProgram, Variant
from mirror._src.executors.staged.lane import Lane
from mirror._src.executors.staged.program import StagedProgram
from mirror._src.program.match import require_alike
from mirror._src.program.staging.flatten import cut

_PACK_BYTES = 256 * 1024


@final
class StagedExecutor(Executor):
    """Runs replica programs stage by stage.

    Args:
        replicas: the devices, of any types.
        ops: carries the reductions out.
    """

    def __init__(self, replicas: ReplicaDevices, ops: CrossDeviceOps) -> None:
        super().__init__(replicas, _PACK_BYTES if ops.pack_bytes is None else ops.pack_bytes)
        self.ops = ops
        self.reduces_on = ops.device
        self._lanes: dict[tuple[int, ...], Lane] = {}

    def compile(self, program: ReplicaProgram) -> StagedProgram:
        """See `Executor.compile`. Traces and cuts the program now.

        Raises:
            NotImplementedError: the program cannot be cut.
            ValueError: replicas of different shapes communicate differently.
        """
        limit = self.pack_bytes
        n = len(self.replicas)
        rules = program.guard.rules if program.guard is not None else {}
        inputs = [not kind.is_own for kind in program.inputs]
        outputs = [not kind.is_own for kind in program.outputs]
        staged = [
            cut(each.proved, inputs, outputs, n, limit, each.finish, rules)
            for each in program.variants
        ]
        require_alike(staged, [variant.replicas for variant in program.variants])
        lanes, of_lanes = [], []
        for variant, each in zip(program.variants, staged, strict=True):
            for ids in self._together(variant):
                lanes.append(self._lane(ids))
                of_lanes.append(each)
        return StagedProgram(self.replicas, self.ops, program, lanes, of_lanes)

    def _together(self, variant: Variant) -> list[tuple[int, ...]]:
        """The replicas of a variant that one program can run: of one type, each its own device."""
        groups: dict[Any, list[int]] = {}
        met: dict[jax.Device, int] = {}
        for replica in variant.replicas:
            device = self.replicas.devices[replica]
            number = met[device] = met.get(device, 0) + 1
            groups.setdefault((backend.type_of(device), number), []).append(replica)
        return [tuple(ids) for ids in groups.values()]

    def _lane(self, ids: tuple[int, ...]) -> Lane:
        if ids not in self._lanes:
            self._lanes[ids] = Lane(ids, self.replicas)
        return self._lanes[ids]
