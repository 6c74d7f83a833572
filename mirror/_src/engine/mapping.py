"""Maps the function of one replica over the devices. This is the only module that uses `jax.pmap`.

Five mappings compute the same. The first three run one replica per device:

- `jit`: a single replica needs no mapped axis.
- `pmap`: one replica per device of this process. Mirrored values have axis `None` as inputs and
  outputs, so the state is never stacked and `y[0]` is never read. Since JAX 0.8, `jax.pmap` is
  `jit(shard_map)` behind a Python wrapper. With an outer `jax.jit`, that wrapper runs only when a
  step is traced.
- `shard_map`: the devices of several processes, because `jax.pmap` maps over the devices of its own
  process only (JAX 0.10.2, 0.12.0.1), or state in slices, which the axes of `jax.pmap` cannot
  express.
- `vmap`: several replicas per device. `passes.on_device` evaluates the staged program:
  `jax.vmap` maps what is between two collectives over the replicas of a device. With several
  devices, this is inside a `jax.shard_map`, so that XLA has nothing to partition. If XLA partitions
  a single `jax.vmap` over all replicas instead, gradients of pointwise convolutions are wrong,
  because `jax.vmap` turns them into grouped convolutions (JAX 0.10 to 0.12).
- `in turn`: a fixed number of replicas, on any number of devices. `passes.order` evaluates the
  staged program inside a `jax.shard_map`, also on one device.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from mirror._src.devices.replicas import Kind, ReplicaDevices
from mirror._src.passes import order
from mirror._src.passes.callbacks import CallbackGuard
from mirror._src.passes.collective_rules import CollectiveRules, Reduction, uses_gloo
from mirror._src.passes.evaluate import Rules
from mirror._src.passes.lower import rules_for

Mapping = Literal["jit", "pmap", "shard_map", "vmap", "in turn"]
Outputs = tuple[Any, ...]
ReplicaFunction = Callable[..., Outputs]

STAGED = ("vmap", "in turn")
# Taken at import: `chex.fake_pmap` replaces `jax.pmap` by a `vmap` that returns a mirrored result
# once per replica, as if `out_axes` were 0 for all results.
_pmap = jax.pmap


def mapping_for(replicas: ReplicaDevices) -> Mapping:
    """Returns how to map over these devices, of one type."""
    if replicas.in_turn:
        return "in turn"
    if replicas.replicas_per_device > 1:
        return "vmap"
    if replicas.spans_processes or replicas.slice_bytes is not None:
        return "shard_map"
    return "jit" if len(replicas) == 1 else "pmap"


def rules_inside(
    mapping: Mapping,
    replicas: ReplicaDevices,
    guard: CallbackGuard | None,
    reduction: Reduction | None,
) -> Rules:
    """Returns the rules for operations that are replaced inside a mapping."""
    if mapping in STAGED:  # which have their own collectives
        fixed = order.RULES if mapping == "in turn" else {}
        return {**rules_for(replicas), **fixed, **(guard.rules() if guard is not None else {})}
    axis = replicas.axis_name if mapping in ("pmap", "shard_map") else None
    gloo = uses_gloo(replicas)
    rules = CollectiveRules(axis, len(replicas), over_gloo=gloo, reduction=reduction).rules
    return {**rules_for(replicas), **rules, **(guard.rules(axis) if guard is not None else {})}


def map_replicas(
    mapping: Mapping,
    replica: ReplicaFunction,
    replicas: ReplicaDevices,
    inputs: Sequence[Kind],
    outputs: Sequence[Kind],
) -> ReplicaFunction:
    """Returns a function of all replicas' leaves that runs `replica` for every replica.

    Args:
        mapping: How to map.
        replica: Function of one replica's leaves, evaluated by the rules of `rules_inside`; of the
            leaves of a device with a mapping of `STAGED`.
        replicas: Devices of the replicas.
        inputs: How the replicas hold each input. `pmap` requires a per-replica one.
        outputs: How the replicas hold each output.
    """
    match mapping:
        case "jit":
            return _without_leading_axis(replica, inputs, outputs)
        case "pmap":
            return _pmap(
                _held_weakly(replica),
                axis_name=replicas.axis_name,
                in_axes=tuple(0 if kind.is_own else None for kind in inputs),
                out_axes=tuple(0 if kind.is_own else None for kind in outputs),
                devices=replicas.devices,
            )
        case "vmap" if len(replicas.distinct) == 1:
            return replica
        case "vmap" | "in turn":
            on_device = replica
        case "shard_map":
            on_device = _without_leading_axis(replica, inputs, outputs)
    mapped: ReplicaFunction = jax.shard_map(
        on_device,
        mesh=replicas.mesh,
        in_specs=tuple(replicas.sharding(kind).spec for kind in inputs),
        out_specs=tuple(replicas.sharding(kind).spec for kind in outputs),
        check_vma=False,  # the proof has checked more
    )
    return mapped


def _held_weakly(replica: ReplicaFunction) -> ReplicaFunction:
    """Returns a function that does not keep `replica`, nor the arrays that its step captures.

    `jax.pmap` keeps every function, in a weak dictionary whose value refers to its key (JAX 0.10.2
    to 0.12.0.1).
    """
    held = weakref.ref(replica)

    def call(*leaves: Any) -> Outputs:
        target = held()
        assert target is not None  # the compiled program keeps it
        return target(*leaves)

    call.__name__ = replica.__name__
    return call


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
