"""The sharded executor: one replica per device, with state sharded over the devices.

It uses `jit(shard_map)`, because the axes of `jax.pmap` cannot express that an array is sharded.
"""

from collections.abc import Callable, Sequence
from typing import final

from mirror._src.devices.replicas import Kind
from mirror._src.executors.callbacks import CallbackGuard
from mirror._src.executors.executor import MeshExecutor, Outputs
from mirror._src.executors.shard_map import over_mesh


@final
class ShardedExecutor(MeshExecutor):
    """Runs replica programs with one replica per device and sharded weight updates."""

    can_shard = True
    needs_per_replica_input = False

    def _mapped(
        self,
        replica: Callable[..., Outputs],
        inputs: Sequence[Kind],
        outputs: Sequence[Kind],
        guard: CallbackGuard | None,
    ) -> Callable[..., Outputs]:
        del guard  # its rules apply inside
        return over_mesh(self.replicas, replica, inputs, outputs)
