"""`analyze`: proves and plans a traced step. `run` executes what `inspect` shows."""

import functools
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var

from mirror._src.base.errors import ReplicaDivergenceError
from mirror._src.base.types import Array
from mirror._src.engine.arguments import Call
from mirror._src.engine.executor import Executor
from mirror._src.engine.nnx.metrics import merge
from mirror._src.engine.plan import (
    LeafOutcome,
    Merge,
    Plan,
    carried_state,
    cause,
    divergence_message,
    drift_message,
    find_merges,
    leaf_outcomes,
    unmerged_message,
)
from mirror._src.engine.reduce_op import ReduceOp
from mirror._src.engine.replica_context import replica
from mirror._src.engine.replica_function import TracedStep
from mirror._src.engine.variable import Variable
from mirror._src.jaxprs.marks import Mark
from mirror._src.jaxprs.origins import lost_updates, summed_noise
from mirror._src.jaxprs.proof import Notes, prove
from mirror._src.jaxprs.trace import program_of, struct_of, trace
from mirror._src.passes.passes import rewritten
from mirror._src.passes.program import Program


class Analysis(NamedTuple):
    """Facts about a step, before it is compiled.

    Attributes:
        traced: The step and its trace.
        notes: Observations that deserve a warning; complete unless it is for a report.
        marks: Marks of all outputs.
        outcomes: Effect of the step on each leaf of the objects.
        problems: Messages of the errors that `run` raises. Empty if `run` accepts the step.
        plan: Execution plan.
        finish: The program after the proved one, whose inputs are its inputs and its outputs: it
            averages and merges state, and selects the outputs. None if there are problems.
        final: The program after the passes.
        has_state: Whether the step changes objects, or returns the new value of an argument.
    """

    traced: TracedStep
    notes: Notes
    marks: Sequence[Mark]
    outcomes: Sequence[LeafOutcome]
    problems: Sequence[str]
    plan: Plan
    finish: ClosedJaxpr | None
    final: Program
    has_state: bool


def analyze(
    call: Call,
    traced: TracedStep,
    executor: Executor,
    *,
    donated: Container[int] | None,
    reports: bool = False,
) -> Analysis:
    """Proves and plans a traced step.

    Args:
        call: The call.
        traced: Its trace.
        executor: The executor that will run it.
        donated: Positions of donated arguments; None if they are unknown, in a report.
        reports: Whether errors are collected instead of raised. The marks then also record the
            collectives that each output was computed from.

    Raises:
        ReplicaDivergenceError: If the replicas' state would differ after the step.
        TypeError: If a batch statistic to average is not a floating-point number.
    """
    step, jaxpr, n = traced.function, traced.jaxpr, traced.function.group.num_replicas_in_sync
    names, slots, notes, problems = call.input_names, call.slots, Notes(), list[str]()
    found = problems if reports else None
    marks = prove(jaxpr, step.per_replica, n, notes, found, names, step.axis_name)
    problems = list(dict.fromkeys(problems))
    results, after, keys = traced.split(marks)
    avals = traced.avals

    again = functools.partial(prove, jaxpr, step.per_replica, n, axis_name=step.axis_name)
    detailed = lambda: marks if reports else again(problems=[])  # noqa: E731
    metrics = call.structure.metrics if call.structure is not None else []
    merges, unmerged = find_merges(metrics, slots, after, jaxpr, len(results), detailed)
    if unmerged:
        problems.append(unmerged_message(step.name, unmerged))
    merged = [i for merge in merges for i in merge.positions.values()]
    outcomes = leaf_outcomes(slots, traced.given, after, keys, merged)
    by_outcome = lambda *kinds: [i for i, o in enumerate(outcomes) if o in kinds]  # noqa: E731
    averaged, diverging = by_outcome(LeafOutcome.AVERAGED), by_outcome(LeafOutcome.DIVERGING)
    for i in averaged if not problems else ():
        if not jnp.issubdtype(dtype := avals[len(results) + i].dtype, jnp.inexact):
            raise TypeError(
                f"{slots[i][1]} is an nnx.BatchStat that differs between replicas, but as "
                f"{dtype} it cannot store their mean. Use a float, or reduce it in the step: "
                'mirror.all_reduce("sum", x).'
            )
    if diverging:
        causes = (f"{slots[i][1]}: {cause(after[i], names)}" for i in diverging)
        message = divergence_message(step.name, causes)
        if any(issubclass(slots[i][0].kind, Variable) for i in diverging):
            message += '\nOr let the variable do it: mirror.Variable(..., aggregation="mean").'
        problems.append(message)
    drift = drift_message(call, step, avals[: len(results)], results, names)
    problems += [drift] if drift else []
    if problems and not reports:
        raise ReplicaDivergenceError(problems[0])
    if not reports:
        if notes.shared_noise:
            notes.summed_noise = summed_noise(jaxpr, step.per_replica)
        notes.changed_in_place = step.changed_in_place
        lost = lost_updates(jaxpr)
        notes.lost_updates = [update for update in lost if not step.per_replica[update.input]]
    changed = [i for i, outcome in enumerate(outcomes) if outcome is not LeafOutcome.UNCHANGED]
    plan = Plan(changed, averaged, list(merges), [mark.per_replica for mark in results])
    finish = None if problems else average_and_merge(traced, plan)
    programs = [jaxpr] if finish is None else [jaxpr, finish]
    settings = executor.settings._replace(num_replicas=n, per_replica=step.per_replica)
    least, kept = executor.replicas.slice_bytes, executor.kept_bytes
    if least is not None and finish is not None:
        state = _state(call, traced, plan, donated)
        settings = settings._replace(state=state, min_bytes=least, kept_bytes=kept)
    final = rewritten(programs, settings)
    has_state = bool(changed or settings.state)
    return Analysis(traced, notes, marks, outcomes, problems, plan, finish, final, has_state)


def _state(
    call: Call, traced: TracedStep, plan: Plan, donated: Container[int] | None
) -> list[tuple[int, int]]:
    """Returns the positions of state among the inputs, and of its new value among the outputs."""
    step, differs = traced.function, plan.per_replica_results
    carried = carried_state(call, step, traced.avals[: len(differs)], differs, donated)
    pairs = [(i, k) for k, i in enumerate(plan.changed) if not step.per_replica[i]]
    return pairs + [(i, len(plan.changed) + k) for i, k in carried]


def average_and_merge(traced: TracedStep, plan: Plan) -> ClosedJaxpr:
    """Returns the program after the proved one; see `Analysis.finish`."""
    step = traced.function
    all_reduce = step.group.cross_device_ops.all_reduce
    num_inputs, num_results = len(step.avals), len(step.out_names)

    def finish(*values: Any) -> list[Array]:
        results = values[num_inputs : num_inputs + num_results]
        after = list(values[num_inputs + num_results :][: step.num_state])
        means = all_reduce(ReduceOp.MEAN, [after[i] for i in plan.averaged])
        for i, mean in zip(plan.averaged, means, strict=True):
            after[i] = mean
        rounds = [
            each.rule.rounds(_states(each, values), _states(each, after), each.dependences)
            for each in plan.merged
        ]
        merged = merge(rounds, functools.partial(all_reduce, ReduceOp.SUM))
        for metric, states in zip(plan.merged, merged, strict=True):
            for name, i in metric.positions.items():
                after[i] = states[name]
        return [*(after[i] for i in plan.changed), *results]

    if not (plan.averaged or plan.merged):  # the usual case, which needs no trace
        inputs = list(map(Var, [*traced.jaxpr.in_avals, *traced.avals]))
        return ClosedJaxpr(program_of(inputs, finish(*inputs), []), ())
    outputs = [struct_of(aval) for aval in traced.avals]
    n, name = step.group.num_replicas_in_sync, step.axis_name
    # 64-bit types keep values that the step made under its own setting.
    with jax.enable_x64(True), replica(step.group, name):
        return trace(finish, [*step.avals, *outputs], n, name)


def _states(metric: Merge, values: Sequence[Any]) -> dict[str, Any]:
    return {name: values[i] for name, i in metric.positions.items()}
