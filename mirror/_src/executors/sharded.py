"""The sharded executor: one replica on each device, and state of which each device stores a slice.

It is `jit(shard_map)`, whose specs can say that an array is sharded; the axes of `jax.pmap` cannot.
"""

from collections.abc import Callable, Sequence
from typing import final

import jax

from mirror._src.devices.replicas import Kind
from mirror._src.executors.callbacks import CallbackGuard
from mirror._src.executors.executor import MeshExecutor, Outputs
from mirror._src.executors.lone import without_rows


@final
class ShardedExecutor(MeshExecutor):
    """Runs replica programs on the devices of the replicas, their weight updates sharded."""

    can_shard = True
    needs_row = False

    def _mapped(
        self,
        replica: Callable[..., Outputs],
        inputs: Sequence[Kind],
        outputs: Sequence[Kind],
        guard: CallbackGuard | None,
    ) -> Callable[..., Outputs]:
        del guard  # its rules apply inside
        return jax.shard_map(
            without_rows(replica, inputs, outputs),
            mesh=self.replicas.mesh,
            in_specs=tuple(self.replicas.sharding(kind).spec for kind in inputs),
            out_specs=tuple(self.replicas.sharding(kind).spec for kind in outputs),
            check_vma=False,
        )
