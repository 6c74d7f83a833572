"""What the proof decides: which state comes back, what is averaged, which results are mirrored."""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr

from mirror._src.program.additive import Dependence, dependence
from mirror._src.program.marks import Mark
from mirror._src.run.nnx.metrics import Rule
from mirror._src.run.nnx.structure import MetricSlots, VariableSlot
from mirror._src.utils.errors import ReplicaDivergenceError, listing


class Plan(NamedTuple):
    """How a proved step is run.

    Attributes:
        changed: positions of the objects' leaves that the step changes; the rest stay untouched.
        averaged: those of them that are statistics of each replica's own batch, to be averaged.
        merged: the nnx metrics whose states are merged over the replicas.
        per_replica_results: for each result, whether replicas may differ in it.
    """

    changed: list[int]
    averaged: list[int]
    merged: list["Merge"]
    per_replica_results: list[bool]


class Merge(NamedTuple):
    """How the states of one nnx metric are merged over the replicas.

    Attributes:
        rule: Merges them.
        places: For each state, by attribute name, the position of its leaf.
        dependences: How each state after the step depends on the one before it.
    """

    rule: Rule
    places: dict[str, int]
    dependences: dict[str, Dependence]


class LeafOutcome(enum.Enum):
    """What becomes of a leaf of the nnx objects in a step."""

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
    programs: Sequence[ClosedJaxpr],
    num_results: int,
    detailed: Callable[[], Sequence[Mark]],
) -> tuple[list[Merge], list[str]]:
    """Decides how nnx metrics are merged that the replicas update differently.

    Args:
        metrics: The metrics among the objects.
        slots: One for each leaf of the objects, with the user's name for it.
        after: Marks of the objects' leaves at the end.
        programs: The traces; the objects' leaves are their first inputs.
        num_results: Number of outputs before the objects' leaves.
        detailed: Returns the marks of all outputs with the collectives behind them.

    Returns:
        How each is merged, and, for each state that cannot be, its name and why.
    """
    merges: list[Merge] = []
    problems: list[str] = []
    for metric in metrics:
        places = metric.places
        if not any(after[i].per_replica for i in places.values()):
            continue
        if metric.rule is None:
            problems += [
                f"{slots[i][1]}: state of {metric.kind.__name__}, which is not merged over replicas"
                for i in places.values()
                if after[i].per_replica
            ]
            continue
        inputs = list(places.values())
        outputs = [num_results + i for i in inputs]
        found = [dependence(program, inputs, outputs) for program in programs]
        dependences = {
            name: each[0] if len(set(each)) == 1 else Dependence.OTHER
            for name, each in zip(places, zip(*found, strict=True), strict=True)
        }
        merges.append(Merge(metric.rule, places, dependences))
        problems += [
            f"{slots[places[name]][1]}: the step does not just add to it"
            for name in metric.rule.unmergeable(dependences)
        ]
        marks = detailed()
        problems += [
            f"{slots[i][1]}: reduced over the replicas already, unlike the rest of the metric"
            for i in inputs
            if not after[i].per_replica and marks[num_results + i].behind
        ]
    return merges, problems


def unmerged(step_name: str, problems: Sequence[str]) -> str:
    """Words nnx metrics that cannot be merged over the replicas, and the fix."""
    return (
        f"After {step_name} the replicas would hold different states of nnx metrics:\n"
        f"{listing(problems)}\nWhat replicas add to nnx.metrics.Average, Accuracy and Welford is "
        "merged. Update other metrics with values of all replicas: "
        "mirror.get_replica_context().all_gather(logits)."
    )


def fates(
    slots: Sequence[tuple[VariableSlot, str]],
    given: Sequence[object],
    after: Sequence[Mark],
    keys: Mapping[int, Mark],
    merged: Iterable[int] = (),
) -> list[LeafOutcome]:
    """What becomes of each leaf; the arguments are those of `make_plan`."""
    of_metrics = set(merged)

    def fate(i: int, slot: VariableSlot, mark: Mark) -> LeafOutcome:
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
    return [fate(i, slot, mark) for i, ((slot, _), mark) in pairs]


def make_plan(
    step_name: str,
    slots: Sequence[tuple[VariableSlot, str]],
    given: Sequence[object],
    results: Sequence[Mark],
    after: Sequence[Mark],
    keys: Mapping[int, Mark],
    leaf_names: Sequence[str],
    dtypes: Sequence[Any],
    merges: Sequence[Merge] = (),
) -> Plan:
    """Decides, or refuses a step after which the replicas' state would differ.

    Args:
        step_name: what the user calls the step.
        slots: one for each leaf of the objects, with the user's name for it.
        given: the variables of the program that hold those leaves at first.
        results: marks of the results.
        after: marks of the objects' leaves at the end.
        keys: marks of the PRNG keys as each replica had them, by position.
        leaf_names: the user's names of all the program's inputs.
        dtypes: of the objects' leaves.
        merges: how nnx metrics are merged.

    Raises:
        ReplicaDivergenceError: a variable other than a batch statistic would differ.
        TypeError: a batch statistic that would be averaged is not a float.
    """
    merged = [i for merge in merges for i in merge.places.values()]
    found = list(enumerate(fates(slots, given, after, keys, merged)))
    diverging = [i for i, fate in found if fate is LeafOutcome.DIVERGING]
    require_means(slots, dtypes, [i for i, fate in found if fate is LeafOutcome.AVERAGED])
    if diverging:
        causes = (f"{slots[i][1]}: {cause(after[i], leaf_names)}" for i in diverging)
        raise ReplicaDivergenceError(divergence(step_name, causes))
    changed = [i for i, fate in found if fate is not LeafOutcome.UNCHANGED]
    averaged = [i for i, fate in found if fate is LeafOutcome.AVERAGED]
    return Plan(changed, averaged, list(merges), [mark.per_replica for mark in results])


def require_means(
    slots: Sequence[tuple[VariableSlot, str]], dtypes: Sequence[Any], averaged: Sequence[int]
) -> None:
    """Refuses batch statistics that have no mean of their own dtype.

    Raises:
        TypeError: One is an integer or a boolean.
    """
    for i in averaged:
        if not jnp.issubdtype(dtypes[i], jnp.inexact):
            raise TypeError(
                f"{slots[i][1]} is an nnx.BatchStat of {dtypes[i]} that differs between replicas: "
                "its mean is not an integer. Store it as a float, or reduce it in the step: "
                'mirror.get_replica_context().all_reduce("sum", x).'
            )


def divergence(step_name: str, causes: Iterable[str]) -> str:
    """Words a step after which variables would differ: which and why, and the fix."""
    return (
        f"After {step_name} the replicas would hold different values of\n{listing(causes)}\n"
        "Reduce what is computed from per-replica data before it reaches a variable:\n"
        '  grads = mirror.get_replica_context().all_reduce("mean", grads)'
    )


def cause(mark: Mark, leaf_names: Sequence[str]) -> str:
    """What made a value per-replica, in the user's words."""
    if isinstance(mark.origin, int):
        return f"computed from {leaf_names[mark.origin]} without an all-reduce"
    return f"computed from {mark.origin} without an all-reduce"
