"""The sharded executor: one replica per device, with state sharded over the devices.

It uses `jit(shard_map)`, because the axes of `jax.pmap` cannot express that an array is sharded.
"""

from collections.abc import Callable, Sequence
from typing import final

import jax

from mirror._src.devices.replicas import Kind
from mirror._src.executors.callbacks import CallbackGuard
from mirror._src.executors.executor import MeshExecutor, Outputs
from mirror._src.executors.lone import without_leading_axis


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
        return jax.shard_map(
            without_leading_axis(replica, inputs, outputs),
            mesh=self.replicas.mesh,
            in_specs=tuple(self.replicas.sharding(kind).spec for kind in inputs),
            out_specs=tuple(self.replicas.sharding(kind).spec for kind in outputs),
            check_vma=False,
        )
