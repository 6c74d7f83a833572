"""The vmap executor: several replicas on each device.

One `jax.vmap` runs over all replicas; where they lie on several devices, its rows do, and XLA
splits the program along them. So collectives over the replica axis, the user's own too, mean all
replicas: those of one device meet in a sum over rows, those of several in an exchange as well. A
pmap over devices around a vmap over the replicas of each would need two axes, and every collective
by hand would have to name both.
"""

from collections.abc import Callable, Sequence
from typing import final

import jax

from mirror._types import REPLICA_AXIS
from mirror.executors.executor import MeshExecutor, Outputs
from mirror.executors.sums import evaluate
from mirror.program.trace import trace_inside


@final
class VmapExecutor(MeshExecutor):
    """Runs replica programs as rows of one program."""

    def _mapped(
        self, replica: Callable[..., Outputs], inputs: Sequence[bool], outputs: Sequence[bool]
    ) -> Callable[..., Outputs]:
        rows = jax.vmap(
            replica,
            in_axes=tuple(0 if differs else None for differs in inputs),
            axis_name=REPLICA_AXIS,
            axis_size=len(self.replicas),
        )

        def mapped(*leaves: object) -> Outputs:
            # `out_axes=None` takes only what vmap itself knows to be the same in all rows; the
            # proof knows more. XLA drops rows that are made to be left out.
            try:
                found = evaluate(trace_inside(rows, leaves), leaves)
            except (NotImplementedError, AssertionError, NameError, ValueError) as error:
                raise NotImplementedError(
                    "Several replicas on one device run as the rows of jax.vmap, which cannot do "
                    f"this step: {str(error).rstrip('.')}. Use one replica on each device, or "
                    "write it otherwise."
                ) from error
            return tuple(
                row if differs else row[0] for row, differs in zip(found, outputs, strict=True)
            )

        return mapped
