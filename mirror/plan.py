"""What the proof decides: which state comes back, what is averaged, which results are mirrored."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax import nnx

from mirror._errors import ReplicaDivergenceError, listing
from mirror.objects import Slot
from mirror.program.proof import Mark


class Plan(NamedTuple):
    """How a proved step is run.

    Attributes:
        changed: positions of the objects' leaves that the step changes; the rest stay untouched.
        averaged: those of them that are statistics of each replica's own batch, to be averaged.
        per_replica_results: for each result, whether replicas may differ in it.
    """

    changed: list[int]
    averaged: list[int]
    per_replica_results: list[bool]


def make_plan(
    step_name: str,
    slots: Sequence[tuple[Slot, str]],
    given: Sequence[object],
    results: Sequence[Mark],
    after: Sequence[Mark],
    keys: Mapping[int, Mark],
    leaf_names: Sequence[str],
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

    Raises:
        ReplicaDivergenceError: a variable other than a batch statistic would differ.
    """
    changed, averaged, diverging = [], [], []
    for i, ((slot, name), mark) in enumerate(zip(slots, after, strict=True)):
        if mark.source is given[i] or (i in keys and mark.source is keys[i].source):
            continue
        changed.append(i)
        if mark.per_replica and issubclass(slot.kind, nnx.BatchStat):
            averaged.append(i)
        elif mark.per_replica and not slot.is_own:
            diverging.append(f"{name}: {cause(mark, leaf_names)}")
    if diverging:
        raise ReplicaDivergenceError(
            f"After {step_name} the replicas would hold different values of\n{listing(diverging)}\n"
            "Reduce what is computed from per-replica data before it reaches a variable:\n"
            '  grads = mirror.get_replica_context().all_reduce("mean", grads)'
        )
    return Plan(changed, averaged, [mark.per_replica for mark in results])


def cause(mark: Mark, leaf_names: Sequence[str]) -> str:
    """What made a value per-replica, in the user's words."""
    if isinstance(mark.origin, int):
        return f"computed from {leaf_names[mark.origin]} without an all-reduce"
    return f"computed from {mark.origin} without an all-reduce"
