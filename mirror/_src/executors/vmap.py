"""The vmap executor: several replicas on each device.

One `jax.vmap` runs over the rows of a device. Where there are several devices, each runs its own
rows inside one `jax.shard_map`, so that XLA has nothing to partition: its partitioner computes the
gradient of a pointwise convolution wrongly when the rows of one `jax.vmap` are split over devices
(the grouped convolution that `jax.vmap` makes of it; JAX 0.10 to 0.12).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
from jax.sharding import PartitionSpec

from mirror._src.devices.replicas import Kind
from mirror._src.executors.callbacks import CallbackGuard
from mirror._src.executors.collectives import RowCollectives
from mirror._src.executors.executor import MeshExecutor, Outputs, SignatureChanged
from mirror._src.executors.vmap_sums import evaluate
from mirror._src.program.evaluate import Lowering, Rules
from mirror._src.program.trace import trace_inside

_ROWS = "replicas of a device"


@final
class VmapExecutor(MeshExecutor):
    """Runs replica programs as rows of one program on each device."""

    def _rules(self, guard: CallbackGuard | None) -> Rules:
        del guard  # of the callbacks that `jax.vmap` leaves: see `_mapped`
        replicas = self.replicas
        devices = replicas.axis_name if len(replicas.distinct) > 1 else None
        num_rows, num_devices = replicas.replicas_per_device, len(replicas.distinct)
        return RowCollectives(_ROWS, num_rows, devices, num_devices).rules

    def _lowering(self, arrays: Mapping[int, Any], rules: Rules) -> Lowering:
        # Collectives over the rows of one device need no packing; `_mapped` packs the others.
        return Lowering(arrays, rules)

    def _mapped(
        self,
        replica: Callable[..., Outputs],
        inputs: Sequence[Kind],
        outputs: Sequence[Kind],
        guard: CallbackGuard | None,
    ) -> Callable[..., Outputs]:
        rows = jax.vmap(
            replica,
            in_axes=tuple(0 if kind.is_own else None for kind in inputs),
            axis_name=_ROWS,
            axis_size=self.replicas.replicas_per_device,
        )

        def on_device(*leaves: Any) -> Outputs:
            # `out_axes=None` takes only what vmap itself knows to be the same in all rows; the
            # proof knows more. XLA drops rows that are made to be left out.
            try:
                found = evaluate(trace_inside(rows, leaves), leaves, guard, self.pack_bytes)
            except SignatureChanged:
                raise
            except (NotImplementedError, AssertionError, NameError, ValueError) as error:
                raise NotImplementedError(
                    "Several replicas on one device run as the rows of jax.vmap, which cannot do "
                    f"this step: {str(error).rstrip('.')}. Use one replica on each device, or "
                    "write it otherwise."
                ) from error
            return tuple(
                row if kind.is_own else row[0] for row, kind in zip(found, outputs, strict=True)
            )

        if len(self.replicas.distinct) == 1:
            return on_device
        split = PartitionSpec(self.replicas.axis_name)
        return jax.shard_map(
            on_device,
            mesh=self.replicas.mesh,
            in_specs=tuple(split if kind.is_own else PartitionSpec() for kind in inputs),
            out_specs=tuple(split if kind.is_own else PartitionSpec() for kind in outputs),
            check_vma=False,
        )
