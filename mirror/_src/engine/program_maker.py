"""`ProgramMaker`: traces, proves and plans a step."""

import jax

from mirror._src.base.naming import name_of
from mirror._src.engine.analysis import Analysis, analyze
from mirror._src.engine.arguments import ref_message, require_no_keras
from mirror._src.engine.cache import Identity, ProgramCache
from mirror._src.engine.call import Call
from mirror._src.engine.captured import VariablesFound
from mirror._src.engine.closures import (
    keeps_keras,
    require_nothing_bound,
    require_nothing_captured,
)
from mirror._src.engine.executor import Executor
from mirror._src.engine.failed_trace import explain_failed_trace
from mirror._src.engine.mesh import require_no_mapping
from mirror._src.engine.program import StepProgram
from mirror._src.engine.replica_context import ReplicaGroup
from mirror._src.engine.step import Step, TracedStep
from mirror._src.jaxprs.equations import arrays_in
from mirror._src.jaxprs.origins import lost_updates
from mirror._src.jaxprs.summed_noise import summed_noise
from mirror._src.jaxprs.trace import context_token, trace

Types = tuple[jax.ShapeDtypeStruct, ...]


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

    def analyze(self, call: Call, types: Types, *, reports: bool = False) -> Analysis:
        """Traces, proves and plans a call; see `analysis.analyze`."""
        return analyze(
            call,
            self.trace(call, types),
            can_shard=self._executor.can_shard,
            donated=None if reports else call.donate_argnums,
            reports=reports,
        )

    def make(self, call: Call, types: Types) -> tuple[StepProgram, Analysis]:
        """Makes the program of a call. XLA compiles it when it first runs."""
        analysis = self.analyze(call, types)
        step, jaxpr, notes = analysis.traced.step, analysis.traced.jaxpr, analysis.notes
        if notes.shared_noise:
            notes.summed_noise = summed_noise(jaxpr, step.per_replica)
        notes.changed_in_place = step.changed_in_place
        lost = lost_updates(jaxpr)
        notes.lost_updates = [update for update in lost if not step.per_replica[update.input]]
        return StepProgram(analysis, call, self._executor), analysis
