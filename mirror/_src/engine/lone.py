"""The executor for a single replica: `jax.jit` without a replica axis."""

from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from mirror._src.devices.replicas import Kind
from mirror._src.engine.executor import MeshExecutor, Outputs
from mirror._src.passes.callbacks import CallbackGuard
from mirror._src.passes.collective_rules import SingleReplicaCollectives
from mirror._src.passes.evaluate import Rules


@final
class LoneExecutor(MeshExecutor):
    """Runs the program of a single replica on its device."""

    needs_per_replica_input = False

    def _rules(self, guard: CallbackGuard | None) -> Rules:
        return {**SingleReplicaCollectives().rules, **(guard.rules() if guard else {})}

    def _mapped(
        self,
        replica: Callable[..., Outputs],
        inputs: Sequence[Kind],
        outputs: Sequence[Kind],
        guard: CallbackGuard | None,
    ) -> Callable[..., Outputs]:
        del guard  # its rules apply inside
        return without_leading_axis(replica, inputs, outputs)


def without_leading_axis(
    replica: Callable[..., Outputs], inputs: Sequence[Kind], outputs: Sequence[Kind]
) -> Callable[..., Outputs]:
    """Returns a function that calls `replica` without the leading axis of per-replica values.

    The returned function takes and returns per-replica values as `(1, *shape)`.

    Args:
        replica: Function of one replica's leaves, of shape `(*shape)`.
        inputs: How the replicas hold each input.
        outputs: How the replicas hold each output.
    """

    def on_device(*leaves: Any) -> Outputs:
        arguments = (
            jax.lax.squeeze(leaf, (0,)) if kind.is_own else leaf
            for leaf, kind in zip(leaves, inputs, strict=True)
        )
        return tuple(
            jax.lax.expand_dims(output, (0,)) if kind.is_own else output
            for output, kind in zip(replica(*arguments), outputs, strict=True)
        )

    return on_device
