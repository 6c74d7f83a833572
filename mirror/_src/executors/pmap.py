"""The pmap executor: n distinct devices of one kind. The one owner of `jax.pmap`.

Mirrored values go in and come out with axis `None`, so there is no stacked copy of the state and
no reading of `y[0]`. `jax.pmap` is `jit(shard_map)` with a Python front (JAX 0.8 and later); the
`jax.jit` around it takes that front off the path of every step after the first.
"""

from collections.abc import Callable, Sequence
from typing import final

import jax

from mirror._src.devices.replicas import Kind
from mirror._src.executors.callbacks import CallbackGuard
from mirror._src.executors.executor import MeshExecutor, Outputs


@final
class PmapExecutor(MeshExecutor):
    """Runs replica programs on the devices of the replicas, one replica on each."""

    def _mapped(
        self,
        replica: Callable[..., Outputs],
        inputs: Sequence[Kind],
        outputs: Sequence[Kind],
        guard: CallbackGuard | None,
    ) -> Callable[..., Outputs]:
        del guard  # its rules apply inside
        return jax.pmap(
            replica,
            axis_name=self.replicas.axis_name,
            in_axes=tuple(0 if kind.is_own else None for kind in inputs),
            out_axes=tuple(0 if kind.is_own else None for kind in outputs),
            devices=self.replicas.devices,
        )
