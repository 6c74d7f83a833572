"""`ProgramMaker`: traces, proves and plans a step."""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from mirror._src.base.errors import ReplicaDivergenceError
from mirror._src.base.naming import name_of
from mirror._src.engine.arguments import ref_message, require_no_keras
from mirror._src.engine.cache import Identity, ProgramCache
from mirror._src.engine.call import Call
from mirror._src.engine.captured import VariablesFound
from mirror._src.engine.closures import (
    keeps_keras,
    require_nothing_bound,
    require_nothing_captured,
)
from mirror._src.engine.drift import carried_state, require_no_drift
from mirror._src.engine.executor import Executor
from mirror._src.engine.failed_trace import explain_failed_trace
from mirror._src.engine.mesh import require_no_mapping
from mirror._src.engine.plan import find_merges, make_plan, unmerged_message
from mirror._src.engine.program import StepProgram
from mirror._src.engine.replica_context import ReplicaGroup
from mirror._src.engine.stale import captured_arrays
from mirror._src.engine.step import Step, TracedStep
from mirror._src.jaxprs.collective_eqns import summarize_collectives
from mirror._src.jaxprs.equations import arrays_in
from mirror._src.jaxprs.marks import Mark
from mirror._src.jaxprs.origins import lost_updates
from mirror._src.jaxprs.proof import Notes, prove
from mirror._src.jaxprs.summed_noise import summed_noise
from mirror._src.jaxprs.trace import context_token, trace

Types = tuple[jax.ShapeDtypeStruct, ...]


class NewProgram(NamedTuple):
    """A new program, and the findings of the proof.

    Attributes:
        program: The program.
        notes: Observations that deserve a warning.
        marks: Marks of all outputs.
    """

    program: StepProgram
    notes: Notes
    marks: Sequence[Mark]


class ProgramMaker:
    """Makes the programs of one strategy.

    Args:
        group: The strategy.
        executor: Runs the programs.
        cache: Cache of the traces.
    """

    def __init__(self, group: ReplicaGroup, executor: Executor, cache: ProgramCache) -> None:
        self._group = group
        self._executor = executor
        self._cache = cache

    def trace(self, call: Call, types: Types) -> TracedStep:
        """Returns the trace of a call for the types of its inputs; made once."""
        context = context_token()
        key = (call.trace_key, types, Identity(context))
        traces = self._cache.of(call.fn).traces
        traced = traces.get(key)
        if traced is None:
            traced = traces[key] = self._new_trace(call, types, context)
        return traced

    def _new_trace(self, call: Call, types: Types, context: object) -> TracedStep:
        require_no_keras(call.fn, call.tree, call.layout, call.leaves)
        require_nothing_bound(call.fn)
        step = Step(self._group, call, types)
        try:
            with keeps_keras(call.fn):
                jaxpr = trace(step.flat, types, self._group.num_replicas_in_sync)
        except Exception as error:
            explain_failed_trace(call, Step.CALLER, error)
            raise
        require_no_mapping(call.fn, jaxpr)
        if any(hasattr(var.aval, "inner_aval") for var in jaxpr.jaxpr.constvars):
            raise TypeError(ref_message(f"A value that {name_of(call.fn)} captures"))
        if step.new_captures:
            raise VariablesFound({id(variable): variable for variable in step.new_captures})
        step.release()
        require_nothing_captured(call.fn, list(arrays_in(jaxpr)))
        return TracedStep(step, jaxpr, context)

    def make(self, call: Call, types: Types) -> NewProgram:
        """Traces, proves and plans a call. XLA compiles the program when it first runs."""
        traced = self.trace(call, types)
        step, jaxpr, n = traced.step, traced.jaxpr, self._group.num_replicas_in_sync
        notes, names = Notes(), call.input_names
        marks = prove(jaxpr, step.per_replica, n, notes, names=names)
        results, after, keys = traced.split(marks)
        avals = traced.avals
        dtypes = [aval.dtype for aval in avals[len(results) : len(results) + len(after)]]
        metrics = call.structure.metrics if call.structure is not None else []

        def detailed() -> Sequence[Mark]:
            return prove(jaxpr, step.per_replica, n, problems=[])

        merges, problems = find_merges(metrics, call.slots, after, jaxpr, len(results), detailed)
        if problems:
            raise ReplicaDivergenceError(unmerged_message(step.name, problems))
        plan = make_plan(
            step.name, call.slots, traced.given, results, after, keys, names, dtypes, merges
        )
        require_no_drift(call, step, avals[: len(results)], results, names)
        carried: list[tuple[int, int]] = []
        if self._executor.can_shard:
            differs = plan.per_replica_results
            carried = carried_state(call, step, avals[: len(results)], differs, call.donate_argnums)
        if notes.shared_noise:
            notes.summed_noise = summed_noise(jaxpr, step.per_replica)
        notes.changed_in_place = step.changed_in_place
        lost = lost_updates(jaxpr)
        notes.lost_updates = [update for update in lost if not step.per_replica[update.input]]
        words = summarize_collectives(jaxpr.jaxpr)
        program = StepProgram(
            traced, plan, call, self._executor, words, carried, has_races=bool(notes.races)
        )
        program.shared_samples = list(dict.fromkeys(notes.shared_samples))
        program.captured_arrays = captured_arrays(call.fn, jaxpr)
        return NewProgram(program, notes, marks)
