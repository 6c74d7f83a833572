"""The shard_map executor: one replica per device, and devices of several processes.

`jax.pmap` maps over the devices of its own process only (JAX 0.10.2, 0.12.0.1).
"""

from collections.abc import Callable, Sequence

import jax

from mirror._src.devices.replicas import Kind
from mirror._src.engine.executor import MeshExecutor, Outputs
from mirror._src.engine.lone import without_leading_axis
from mirror._src.passes.callbacks import CallbackGuard


class ShardMapExecutor(MeshExecutor):
    """Runs replica programs with one replica per device, on the devices of all processes."""

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
            check_vma=False,  # the proof has checked more
        )
