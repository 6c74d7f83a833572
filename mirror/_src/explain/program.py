"""`strategy.inspect`: what the proof found in a step, in words."""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from mirror._src.collectives.reduce_op import ReduceOp
from mirror._src.explain.collectives import CollectiveRow, collectives_of, gathers_of
from mirror._src.program.marks import Mark
from mirror._src.program.match import join_marks
from mirror._src.program.proof import prove
from mirror._src.program.shards import Shards
from mirror._src.program.trace import trace
from mirror._src.run.call import Call
from mirror._src.run.drift import carried_state, causes_of, drifting, find_drifts
from mirror._src.run.plan import LeafOutcome, Plan, cause, divergence, fates, find_merges, unmerged
from mirror._src.run.program import shards_of
from mirror._src.run.runner import Runner
from mirror._src.run.step import TracedStep
from mirror._src.utils.errors import ReplicaDivergenceError, bytes_in_words, counted, describe
from mirror._src.utils.modules import set_module
from mirror._src.utils.tables import Table
from mirror._src.utils.types import StepFunction

_MOST_LINES = 2
_UNTOUCHED = "the step does not write to it"
_AFTER = "run itself, after the step"


@dataclass(frozen=True)
class ValueRow:
    """A result or a variable of a step.

    Attributes:
        name: the user's name for it: `result['loss']`, `model.first.kernel`.
        value: its dtype and shape, of one replica: `float32[12,32]`.
        state: `"mirrored"`, `"per-replica"`, `"averaged"`, `"merged"`, `"diverges"` or
            `"unchanged"`.
        why: what made it so.
    """

    name: str
    value: str
    state: str
    why: str


@set_module("mirror")
@dataclass(frozen=True, repr=False)
class ProgramReport:
    """What the proof found in a step; `print` it, or let a notebook show it.

    Attributes:
        step: the step's name.
        num_replicas: how many replicas would run it.
        results: a row for each result.
        variables: a row for each variable of the nnx objects.
        collectives: where replicas communicate, in the order of the program.
        problems: why `run` would refuse the step, and the fix; empty where it would not.
        sharding: With `shard_update=True`, a row for each array of the state that the step changes:
            whether it is `"sharded"` or `"mirrored"`, and why. Arguments that are state and are not
            nnx objects are taken for donated.
    """

    step: str
    num_replicas: int
    results: tuple[ValueRow, ...]
    variables: tuple[ValueRow, ...]
    collectives: tuple[CollectiveRow, ...]
    problems: tuple[str, ...] = ()
    sharding: tuple[ValueRow, ...] = ()

    @property
    def in_step(self) -> bool:
        """Whether the replicas are proved to stay in step."""
        return not self.problems

    @property
    def heading(self) -> str:
        """The one line that says most."""
        proved = "they stay in step" if self.in_step else "run would refuse it"
        count = sum(row.state == "per-replica" for row in self.results)
        own = f"; {counted(count, 'result')} per-replica, each replica has its own" if count else ""
        return f"{self.step} on {self.num_replicas} replicas: {proved}{own}"

    @property
    def values_table(self) -> Table:
        """The results and the variables."""
        rows = [(r.name, r.value, r.state, r.why) for r in (*self.results, *self.variables)]
        return Table(("value", "of one replica", "is", "why"), rows)

    @property
    def collectives_table(self) -> Table:
        """The collectives."""
        rows = (
            (str(i), r.in_words, str(r.num_leaves), bytes_in_words(r.num_bytes), r.often, r.line)
            for i, r in enumerate(self.collectives)
        )
        return Table(("", "collective", "leaves", "bytes", "runs", "line"), rows)

    @property
    def sharding_table(self) -> Table:
        """What of the state is sharded."""
        rows = [(row.name, row.value, row.state, row.why) for row in self.sharding]
        return Table(("state", "of all replicas", "is", "why"), rows)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        communication = (
            str(self.collectives_table)
            if self.collectives
            else "No collectives: replicas never communicate."
        )
        sharded = [str(self.sharding_table)] if self.sharding else []
        parts = [self.heading, str(self.values_table), *sharded, communication, *self.problems]
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        parts = [f"<b>{html.escape(self.heading)}</b>", self.values_table._repr_html_()]
        if self.sharding:
            parts.append(self.sharding_table._repr_html_())
        if self.collectives:
            parts.append(self.collectives_table._repr_html_())
        return "".join([*parts, *(f"<pre>{html.escape(text)}</pre>" for text in self.problems)])


def describe_program(
    runner: Runner, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]
) -> ProgramReport:
    """See `Strategy.program`."""
    call, traced = runner.traced(fn, args, kwargs)
    step, program = traced.steps[0], traced.jaxprs[0]
    problems: list[str] = []
    marks = _marks(traced, call.input_names, problems)
    results, after, keys = traced.apart(marks)
    metrics = call.structure.metrics if call.structure is not None else []
    merges, unmergeable = find_merges(
        metrics, call.slots, after, traced.jaxprs, len(results), lambda: marks
    )
    if unmergeable:
        problems.append(unmerged(step.name, unmergeable))
    merged = [i for merge in merges for i in merge.places.values()]
    found = fates(call.slots, traced.given, after, keys, merged)
    diverging = [i for i, fate in enumerate(found) if fate is LeafOutcome.DIVERGING]
    if diverging:
        names = call.input_names
        lines = [f"{call.slots[i][1]}: {cause(after[i], names)}" for i in diverging]
        problems.append(divergence(step.name, lines))
    avals = traced.avals
    drifts = [d for d in find_drifts(call, step, avals[: len(results)], results) if not d.is_bare]
    if drifts:
        problems.append(drifting(step.name, causes_of(drifts)))
    ends = len(results), len(results) + step.num_state
    averaged = [i for i, fate in enumerate(found) if fate is LeafOutcome.AVERAGED]
    shards = None
    if runner.holds_slices and not problems and len(traced.steps) == 1:
        changed = [i for i, fate in enumerate(found) if fate is not LeafOutcome.UNCHANGED]
        plan = Plan(changed, averaged, list(merges), [mark.per_replica for mark in results])
        shards = _shards(call, traced, plan)
    n, limit = len(runner.replicas), runner.pack_bytes
    scattered = [each.eqn for each in shards.scattered] if shards else []
    return ProgramReport(
        step.name,
        n,
        tuple(_results(call, step.out_names, avals[: ends[0]], results)),
        tuple(_variables(call, avals[ends[0] : ends[1]], after, found)),
        (
            *collectives_of(program, limit, scattered=scattered),
            *_averaging(traced, [avals[ends[0] + i] for i in averaged], limit),
            *(gathers_of(shards, n, limit, _AFTER) if shards else []),
        ),
        tuple(problems),
        tuple(_sharding(call, step.avals, shards, n)) if shards else (),
    )


def _shards(call: Call, traced: TracedStep, plan: Plan) -> Shards:
    step, differs = traced.steps[0], plan.per_replica_results
    avals = traced.avals[: len(differs)]
    return shards_of(traced, plan, carried_state(call, step, avals, differs, donated=True))


def _sharding(
    call: Call, avals: Sequence[Any], shards: Shards, num_replicas: int
) -> Iterator[ValueRow]:
    """A row for each array of the state that the step changes."""
    names = call.input_names
    part = f"1/{num_replicas} on each device"
    for i in sorted({*shards.inputs, *shards.reasons}):
        sharded = i in shards.inputs
        why = f"{part}, along axis {shards.inputs[i]}" if sharded else shards.reasons[i]
        state = "sharded" if sharded else "mirrored"
        yield ValueRow(names[i], describe(avals[i]), state, why)


def _marks(traced: TracedStep, names: Sequence[str], problems: list[str]) -> Sequence[Mark]:
    """Marks of the outputs; what `run` would refuse is a problem."""
    n = traced.steps[0].group.num_replicas_in_sync
    refused: list[str] = []
    rows = zip(traced.steps, traced.jaxprs, strict=True)
    proved = [
        prove(jaxpr, step.per_replica, n, problems=refused, names=names) for step, jaxpr in rows
    ]
    problems += dict.fromkeys(refused)
    if len(proved) == 1:
        return proved[0]
    try:
        return join_marks(traced.jaxprs, proved)
    except ReplicaDivergenceError as error:
        problems.append(str(error))
        return proved[0]


def _averaging(
    traced: TracedStep, avals: Sequence[Any], pack_bytes: int
) -> Iterator[CollectiveRow]:
    """The collective in which `run` averages batch statistics."""
    if avals:
        group = traced.steps[0].group
        mean = lambda *leaves: group._all_reduce(ReduceOp.MEAN, list(leaves))  # noqa: E731
        leaves = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        program = trace(mean, leaves, group.num_replicas_in_sync)
        yield from collectives_of(program, pack_bytes, _AFTER)


def _results(
    call: Call, names: Sequence[str], avals: Sequence[Any], marks: Sequence[Mark]
) -> Iterator[ValueRow]:
    for name, aval, mark in zip(names, avals, marks, strict=True):
        state = "per-replica" if mark.per_replica else "mirrored"
        yield ValueRow(name, describe(aval), state, _why(mark, call.input_names))


def _variables(
    call: Call, avals: Sequence[Any], marks: Sequence[Mark], found: Sequence[LeafOutcome]
) -> Iterator[ValueRow]:
    names = call.input_names
    for (slot, name), aval, mark, fate in zip(call.slots, avals, marks, found, strict=True):
        state, why = _STATES[fate], _why(mark, names)
        if fate is LeafOutcome.UNCHANGED:
            is_key = issubclass(slot.kind, nnx.RngKey)
            why = "each replica draws with one of its own made of it" if is_key else _UNTOUCHED
            state = "per-replica" if slot.is_own else state
        elif fate is LeafOutcome.AVERAGED:
            why = f"run averages batch statistics after the step; {why}"
        elif fate is LeafOutcome.MERGED:
            why = f"run merges nnx metrics after the step; {why}"
        elif fate is LeafOutcome.OWN:
            why = "each replica keeps a value of its own (synchronization='on_read')"
        elif fate is LeafOutcome.DIVERGING:
            why = f"{why} without an all-reduce"
        yield ValueRow(name, describe(aval), state, why)


_STATES = {
    LeafOutcome.UNCHANGED: "unchanged",
    LeafOutcome.MIRRORED: "mirrored",
    LeafOutcome.AVERAGED: "averaged",
    LeafOutcome.MERGED: "merged",
    LeafOutcome.OWN: "per-replica",
    LeafOutcome.DIVERGING: "diverges",
}


def _why(mark: Mark, names: Sequence[str]) -> str:
    if isinstance(mark.origin, int):
        return f"depends on {names[mark.origin]}"
    if mark.origin is not None:
        return f"because of {mark.origin}"
    behind = sorted(mark.behind)
    if not behind:
        return "computed from mirrored values only"
    rest = len(behind) - _MOST_LINES
    more = f", and {rest} more" if rest > 0 else ""
    return ", ".join(behind[:_MOST_LINES]) + more
