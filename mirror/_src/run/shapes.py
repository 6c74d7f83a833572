"""The sets of shapes that replicas have: a step is traced once for each of them."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from mirror._src.context.gathers import LengthsUnknown, UnequalGathers
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.program.trace import abstract, abstract_row, trace
from mirror._src.run.call import Call
from mirror._src.run.step import Step

Variants = tuple[tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[int, ...]], ...]


def variants_of(call: Call, leaves: list[Any], num_replicas: int) -> Variants:
    """The sets of shapes that replicas have, and which replicas have each."""
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
            columns.append((_row(leaf),))
    is_own = call.structure.is_own if call.structure is not None else []
    state = [
        _row(leaf) if own else abstract(leaf) for leaf, own in zip(call.state, is_own, strict=True)
    ]
    if not unequal:
        return (((*state, *(first for first, *_ in columns)), tuple(range(num_replicas))),)
    members: dict[Any, list[int]] = {}
    for replica in range(num_replicas):
        own = [column[replica if i in unequal else 0] for i, column in enumerate(columns)]
        members.setdefault((*state, *own), []).append(replica)
    return tuple((avals, tuple(ids)) for avals, ids in members.items())


def _row(stacked: Any) -> jax.ShapeDtypeStruct:
    """One replica's shape, dtype and weak type, where all have the same."""
    if isinstance(stacked, UnstackedArrays):
        return jax.ShapeDtypeStruct(stacked.shapes[0], stacked.dtype)
    return abstract_row(stacked)


def trace_together(
    traces: Sequence[Any], variants: Variants, gathers: UnequalGathers | None, num_replicas: int
) -> list[ClosedJaxpr]:
    """Traces a step for each set of shapes, up to each all-gather until all lengths are known.

    Raises:
        ValueError: the replicas do not bring to an all-gather what can be joined.
    """
    while True:
        jaxprs: list[ClosedJaxpr] = []
        asked: list[LengthsUnknown] = []
        for fn, (avals, _) in zip(traces, variants, strict=True):
            try:
                jaxprs.append(trace(fn, avals, num_replicas))
            except LengthsUnknown as unknown:
                asked.append(unknown)
        if gathers is None or not asked:
            return jaxprs
        gathers.known.append(_lengths(asked, variants, len(gathers.known) + 1))


def _lengths(asked: list[LengthsUnknown], variants: Variants, number: int) -> tuple[int, ...]:
    """Each replica's length at an all-gather."""
    if len(asked) < len(variants):
        raise ValueError(
            f"all_gather number {number} of the step is reached on some replicas only. Every "
            "replica must execute the same collectives: do not make one conditional on a shape."
        )
    axis = asked[0].axis
    found: dict[int, int] = {}
    for unknown, (_, ids) in zip(asked, variants, strict=True):
        found.update(dict.fromkeys(ids, unknown.shape[axis] if unknown.shape else 0))
    others = {(u.axis, u.shape[:axis], u.shape[axis + 1 :]) for u in asked}
    if len(others) > 1:
        shapes = ", ".join(
            f"{unknown.shape} on replica {ids[0]}"
            for unknown, (_, ids) in zip(asked, variants, strict=True)
        )
        raise ValueError(
            f"all_gather number {number} of the step joins along axis {axis} arrays of shapes "
            f"{shapes}. All other axes must be equal."
        )
    return tuple(found[i] for i in sorted(found))


def require_one_result(
    steps: Sequence[Step], variants: Variants, jaxprs: Sequence[ClosedJaxpr]
) -> None:
    """Refuses a step that returns other kinds of results on replicas of other shapes."""
    avals: list[list[Any]] = [[var.aval for var in jaxpr.jaxpr.outvars] for jaxpr in jaxprs]
    kinds = [[(aval.dtype, aval.ndim) for aval in each] for each in avals]
    for found, (_, ids) in zip(kinds[1:], variants[1:], strict=True):
        pairs = zip(steps[0].out_names, kinds[0], found, strict=False)
        for name, (dtype, ndim), (other, other_ndim) in pairs:
            if (dtype, ndim) != (other, other_ndim):
                raise ValueError(
                    f"{name} of {steps[0].name} is {dtype} of {ndim} dimensions on replica 0 and "
                    f"{other} of {other_ndim} on replica {ids[0]}. Return the same dtype and "
                    "number of dimensions, whatever the shapes."
                )
    for step, (_, ids) in zip(steps[1:], variants[1:], strict=True):
        if step.out_tree != steps[0].out_tree:
            raise ValueError(
                f"{step.name} returned another structure on replica {ids[0]}, {step.out_tree}, "
                f"than on replica 0, {steps[0].out_tree}. A step must not choose by a shape what "
                "it returns."
            )
