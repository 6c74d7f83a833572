"""The pmap executor: distinct devices of one type. This is the only module that uses `jax.pmap`.

Mirrored values have axis `None` as inputs and outputs, so the state is never stacked and `y[0]` is
never read. Since JAX 0.8, `jax.pmap` is `jit(shard_map)` behind a Python wrapper. With an outer
`jax.jit`, that wrapper runs only when a step is traced.
"""

from collections.abc import Callable, Sequence
from typing import final

import jax

from mirror._src.devices.replicas import Kind
from mirror._src.engine.executor import MeshExecutor, Outputs
from mirror._src.passes.callbacks import CallbackGuard

# Taken at import: `chex.fake_pmap` replaces `jax.pmap` by a `vmap` that returns a mirrored result
# once per replica, as if `out_axes` were 0 for all results.
_pmap = jax.pmap


@final
class PmapExecutor(MeshExecutor):
    """Runs replica programs with one replica per device."""

    def _mapped(
        self,
        replica: Callable[..., Outputs],
        inputs: Sequence[Kind],
        outputs: Sequence[Kind],
        guard: CallbackGuard | None,
    ) -> Callable[..., Outputs]:
        del guard  # its rules apply inside
        return _pmap(
            replica,
            axis_name=self.replicas.axis_name,
            in_axes=tuple(0 if kind.is_own else None for kind in inputs),
            out_axes=tuple(0 if kind.is_own else None for kind in outputs),
            devices=self.replicas.devices,
        )
