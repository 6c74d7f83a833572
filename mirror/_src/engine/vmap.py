"""The vmap executor: several replicas per device.

One `jax.vmap` maps over the replicas of a device. With several devices, it runs inside a
`jax.shard_map`, so that XLA has nothing to partition. If XLA partitions a single `jax.vmap` over
all replicas instead, gradients of pointwise convolutions are wrong, because `jax.vmap` turns them
into grouped convolutions (JAX 0.10 to 0.12).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
from jax.sharding import PartitionSpec

from mirror._src.devices.replicas import Kind
from mirror._src.engine.executor import MeshExecutor, Outputs, SignatureChanged
from mirror._src.jaxprs.trace import trace_inside
from mirror._src.passes.callbacks import CallbackGuard
from mirror._src.passes.collective_rules import VmapCollectives
from mirror._src.passes.evaluate import Lowering, Rules
from mirror._src.passes.vmap_sums import evaluate

_VMAP_AXIS = "replicas of a device"


@final
class VmapExecutor(MeshExecutor):
    """Runs replica programs with several replicas per device."""

    def _rules(self, guard: CallbackGuard | None) -> Rules:
        del guard  # applied in `_mapped`, to the callbacks that `jax.vmap` produces
        replicas, num_devices = self.replicas, len(self.replicas.distinct)
        device_axis = replicas.axis_name if num_devices > 1 else None
        count = replicas.replicas_per_device
        return VmapCollectives(_VMAP_AXIS, count, device_axis, num_devices).rules

    def _lowering(self, arrays: Mapping[int, Any], rules: Rules) -> Lowering:
        # Collectives within a device need no packing. `_mapped` packs those across devices.
        return Lowering(arrays, rules)

    def _mapped(
        self,
        replica: Callable[..., Outputs],
        inputs: Sequence[Kind],
        outputs: Sequence[Kind],
        guard: CallbackGuard | None,
    ) -> Callable[..., Outputs]:
        on_all = jax.vmap(
            replica,
            in_axes=tuple(0 if kind.is_own else None for kind in inputs),
            axis_name=_VMAP_AXIS,
            axis_size=self.replicas.replicas_per_device,
        )

        def on_device(*leaves: Any) -> Outputs:
            # Mirrored outputs are stacked like the others, and the first slice is taken:
            # `out_axes=None` accepts only outputs that `jax.vmap` itself knows to be unmapped, and
            # the proof knows more. XLA removes the unused slices.
            try:
                results = evaluate(trace_inside(on_all, leaves), leaves, guard, self.pack_bytes)
            except SignatureChanged:
                raise
            except (NotImplementedError, AssertionError, NameError, ValueError) as error:
                raise NotImplementedError(
                    "This step cannot run with several replicas per device, which relies on "
                    f"jax.vmap: {str(error).rstrip('.')}. Use one replica per device, or rewrite "
                    "the operation."
                ) from error
            return tuple(
                result if kind.is_own else result[0]
                for result, kind in zip(results, outputs, strict=True)
            )

        if len(self.replicas.distinct) == 1:
            return on_device
        stacked = PartitionSpec(self.replicas.axis_name)
        return jax.shard_map(
            on_device,
            mesh=self.replicas.mesh,
            in_specs=tuple(stacked if kind.is_own else PartitionSpec() for kind in inputs),
            out_specs=tuple(stacked if kind.is_own else PartitionSpec() for kind in outputs),
            check_vma=False,
        )
