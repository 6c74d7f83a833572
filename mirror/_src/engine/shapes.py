"""Variants: the distinct sets of input shapes on the replicas. A step is traced once for each."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from mirror._src.base.errors import counted
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.engine.call import Call
from mirror._src.engine.gathers import LengthsUnknown, UnequalGathers
from mirror._src.engine.step import Step
from mirror._src.jaxprs.trace import abstract, abstract_row, trace

Variants = tuple[tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[int, ...]], ...]


def variants_of(call: Call, leaves: list[Any], num_replicas: int) -> Variants:
    """Returns the distinct sets of input shapes, each with the indices of its replicas."""
    differs = set(call.layout.per_replica)
    columns: list[Sequence[jax.ShapeDtypeStruct]] = []
    unequal = []
    for i, leaf in enumerate(leaves):
        if i not in differs:
            columns.append((abstract(leaf),))
        elif isinstance(leaf, UnstackedArrays):
            unequal.append(i)
            columns.append([jax.ShapeDtypeStruct(s, leaf.dtype) for s in leaf.shapes])
        else:
            columns.append((_abstract_row(leaf),))
    is_own = call.structure.is_own if call.structure is not None else []
    state = [
        _abstract_row(leaf) if own else abstract(leaf)
        for leaf, own in zip(call.state, is_own, strict=True)
    ]
    if not unequal:
        return (((*state, *(first for first, *_ in columns)), tuple(range(num_replicas))),)
    members: dict[Any, list[int]] = {}
    for replica in range(num_replicas):
        own = [column[replica if i in unequal else 0] for i, column in enumerate(columns)]
        members.setdefault((*state, *own), []).append(replica)
    return tuple((avals, tuple(ids)) for avals, ids in members.items())


def _abstract_row(stacked: Any) -> jax.ShapeDtypeStruct:
    """Returns one replica's shape, dtype and weak type, which are the same on all replicas."""
    if isinstance(stacked, UnstackedArrays):
        return jax.ShapeDtypeStruct(stacked.shapes[0], stacked.dtype)
    return abstract_row(stacked)


def trace_together(
    traces: Sequence[Any], variants: Variants, gathers: UnequalGathers | None, num_replicas: int
) -> list[ClosedJaxpr]:
    """Traces a step for each variant, repeatedly until the lengths at all all-gathers are known.

    Args:
        traces: The step of each variant, as a function of flat leaves.
        variants: The variants.
        gathers: Receives the lengths; `None` if there is a single variant.
        num_replicas: Number of replicas.

    Raises:
        ValueError: If the operands of an all-gather cannot be concatenated, or not all replicas
            reach it.
    """
    while True:
        jaxprs: list[ClosedJaxpr] = []
        stops: list[LengthsUnknown] = []
        for fn, (avals, _) in zip(traces, variants, strict=True):
            try:
                jaxprs.append(trace(fn, avals, num_replicas))
            except LengthsUnknown as stop:
                stops.append(stop)
        if gathers is None or not stops:
            return jaxprs
        gathers.known.append(_lengths(stops, variants, len(gathers.known) + 1))


def _lengths(stops: list[LengthsUnknown], variants: Variants, number: int) -> tuple[int, ...]:
    """Returns the length of every replica's operand at an all-gather."""
    if len(stops) < len(variants):
        raise ValueError(
            f"all_gather number {number} of the step is reached on some replicas only. Every "
            "replica must execute the same collectives: do not make one conditional on a shape."
        )
    axis = stops[0].axis
    lengths: dict[int, int] = {}
    for stop, (_, ids) in zip(stops, variants, strict=True):
        lengths.update(dict.fromkeys(ids, stop.shape[axis] if stop.shape else 0))
    other_axes = {(stop.axis, stop.shape[:axis], stop.shape[axis + 1 :]) for stop in stops}
    if len(other_axes) > 1:
        shapes = ", ".join(
            f"{stop.shape} on replica {ids[0]}"
            for stop, (_, ids) in zip(stops, variants, strict=True)
        )
        raise ValueError(
            f"all_gather number {number} of the step, along axis {axis}, received arrays of shapes "
            f"{shapes}. Shapes may differ along that axis only."
        )
    return tuple(lengths[i] for i in sorted(lengths))


def require_one_result(
    steps: Sequence[Step], variants: Variants, jaxprs: Sequence[ClosedJaxpr]
) -> None:
    """Rejects a step whose results differ in kind between variants.

    Raises:
        ValueError: If they differ in structure, dtype or number of dimensions.
    """
    avals: list[list[Any]] = [[var.aval for var in jaxpr.jaxpr.outvars] for jaxpr in jaxprs]
    kinds = [[(aval.dtype, aval.ndim) for aval in outputs] for outputs in avals]
    for others, (_, ids) in zip(kinds[1:], variants[1:], strict=True):
        pairs = zip(steps[0].out_names, kinds[0], others, strict=False)
        for name, (dtype, ndim), (other_dtype, other_ndim) in pairs:
            if (dtype, ndim) != (other_dtype, other_ndim):
                raise ValueError(
                    f"{name} of {steps[0].name} is {dtype} with {counted(ndim, 'dimension')} on "
                    f"replica 0, but {other_dtype} with {counted(other_ndim, 'dimension')} on "
                    f"replica {ids[0]}. Return the same dtype and number of dimensions for all "
                    "input shapes."
                )
    for step, (_, ids) in zip(steps[1:], variants[1:], strict=True):
        if step.out_tree != steps[0].out_tree:
            raise ValueError(
                f"{step.name} returned {steps[0].out_tree} on replica 0, but {step.out_tree} on "
                f"replica {ids[0]}. Return the same structure for all input shapes."
            )
