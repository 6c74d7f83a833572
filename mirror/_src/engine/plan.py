"""Turns the proof into a `Plan`: which state to write back, average and merge.

State of nnx objects is written back into them. A donated argument is state too: a result with the
same structure, shapes and dtypes is its new value. Without donation, it is state if a later call
passes it.
"""

import enum
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr

from mirror._src.base.errors import listing
from mirror._src.engine.arguments import Call, is_number
from mirror._src.engine.nnx.metrics import Rule
from mirror._src.engine.nnx.structure import MetricSlots, VariableSlot
from mirror._src.engine.replica_function import ReplicaFunction, TracedStep
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
    origin = leaf_names[mark.origin] if isinstance(mark.origin, int) else mark.origin
    return f"computed from {origin} without an all-reduce"


IF_INTENDED = (
    "\nIf the replicas are intended to differ, pass a PerReplica in the first call, for example "
    "from strategy.distribute_values_from_function."
)
_NOT_STATE = (
    " To return a result that is not state, such as gradients, return jax.tree.leaves(grads)."
)

_Pairs: TypeAlias = list[tuple[int, int]]
"""Mirrored leaves of an argument, by position in `layout.dynamic`, and the numbers of results."""


class _Subtree(NamedTuple):
    """A subtree of the arguments or of the result: structure, position of its first leaf, depth."""

    treedef: Any
    start: int
    depth: int

    @property
    def is_array(self) -> bool:
        return self.treedef.node_data() is None

    def children(self) -> Iterator["_Subtree"]:
        start = self.start
        for child in [] if self.is_array else self.treedef.children():
            yield _Subtree(child, start, self.depth + 1)
            start += child.num_leaves

    def all(self) -> Iterator["_Subtree"]:
        yield self
        for child in self.children():
            yield from child.all()


def drift_message(
    call: Call,
    step: ReplicaFunction,
    avals: Sequence[Any],
    marks: Sequence[Mark],
    names: Sequence[str],
) -> str:
    """Returns the error message for a step that returns a donated, mirrored argument per-replica.

    Args:
        call: The call.
        step: Its traced step.
        avals: Shapes and dtypes of the results.
        marks: Marks of the results.
        names: The user's names for the inputs.

    Returns:
        The message; empty if there is no such argument.
    """
    if not call.donate_argnums or not any(mark.per_replica for mark in marks):
        return ""
    by_structure: dict[Any, list[list[_Pairs]]] = {}
    for treedef, matches in _matches(call, step, avals, call.donate_argnums):
        by_structure.setdefault(treedef, []).append(matches)
    causes: dict[str, None] = {}
    for arguments in by_structure.values():
        for matches in arguments:
            differing = [[(i, k) for i, k in p if marks[k].per_replica] for p in matches]
            # If as many mirrored results as arguments have this structure, these are the new state,
            # and the per-replica results are something else, such as gradients.
            if sum(not pairs for pairs in differing) < len(arguments) and any(differing):
                pairs = next(filter(None, differing))
                leaves = call.leaf_names
                causes |= {f"{leaves[i]}: {cause(marks[k], names)}": None for i, k in pairs}
    return divergence_message(step.name, causes) + IF_INTENDED + _NOT_STATE if causes else ""


def own_values(call: Call, traced: TracedStep, marks: Sequence[Mark]) -> dict[int, str]:
    """Finds the results that are per-replica, and new values of mirrored arguments if passed again.

    Gradients added to an argument are not its new value: each replica may have a sum of its own, as
    it may have its own random key or counter.

    Args:
        call: The call.
        traced: Its trace.
        marks: Marks of the results.

    Returns:
        Position in `layout.dynamic` and cause.
    """
    if not any(mark.per_replica for mark in marks):
        return {}
    step = traced.function
    found = _matches(call, step, traced.avals[: len(marks)], None)
    own = {
        i: k
        for _, matches in found
        for pairs in matches
        for i, k in pairs
        if marks[k].per_replica and jnp.issubdtype(traced.avals[k].dtype, jnp.inexact)
    }
    if not own:
        return {}
    kinds = dependence(traced.jaxpr, [step.num_state + i for i in own], list(own.values()))
    names = call.input_names
    return {
        i: f"{names[step.num_state + i]}: {cause(marks[k], names)}"
        for (i, k), kind in zip(own.items(), kinds, strict=True)
        if kind is Dependence.OTHER
    }


def carried_state(
    call: Call,
    step: ReplicaFunction,
    avals: Sequence[Any],
    per_replica: Sequence[bool],
    donated: Container[int] | None,
) -> list[tuple[int, int]]:
    """Finds the new values of donated arguments.

    Args:
        call: The call.
        step: Its traced step.
        avals: Shapes and dtypes of the results.
        per_replica: For each result, whether it is per-replica.
        donated: Positions of donated arguments; `None` for all, in a report, which cannot know.

    Returns:
        For each leaf of such arguments, its position among the inputs of the program, and the
        position of its new value among the results.
    """
    carried: dict[int, int] = {}
    for _, matches in _matches(call, step, avals, donated):
        for pairs in matches:
            new = {step.num_state + i: k for i, k in pairs}
            inputs, outputs = set(new), set(new.values())
            is_free = carried.keys().isdisjoint(inputs) and outputs.isdisjoint(carried.values())
            if is_free and not any(per_replica[k] for k in outputs):
                carried |= new
                break
    return list(carried.items())


def find_returned(call: Call, step: ReplicaFunction, avals: Sequence[Any]) -> set[int]:
    """Returns the positions, in `layout.dynamic`, of arguments that may come back as results."""
    found = _matches(call, step, avals, None)
    return {i for _, matches in found for pairs in matches for i, _ in pairs}


def _matches(
    call: Call, step: ReplicaFunction, avals: Sequence[Any], argnums: Container[int] | None
) -> Iterator[tuple[Any, list[_Pairs]]]:
    """Yields the structure of each argument, and of its children, with the results that match."""
    layout = call.layout
    numbers = {i for i in layout.dynamic if is_number(type(call.leaves[i]))}
    inputs = {
        i: (number, step.avals[step.num_state + number])
        for number, i in enumerate(layout.dynamic)
        if number not in layout.per_replica
    }
    arrays = [i for i in range(step.out_tree.num_leaves) if i not in step.static_results]
    outputs = {i: (k, aval) for k, (i, aval) in enumerate(zip(arrays, avals, strict=True))}
    results = list(_Subtree(step.out_tree, 0, 0).all())
    args, kwargs = _Subtree(layout.treedef, 0, -2).children()
    for number, argument in enumerate((*args.children(), *kwargs.children())):
        if argnums is not None and number not in argnums:
            continue
        if argument.is_array and argument.start in numbers:
            continue  # a loss has the type of a learning rate, by chance
        for part in (argument, *(x for x in argument.children() if not x.is_array)):
            found = [
                _pairs(part, result, inputs, outputs, numbers)
                for result in results
                # A single array may have the shape of another one by chance.
                if result.treedef == part.treedef and (result.depth < 2 or not part.is_array)
            ]
            yield part.treedef, [pairs for pairs in found if pairs]


def _pairs(
    argument: _Subtree,
    result: _Subtree,
    inputs: dict[int, tuple[int, Any]],
    outputs: dict[int, tuple[int, Any]],
    numbers: Container[int],
) -> _Pairs:
    """Pairs the leaves of an argument and a result; empty if types of arrays differ."""
    pairs = []
    for offset in range(argument.treedef.num_leaves):
        i, k = inputs.get(argument.start + offset), outputs.get(result.start + offset)
        if i is None or k is None:
            continue
        if (i[1].shape, i[1].dtype) == (k[1].shape, k[1].dtype):
            pairs.append((i[0], k[0]))
        elif argument.start + offset not in numbers:  # a number may become any array
            return []
    return pairs
