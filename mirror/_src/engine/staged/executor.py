"""`StagedExecutor`: splits a replica program at its collectives and groups replicas into lanes."""

from typing import Any, final

import jax

from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.cross_device_ops import CrossDeviceOps
from mirror._src.engine.executor import Executor, ReplicaProgram
from mirror._src.engine.staged.lane import Lane
from mirror._src.engine.staged.program import StagedProgram
from mirror._src.passes.program import Settings
from mirror._src.passes.staging.stages import stage_program

_PACK_BYTES = 256 * 1024


@final
class StagedExecutor(Executor):
    """Runs replica programs stage by stage.

    Args:
        replicas: Devices of the replicas, of any types.
        ops: Implements the reductions.
    """

    name = "staged"

    def __init__(self, replicas: ReplicaDevices, ops: CrossDeviceOps) -> None:
        super().__init__(replicas, _PACK_BYTES if ops.pack_bytes is None else ops.pack_bytes)
        self.ops = ops
        self.reduces_on = ops.device
        self._lanes = _lanes(replicas)

    def compile(self, program: ReplicaProgram) -> StagedProgram:
        """See `Executor.compile`. Traces and stages the program now.

        Raises:
            NotImplementedError: If the program cannot be split at its collectives.
        """
        rules = program.guard.rules() if program.guard is not None else {}
        per_replica = [kind.is_own for kind in program.inputs]
        settings = Settings(
            len(self.replicas), self.pack_bytes, per_replica, axis_name=self.replicas.axis_name
        )
        mirrored = [not kind.is_own for kind in program.outputs]
        staged = stage_program(program.jaxprs, settings, mirrored, rules)
        return StagedProgram(self.replicas, self.ops, program, self._lanes, staged)


def _lanes(replicas: ReplicaDevices) -> list[Lane]:
    """Groups the replicas by the type of their device, with each device at most once per group."""
    groups: dict[Any, list[int]] = {}
    counts: dict[jax.Device, int] = {}
    for replica, device in enumerate(replicas.devices):
        count = counts[device] = counts.get(device, 0) + 1
        groups.setdefault((backend.type_of(device), count), []).append(replica)
    return [Lane(tuple(ids), replicas) for ids in groups.values()]
