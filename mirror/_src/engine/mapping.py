"""Maps the function of one replica over the devices. This is the only module that uses `jax.pmap`.

Five mappings compute the same:

- `jit`: a single replica needs no mapped axis.
- `pmap`: one replica per device of this process. Mirrored values have axis `None` as inputs and
  outputs, so the state is never stacked and `y[0]` is never read. Since JAX 0.8, `jax.pmap` is
  `jit(shard_map)` behind a Python wrapper. With an outer `jax.jit`, that wrapper runs only when a
  step is traced.
- `shard_map`: the devices of several processes, because `jax.pmap` maps over the devices of its own
  process only (JAX 0.10.2, 0.12.0.1), or state in slices, which the axes of `jax.pmap` cannot
  express.
- `vmap`: several replicas per device. One `jax.vmap` maps over the replicas of a device. With
  several devices, it runs inside a `jax.shard_map`, so that XLA has nothing to partition. If XLA
  partitions a single `jax.vmap` over all replicas instead, gradients of pointwise convolutions are
  wrong, because `jax.vmap` turns them into grouped convolutions (JAX 0.10 to 0.12).
- `in turn`: a fixed number of replicas, on any number of devices. `passes.order` evaluates the
  staged program inside a `jax.shard_map`, also on one device.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from mirror._src.devices.replicas import Kind, ReplicaDevices
from mirror._src.jaxprs.trace import trace_inside
from mirror._src.passes.callbacks import CallbackGuard
from mirror._src.passes.collective_rules import CollectiveRules, Reduction, uses_gloo
from mirror._src.passes.evaluate import Rules
from mirror._src.passes.lower.table import lowered, rules_for
from mirror._src.passes.vmap_sums import evaluate

Mapping = Literal["jit", "pmap", "shard_map", "vmap", "in turn"]
Outputs = tuple[Any, ...]
ReplicaFunction = Callable[..., Outputs]

_VMAP_AXIS = "replicas of a device"
# Taken at import: `chex.fake_pmap` replaces `jax.pmap` by a `vmap` that returns a mirrored result
# once per replica, as if `out_axes` were 0 for all results.
_pmap = jax.pmap


def mapping_for(replicas: ReplicaDevices, *, has_slices: bool = False) -> Mapping:
    """Returns how to map over these devices.

    Args:
        replicas: Devices of the replicas, of one type.
        has_slices: Whether programs may have sharded inputs and outputs.
    """
    if replicas.in_turn:
        return "in turn"
    if replicas.replicas_per_device > 1:
        return "vmap"
    if replicas.spans_processes or has_slices:
        return "shard_map"
    return "jit" if len(replicas) == 1 else "pmap"


def rules_inside(
    mapping: Mapping,
    replicas: ReplicaDevices,
    guard: CallbackGuard | None,
    reduction: Reduction | None,
) -> Rules:
    """Returns the rules for operations that are replaced inside a mapping."""
    if mapping == "in turn":  # which has its own collectives
        return {**rules_for(replicas), **(guard.rules() if guard is not None else {})}
    has_axis = mapping in ("pmap", "shard_map") or len(replicas.distinct) > 1
    axis = replicas.axis_name if has_axis else None
    rules = CollectiveRules(
        axis,
        _VMAP_AXIS if mapping == "vmap" else None,
        len(replicas.distinct),
        replicas.replicas_per_device,
        over_gloo=uses_gloo(replicas),
        reduction=reduction,
    ).rules
    if mapping == "vmap":  # which rewrites callbacks and slow operations: see `map_replicas`
        return rules
    return {**rules_for(replicas), **rules, **(guard.rules(axis) if guard is not None else {})}


def map_replicas(
    mapping: Mapping,
    replica: ReplicaFunction,
    replicas: ReplicaDevices,
    inputs: Sequence[Kind],
    outputs: Sequence[Kind],
    guard: CallbackGuard | None = None,
    pack_bytes: int = 0,
) -> ReplicaFunction:
    """Returns a function of all replicas' leaves that runs `replica` for every replica.

    Args:
        mapping: How to map.
        replica: Function of one replica's leaves, evaluated by the rules of `rules_inside`; of the
            leaves of a device with `in turn`.
        replicas: Devices of the replicas.
        inputs: How the replicas hold each input. `pmap` requires a per-replica one.
        outputs: How the replicas hold each output.
        guard: Stores exceptions of host callbacks.
        pack_bytes: All-reduces across devices that `vmap` packs; the others are packed inside.
    """
    in_axes = tuple(0 if kind.is_own else None for kind in inputs)
    match mapping:
        case "jit":
            return _without_leading_axis(replica, inputs, outputs)
        case "pmap":
            return _pmap(
                replica,
                axis_name=replicas.axis_name,
                in_axes=in_axes,
                out_axes=tuple(0 if kind.is_own else None for kind in outputs),
                devices=replicas.devices,
            )
        case "in turn":
            on_device = replica
        case "shard_map":
            on_device = _without_leading_axis(replica, inputs, outputs)
        case "vmap":
            count = replicas.replicas_per_device
            on_all = jax.vmap(replica, in_axes, axis_name=_VMAP_AXIS, axis_size=count)
            on_device = _on_replicas_of_device(
                on_all, outputs, guard, pack_bytes, rules_for(replicas)
            )
            if len(replicas.distinct) == 1:
                return on_device
    mapped: ReplicaFunction = jax.shard_map(
        on_device,
        mesh=replicas.mesh,
        in_specs=tuple(replicas.sharding(kind).spec for kind in inputs),
        out_specs=tuple(replicas.sharding(kind).spec for kind in outputs),
        check_vma=False,  # the proof has checked more
    )
    return mapped


def _without_leading_axis(
    replica: ReplicaFunction, inputs: Sequence[Kind], outputs: Sequence[Kind]
) -> ReplicaFunction:
    """Returns a function of the replica's rows, `(1, *shape)`, of per-replica values."""

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


def _on_replicas_of_device(
    on_all: ReplicaFunction,
    outputs: Sequence[Kind],
    guard: CallbackGuard | None,
    pack_bytes: int,
    rules: Rules,
) -> ReplicaFunction:
    """Returns a function of the rows of a device's replicas, of which `on_all` stacks all outputs.

    Mirrored outputs are stacked like the others, and the first slice is taken: `out_axes=None`
    accepts only outputs that `jax.vmap` itself knows to be unmapped, and the proof knows more. XLA
    removes the unused slices.
    """

    def with_sums(*leaves: Any) -> Sequence[Any]:
        return evaluate(trace_inside(on_all, leaves), leaves, guard, pack_bytes)

    def on_device(*leaves: Any) -> Outputs:
        try:
            results = lowered(with_sums, rules)(*leaves)
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

    return on_device
