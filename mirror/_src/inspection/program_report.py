"""`strategy.inspect`: reports which values of a step are mirrored, and its collectives."""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flax import nnx
from jax.extend.core import JaxprEqn

from mirror._src.base.errors import bytes_in_words, counted, describe
from mirror._src.base.public_names import set_module
from mirror._src.base.terminal import Report, Table
from mirror._src.base.types import Array, StepFunction, num_bytes
from mirror._src.engine.arguments import Call
from mirror._src.engine.plan import LeafOutcome
from mirror._src.engine.runner import Runner
from mirror._src.inspection.equality import EqualityReport, compare
from mirror._src.jaxprs.collective_eqns import contains_collective
from mirror._src.jaxprs.equations import (
    equations,
    inner_programs,
    jaxpr_of,
    line_within,
    with_inner,
)
from mirror._src.jaxprs.marks import Mark
from mirror._src.jaxprs.primitives import CALLBACK, STATEFUL, op_of
from mirror._src.passes.evaluate import Lowering
from mirror._src.passes.gathers import num_gathers
from mirror._src.passes.pack import packed
from mirror._src.passes.program import Operation, Program, Settings

_AFTER = "strategy.run, after the step"
_LOOPS = frozenset({"scan", "while"})


@dataclass(frozen=True)
class CollectiveRow:
    """One collective of a step.

    Attributes:
        kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"` in a sharded update, or the name of
            another JAX primitive.
        op: `"sum"`, `"max"`, `"min"`, or empty. A mean is a sum that is divided afterwards. A
            minimum or maximum comes with a second collective, which propagates NaNs.
        num_leaves: Number of arrays in the collective.
        num_bytes: Bytes that each replica contributes to one execution.
        line: The user's line.
        loop: `"scan"` or `"while"` if the collective is inside a loop, else empty.
        trips: Number of executions per step. `None` inside a `while` loop, where it is unknown.
        operations: The collectives of the program, which share a buffer.
    """

    kind: str
    op: str
    num_leaves: int
    num_bytes: int
    line: str
    loop: str = ""
    trips: int | None = 1
    operations: tuple[Operation, ...] = field(default=(), repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle has no operations, which belong to a program of this process."""
        return {**vars(self), "operations": ()}

    @property
    def in_words(self) -> str:
        """Kind and operation, such as `all-reduce (sum)`."""
        return f"{self.kind} ({self.op})" if self.op else self.kind

    @property
    def often(self) -> str:
        """Number of executions per step, in words."""
        if not self.loop:
            return "once"
        return f"in a {self.loop}" + (f", {self.trips} times" if self.trips is not None else "")

    @property
    def least_trips(self) -> int:
        """Number of executions per step; 1 for a `while` loop, whose trip count is unknown."""
        return 1 if self.trips is None else self.trips

    def execute(self, operands: Sequence[Array], axis_name: str) -> list[Any]:
        """Executes the collective on other arrays, inside a replica."""
        run, rest = Lowering({}, {}, Settings(axis_name=axis_name)), iter(operands)
        return [
            result
            for operation in self.operations
            for result in run.evaluate(operation, [next(rest) for _ in operation.sent])
        ]

    @property
    def avals(self) -> list[Any]:
        """Shapes and dtypes of the operands on each replica."""
        return [atom.aval for operation in self.operations for atom in operation.sent]


def collectives_of(
    program: Program,
    pack_bytes: int,
    after: Collection[int] = (),
    around: tuple[JaxprEqn, ...] = (),
) -> Iterator[CollectiveRow]:
    """Yields the collectives of a flat program, in its order.

    Args:
        program: The program after the passes.
        pack_bytes: Size limit for packing in loops and branches, as for `Lowering`.
        after: The `id`s of the equations that `run` adds after the step.
        around: Equations that enclose the program, outermost first.
    """
    for operation in program.operations:
        within = (*around, *operation.around)
        if operation.body is not None:
            body = operation.body
            yield from collectives_of(body, pack_bytes, after, (*within, operation.eqn))
            continue
        members = operation.members
        first = members[0]
        if not first.collective:
            for inner in inner_programs(first.eqn.params.values()):
                if operation.kind == "equation" and contains_collective(jaxpr_of(inner)):
                    inside = packed(inner, Settings(pack_bytes=pack_bytes))
                    yield from collectives_of(inside, pack_bytes, after, (*within, first.eqn))
            continue
        loops = [outer for outer in within if outer.primitive.name in _LOOPS]
        is_gather = first.kind == "gather"
        sent = [atom for each in members for atom in each.sent]
        is_last = is_gather and first.outputs[0] in program.outputs
        is_after = is_last or id(first.eqn) in after
        yield CollectiveRow(
            first.collective,
            "" if is_gather else op_of(first.eqn.primitive.name),
            len(sent),
            sum(num_bytes(atom.aval) for atom in sent),
            _AFTER if is_after else line_within(first.eqn, within),
            loops[-1].primitive.name if loops else "",
            _trips(loops),
            members,
        )


def _trips(loops: Sequence[JaxprEqn]) -> int | None:
    if any(loop.primitive.name == "while" for loop in loops):
        return None
    return math.prod(loop.params["length"] for loop in loops)


_MOST_LINES = 2
_KEY = "each replica samples with its own key, derived from this one"


class ValueRow(NamedTuple):
    """Result or variable of a step.

    Attributes:
        name: The user's name: `result['loss']`, `model.first.kernel`.
        value: Dtype and shape on one replica: `float32[12,32]`.
        state: `"mirrored"`, `"per-replica"`, `"averaged"`, `"merged"`, `"diverges"` or
            `"unchanged"`. In `ProgramReport.sharding`, `"sharded"` or `"mirrored"`.
        why: Reason for the state.
    """

    name: str
    value: str
    state: str
    why: str


@set_module("mirror")
@dataclass(frozen=True, repr=False)
class ProgramReport(Report):
    """Result of `strategy.inspect`; `print` it, or display it in a notebook.

    Attributes:
        step: Name of the step.
        num_replicas: Number of replicas of the strategy.
        results: One row per result.
        variables: One row per variable of the nnx objects.
        collectives: Collectives in program order.
        problems: Errors that `run` would raise, with the fix. Empty if `run` accepts the step.
        sharding: With `shard=`, one row per array of the state that the step changes, and per array
            that is stored in slices: the axis and how often it is gathered, or the reason why it is
            mirrored. State outside nnx objects is assumed to be donated.
        shard: With `shard="auto"`, once a step has been run: how the state is stored, and why.
        device_dependent: With `replicas=`, the operations whose results may depend on the number of
            devices, such as host callbacks. Empty if the step has the same bits on any number of
            devices. None without `replicas=`.
    """

    step: str
    num_replicas: int
    results: tuple[ValueRow, ...]
    variables: tuple[ValueRow, ...]
    collectives: tuple[CollectiveRow, ...]
    problems: tuple[str, ...] = ()
    sharding: tuple[ValueRow, ...] = ()
    shard: str = ""
    device_dependent: tuple[str, ...] | None = None
    _compare: Callable[[], EqualityReport] = field(kw_only=True, repr=False, compare=False)

    @functools.cached_property
    def equals_one_device(self) -> EqualityReport:
        """Whether the step computes what one device computes on the whole batch.

        It is not computed before it is read. The step is then traced again, with the whole batch.
        """
        return self._compare()

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle has the result of `equals_one_device` in place of the step."""
        return {**vars(self), "equals_one_device": self.equals_one_device, "_compare": None}

    @property
    def in_step(self) -> bool:
        """Whether the replicas are proved to stay in sync."""
        return not self.problems

    @property
    def heading(self) -> str:
        """Summary in one line."""
        verdict = "proved to stay in sync" if self.in_step else "run would reject the step"
        count = sum(row.state == "per-replica" for row in self.results)
        per_replica = f"; {counted(count, 'per-replica result')}" if count else ""
        bits = "" if self.device_dependent is None else "; same bits on any number of devices"
        if self.device_dependent:
            bits = f"; the number of devices may change {', '.join(self.device_dependent)}"
        replicas = counted(self.num_replicas, "replica")
        return f"{self.step} on {replicas}: {verdict}{per_replica}{bits}"

    @property
    def values_table(self) -> Table:
        """Table of the results and variables."""
        columns = ("value", "on one replica", "state", "reason")
        return Table(columns, (*self.results, *self.variables))

    @property
    def collectives_table(self) -> Table:
        """Table of the collectives."""
        rows = (
            (str(i), r.in_words, str(r.num_leaves), bytes_in_words(r.num_bytes), r.often, r.line)
            for i, r in enumerate(self.collectives)
        )
        return Table(("", "collective", "leaves", "bytes", "executed", "line"), rows)

    @property
    def sharding_table(self) -> Table:
        """Table of the arrays of the state, sharded or mirrored."""
        return Table(("array", "full shape", "state", "reason"), self.sharding)

    def _parts(self) -> Iterator[Table | list[str] | str]:
        yield self.values_table
        if self.shard:
            yield [f"shard: {self.shard}"]
        if self.sharding:
            yield self.sharding_table
        yield self.collectives_table if self.collectives else ["The step has no collectives."]
        yield from self.problems


def describe_program(
    runner: Runner,
    single: Callable[[], Runner],
    fn: StepFunction,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> ProgramReport:
    """Implements `Strategy.inspect`.

    Args:
        runner: Runner of the replicas.
        single: Returns a runner of one device.
        fn: The step.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    call, analysis = runner.analyzed(fn, args, kwargs)
    traced, final = analysis.traced, analysis.final
    step, avals, finish = traced.function, traced.avals, analysis.finish
    results, after, _ = traced.split(analysis.marks)
    ends = len(results), len(results) + step.num_state
    after_step = set(map(id, equations(finish.jaxpr))) if finish is not None else set[int]()
    return ProgramReport(
        step.name,
        len(runner.replicas),
        tuple(_list_results(call, step.out_names, avals[: ends[0]], results)),
        tuple(_list_variables(call, avals[ends[0] : ends[1]], after, analysis.outcomes)),
        tuple(collectives_of(final, runner.executor.settings.pack_bytes, after_step)),
        tuple(analysis.problems),
        tuple(_list_sharding(call, step.avals, final, len(runner.replicas))),
        runner.choice,
        tuple(dict.fromkeys(_device_dependent(final))) if runner.replicas.in_turn else None,
        _compare=functools.partial(compare, call, analysis, single),
    )


def _device_dependent(final: Program) -> Iterator[str]:
    """Yields the operations whose results the host determines, or a state outside the program."""
    for operation in final.everywhere():
        for eqn in with_inner(operation.eqn):
            name = eqn.primitive.name
            if name in CALLBACK | STATEFUL and eqn.outvars:
                yield f"{name} at {line_within(eqn, operation.around)}"


def _list_sharding(
    call: Call, avals: Sequence[Any], final: Program, num_replicas: int
) -> Iterator[ValueRow]:
    """Yields one row per array of the state that the step changes."""
    names = call.input_names
    shard = f"1/{num_replicas} on each device"
    axes = final.sharded_inputs
    gathers = num_gathers(final)
    for i in sorted({*axes, *final.reasons}):
        why = f"{shard}, along axis {axes[i]}" if i in axes else final.reasons[i]
        if count := gathers[final.inputs[i]]:
            why += f", gathered {counted(count, 'time')}"
        state = "sharded" if i in axes else "mirrored"
        yield ValueRow(names[i], describe(avals[i]), state, why)


def _list_results(
    call: Call, names: Sequence[str], avals: Sequence[Any], marks: Sequence[Mark]
) -> Iterator[ValueRow]:
    for name, aval, mark in zip(names, avals, marks, strict=True):
        state = "per-replica" if mark.per_replica else "mirrored"
        yield ValueRow(name, describe(aval), state, _explain_mark(mark, call.input_names))


def _list_variables(
    call: Call, avals: Sequence[Any], marks: Sequence[Mark], outcomes: Sequence[LeafOutcome]
) -> Iterator[ValueRow]:
    names = call.input_names
    rows = zip(call.slots, avals, marks, outcomes, strict=True)
    for (slot, name), aval, mark, outcome in rows:
        state, why = _STATES[outcome]
        if outcome is LeafOutcome.UNCHANGED:
            why = _KEY if issubclass(slot.kind, nnx.RngKey) else why
            state = "per-replica" if slot.is_own else state
        why = why.format(because=_explain_mark(mark, names))
        yield ValueRow(name, describe(aval), state, why)


_STATES = {
    LeafOutcome.UNCHANGED: ("unchanged", "the step does not change it"),
    LeafOutcome.MIRRORED: ("mirrored", "{because}"),
    LeafOutcome.AVERAGED: ("averaged", "run averages batch statistics after the step; {because}"),
    LeafOutcome.MERGED: ("merged", "run merges nnx metrics after the step; {because}"),
    LeafOutcome.OWN: ("per-replica", "every replica has its own value (synchronization='on_read')"),
    LeafOutcome.DIVERGING: ("diverges", "{because} without an all-reduce"),
}


def _explain_mark(mark: Mark, names: Sequence[str]) -> str:
    if isinstance(mark.origin, int):
        return f"depends on {names[mark.origin]}"
    if mark.origin is not None:
        return f"because of {mark.origin}"
    collectives = sorted(mark.reduced_by)
    if not collectives:
        return "computed from mirrored values only"
    rest = len(collectives) - _MOST_LINES
    more = f", and {rest} more" if rest > 0 else ""
    return ", ".join(collectives[:_MOST_LINES]) + more
