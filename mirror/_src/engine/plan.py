"""Turns the proof into a `Plan`: which state to write back, average and merge."""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr

from mirror._src.base.errors import listing
from mirror._src.engine.nnx.metrics import Rule
from mirror._src.engine.nnx.structure import MetricSlots, VariableSlot
from mirror._src.jaxprs.additive import Dependence, dependence
from mirror._src.jaxprs.marks import Mark


class Plan(NamedTuple):
    """Execution plan of a proved step.

    Attributes:
        changed: Positions of the objects' leaves that the step changes. No other leaf is written.
        averaged: Positions of the per-replica batch statistics, which are averaged.
        merged: The nnx metrics whose states are merged over the replicas.
        per_replica_results: For each result, whether it is per-replica.
    """

    changed: list[int]
    averaged: list[int]
    merged: list["Merge"]
    per_replica_results: list[bool]


class Merge(NamedTuple):
    """Merge of the states of one nnx metric over the replicas.

    Attributes:
        rule: Rule that merges the states.
        positions: Position of the leaf of each state, by attribute name.
        dependences: How each state after the step depends on the same state before it.
    """

    rule: Rule
    positions: dict[str, int]
    dependences: dict[str, Dependence]


class LeafOutcome(enum.Enum):
    """Effect of a step on a leaf of the nnx objects."""

    UNCHANGED = "unchanged"
    MIRRORED = "mirrored"
    AVERAGED = "averaged"
    MERGED = "merged"
    OWN = "own"
    DIVERGING = "diverging"


def find_merges(
    metrics: Sequence[MetricSlots],
    slots: Sequence[tuple[VariableSlot, str]],
    after: Sequence[Mark],
    program: ClosedJaxpr,
    num_results: int,
    detailed: Callable[[], Sequence[Mark]],
) -> tuple[list[Merge], list[str]]:
    """Plans the merges of nnx metrics that the replicas update differently.

    Args:
        metrics: The metrics among the objects.
        slots: The slot of each leaf of the objects, and the user's name for it.
        after: Marks of the objects' leaves after the step.
        program: The trace, whose first inputs are the objects' leaves.
        num_results: Number of outputs before the objects' leaves.
        detailed: Returns the marks of all outputs, with the collectives they were computed from.

    Returns:
        The merges, and, for each state that cannot be merged, its name and the reason.
    """
    merges: list[Merge] = []
    problems: list[str] = []
    for metric in metrics:
        positions = metric.positions
        if not any(after[i].per_replica for i in positions.values()):
            continue
        if metric.rule is None:
            problems += [
                f"{slots[i][1]}: {metric.kind.__name__} cannot be merged over replicas"
                for i in positions.values()
                if after[i].per_replica
            ]
            continue
        inputs = list(positions.values())
        outputs = [num_results + i for i in inputs]
        dependences = dict(zip(positions, dependence(program, inputs, outputs), strict=True))
        merges.append(Merge(metric.rule, positions, dependences))
        problems += [
            f"{slots[positions[name]][1]}: the step does more than add to it"
            for name in metric.rule.unmergeable(dependences)
        ]
        marks = detailed()
        problems += [
            f"{slots[i][1]}: already reduced over the replicas, unlike the rest of the metric"
            for i in inputs
            if not after[i].per_replica and marks[num_results + i].reduced_by
        ]
    return merges, problems


def unmerged_message(step_name: str, problems: Sequence[str]) -> str:
    """Returns the error message for nnx metrics that cannot be merged over the replicas."""
    return (
        f"{step_name} would leave these nnx metrics with different states on different replicas:\n"
        f"{listing(problems)}\nOnly updates that add to nnx.metrics.Average, Accuracy or Welford "
        "are merged. Update other metrics with the values of all replicas: "
        "mirror.all_gather(logits)."
    )


def leaf_outcomes(
    slots: Sequence[tuple[VariableSlot, str]],
    given: Sequence[object],
    after: Sequence[Mark],
    keys: Mapping[int, Mark],
    merged: Iterable[int] = (),
) -> list[LeafOutcome]:
    """Returns the outcome of each leaf of the objects.

    Args:
        slots: The slot of each leaf of the objects, and the user's name for it.
        given: Variables of the jaxpr that hold the objects' leaves before the step.
        after: Marks of the objects' leaves after the step.
        keys: Marks of the PRNG keys as the replica received them, by position among the leaves.
        merged: Positions of the leaves of merged metrics.
    """
    of_metrics = set(merged)

    def outcome(i: int, slot: VariableSlot, mark: Mark) -> LeafOutcome:
        if i in of_metrics:
            return LeafOutcome.MERGED
        if mark.source is given[i] or (i in keys and mark.source is keys[i].source):
            return LeafOutcome.UNCHANGED
        if mark.per_replica and issubclass(slot.kind, nnx.BatchStat):
            return LeafOutcome.AVERAGED
        if slot.is_own:
            return LeafOutcome.OWN
        return LeafOutcome.DIVERGING if mark.per_replica else LeafOutcome.MIRRORED

    pairs = enumerate(zip(slots, after, strict=True))
    return [outcome(i, slot, mark) for i, ((slot, _), mark) in pairs]


def require_means(
    slots: Sequence[tuple[VariableSlot, str]], dtypes: Sequence[Any], averaged: Sequence[int]
) -> None:
    """Rejects batch statistics that cannot store their mean.

    Raises:
        TypeError: If a batch statistic to average is an integer or a boolean.
    """
    for i in averaged:
        if not jnp.issubdtype(dtypes[i], jnp.inexact):
            raise TypeError(
                f"{slots[i][1]} is an nnx.BatchStat that differs between replicas, but as "
                f"{dtypes[i]} it cannot store their mean. Use a float, or reduce it in the step: "
                'mirror.all_reduce("sum", x).'
            )


ALL_REDUCE = (
    "All-reduce values derived from per-replica data before they reach a variable:\n"
    '  grads = mirror.all_reduce("mean", grads)'
)


def divergence_message(step_name: str, causes: Iterable[str]) -> str:
    """Returns the error message for a step after which variables would differ."""
    return (
        f"{step_name} would leave these variables with different values on different replicas:\n"
        f"{listing(causes)}\n{ALL_REDUCE}"
    )


def cause(mark: Mark, leaf_names: Sequence[str]) -> str:
    """Returns a description of what made a value per-replica, with the user's names."""
    if isinstance(mark.origin, int):
        return f"computed from {leaf_names[mark.origin]} without an all-reduce"
    return f"computed from {mark.origin} without an all-reduce"
