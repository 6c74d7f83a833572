"""`StagedExecutor`: splits a replica program at its collectives and groups replicas into lanes."""

from typing import Any, final

import jax

from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.cross_device_ops import CrossDeviceOps
from mirror._src.engine.executor import Executor, ReplicaProgram, Variant
from mirror._src.engine.staged.lane import Lane
from mirror._src.engine.staged.program import StagedProgram
from mirror._src.passes.match import require_alike
from mirror._src.passes.staging.flatten import stage_program

_PACK_BYTES = 256 * 1024


@final
class StagedExecutor(Executor):
    """Runs replica programs stage by stage.

    Args:
        replicas: Devices of the replicas, of any types.
        ops: Implements the reductions.
    """

    def __init__(self, replicas: ReplicaDevices, ops: CrossDeviceOps) -> None:
        super().__init__(replicas, _PACK_BYTES if ops.pack_bytes is None else ops.pack_bytes)
        self.ops = ops
        self.reduces_on = ops.device
        self._lanes: dict[tuple[int, ...], Lane] = {}

    def compile(self, program: ReplicaProgram) -> StagedProgram:
        """See `Executor.compile`. Traces and stages the program now.

        Raises:
            NotImplementedError: If the program cannot be split at its collectives.
            ValueError: If replicas would execute different collectives for different shapes.
        """
        limit = self.pack_bytes
        n = len(self.replicas)
        rules = program.guard.rules() if program.guard is not None else {}
        inputs = [not kind.is_own for kind in program.inputs]
        outputs = [not kind.is_own for kind in program.outputs]
        staged = [
            stage_program(variant.proved, inputs, outputs, n, limit, variant.finish, rules)
            for variant in program.variants
        ]
        require_alike(staged, [variant.replicas for variant in program.variants])
        lanes, lane_programs = [], []
        for variant, jaxpr in zip(program.variants, staged, strict=True):
            for ids in self._group(variant):
                lanes.append(self._lane(ids))
                lane_programs.append(jaxpr)
        return StagedProgram(self.replicas, self.ops, program, lanes, lane_programs)

    def _group(self, variant: Variant) -> list[tuple[int, ...]]:
        """Groups the replicas of a variant by type, with each device at most once per group."""
        groups: dict[Any, list[int]] = {}
        counts: dict[jax.Device, int] = {}
        for replica in variant.replicas:
            device = self.replicas.devices[replica]
            count = counts[device] = counts.get(device, 0) + 1
            groups.setdefault((backend.type_of(device), count), []).append(replica)
        return [tuple(ids) for ids in groups.values()]

    def _lane(self, ids: tuple[int, ...]) -> Lane:
        if ids not in self._lanes:
            self._lanes[ids] = Lane(ids, self.replicas)
        return self._lanes[ids]
