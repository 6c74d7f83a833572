"""The executor of one replica: no axis, no collectives, nothing but `jax.jit`."""

from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from mirror._src.devices.replicas import Kind
from mirror._src.executors.callbacks import CallbackGuard
from mirror._src.executors.collectives import LoneCollectives
from mirror._src.executors.executor import MeshExecutor, Outputs
from mirror._src.program.evaluate import Rules


@final
class LoneExecutor(MeshExecutor):
    """Runs the program of a single replica on its device."""

    needs_row = False

    def _rules(self, guard: CallbackGuard | None) -> Rules:
        return {**LoneCollectives().rules, **(guard.rules if guard else {})}

    def _mapped(
        self,
        replica: Callable[..., Outputs],
        inputs: Sequence[Kind],
        outputs: Sequence[Kind],
        guard: CallbackGuard | None,
    ) -> Callable[..., Outputs]:
        del guard  # its rules apply inside
        return without_rows(replica, inputs, outputs)


def without_rows(
    replica: Callable[..., Outputs], inputs: Sequence[Kind], outputs: Sequence[Kind]
) -> Callable[..., Outputs]:
    """Returns a function of rows `(1, *shape)` that runs one of arrays `(*shape)`.

    Args:
        replica: Function of one replica's leaves.
        inputs: How the replicas hold each input; what is a replica's own comes as a row.
        outputs: How they are to hold each output; what is a replica's own is returned as a row.
    """

    def on_device(*leaves: Any) -> Outputs:
        own = (
            jax.lax.squeeze(leaf, (0,)) if kind.is_own else leaf
            for leaf, kind in zip(leaves, inputs, strict=True)
        )
        return tuple(
            jax.lax.expand_dims(output, (0,)) if kind.is_own else output
            for output, kind in zip(replica(*own), outputs, strict=True)
        )

    return on_device
