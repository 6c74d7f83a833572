"""A step that is traced, proved and ready to run, and what of its state is sharded."""

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary, ref

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from mirror._src.collectives.reduce_op import ReduceOp
from mirror._src.devices.op_log import placement_log
from mirror._src.devices.replicas import Kind
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.executors.callbacks import CallbackGuard, calls_back
from mirror._src.executors.executor import (
    CompiledProgram,
    Executor,
    MeshProgram,
    ReplicaProgram,
    Variant,
)
from mirror._src.program.shards import Shards, find_shards
from mirror._src.program.trace import struct_of, trace
from mirror._src.run.call import Call
from mirror._src.run.nnx.metrics import Update, merge
from mirror._src.run.nnx.record import Record
from mirror._src.run.plan import Merge, Plan
from mirror._src.run.step import Step, TracedStep
from mirror._src.utils.types import Array
from mirror._src.values.per_replica import PerReplica

_FREE = 4
_RUNS_FOR_ANOTHER = 8
_MOST_RETURNS = 16


class StepProgram:
    """A step that is traced, proved and ready to run.

    Args:
        traced: The step and its trace.
        plan: What the proof decided.
        call: The call that it is made for.
        executor: Compiles it.
        collectives: Its collectives in words, for the placement log.
        carried: Positions of the arguments that are state, each with that of the result that is
            its new value.

    Attributes:
        runs: How often it ran.
        looks: In how many calls there were arrays that might share memory.
        returns: The mirrored arrays that the last runs returned, as far as they are alive. None of
            them shares its memory with another array, unless JAX was asked to share it since.
    """

    def __init__(
        self,
        traced: TracedStep,
        plan: Plan,
        call: Call,
        executor: Executor,
        collectives: Sequence[tuple[str, str]],
        carried: Sequence[tuple[int, int]] = (),
    ) -> None:
        step = traced.steps[0]
        self.runs = 0
        self.shared_draws: list[str] = []
        self.drifts: Sequence[Any] = ()
        self.drifting_results: Sequence[int] = ()
        self.drifted: WeakValueDictionary[int, Array] = WeakValueDictionary()
        averaged = [("all-reduce", f"{len(plan.averaged)} batch statistics")]
        self._collectives = [*collectives, *(averaged if plan.averaged else [])]
        self._name = step.name
        self._devices = executor.replicas.devices
        self._reduces_on = executor.reduces_on
        self.fn = call.fn
        self._guard = CallbackGuard() if any(map(calls_back, traced.jaxprs)) else None
        # A step that fails in a host callback leaves its arguments as they were.
        self.donated = call.donated() if self._guard is None else []
        state = filter(step.is_donated, plan.changed) if self._guard is None else ()
        finishes = [_finish(each, jaxpr, plan) for each, jaxpr in zip(*traced[:2], strict=True)]
        self.taken: Sequence[Any] = ()  # shardings of the leaves at the last launch
        self._out_tree = _tree_of_results(step, plan)
        self.shards: Shards | None = None
        if executor.can_shard:
            self.shards = _shards(traced, plan, finishes[0], carried)
        self.kinds: Sequence[Kind] = _kinds(step.per_replica, self.shards and self.shards.inputs)
        outputs = [step.per_replica[i] for i in plan.changed] + plan.per_replica_results
        self._are_one_copy = [not is_own for is_own in plan.per_replica_results]
        self.returns: deque[list[ref[Array]]] = deque([[]], _MOST_RETURNS)
        self.looks = 0
        self._attribute_changes = step.attribute_changes
        self._static_results = step.static_results
        self._changed = plan.changed
        self.compiled: CompiledProgram = executor.compile(
            ReplicaProgram(
                step.name,
                [
                    Variant(jaxpr, finish, each.avals, ids)
                    for each, jaxpr, ids, finish in zip(*traced[:3], finishes, strict=True)
                ],
                self.kinds,
                _kinds(outputs, self.shards and self.shards.outputs),
                traced.context,
                [*state, *(step.num_state + i for i in self.donated)],
                self._guard,
                self.shards,
            )
        )
        self._results = slice(len(plan.changed), len(plan.changed) + len(step.out_names))
        self.replaces_all = plan.changed == list(range(step.num_state))

    def is_rare(self, count: int) -> bool:
        """Whether so many of its runs are few, and it is worth it to try the same again."""
        return count <= _FREE + self.runs // _RUNS_FOR_ANOTHER

    @property
    def is_simple(self) -> bool:
        """Whether a launch is all that a call takes, but for writing the new state back."""
        return (
            isinstance(self.compiled, MeshProgram)
            and self._guard is None
            and not self.drifting_results
            and not self._attribute_changes
        )

    def __call__(self, call: Call, leaves: list[Any]) -> Any:
        """Runs the program, writes the new state into the objects, returns the results."""
        if placement_log.on:
            placement_log.step(self._name, self._devices, self._collectives, self._reduces_on)
        outputs: list[Array] = []
        try:
            self.compiled([*call.state, *leaves] if call.state else leaves, outputs)
            if self._guard is not None:
                self._require_no_errors(outputs)
            self._write_back(call, outputs)
        except BaseException:  # an interrupt must not leave a model without its arrays
            if outputs and self._guard is None:
                self._write_back(call, outputs)
            raise
        leaves = outputs[self._results]
        for i in self.drifting_results:
            if isinstance(leaves[i], jax.Array):
                self.drifted[id(leaves[i])] = leaves[i]
        return self.results_of(outputs)

    def results_of(self, outputs: list[Any]) -> Any:
        """What `run` returns, of the outputs of a launch that succeeded."""
        self.runs += 1
        results = outputs[self._results]
        self.returns.append(list(map(ref, itertools.compress(results, self._are_one_copy))))
        if not self._static_results:
            return self._out_tree.unflatten(results)
        dynamic = iter(results)
        return self._out_tree.unflatten(
            self._static_results[i] if i in self._static_results else next(dynamic)
            for i in range(self._out_tree.num_leaves)
        )

    def _require_no_errors(self, outputs: Sequence[Any]) -> None:
        """Waits for the launch, and raises what a host callback raised in it."""
        assert self._guard is not None
        try:
            for output in outputs:
                jax.block_until_ready(
                    output.arrays if isinstance(output, UnstackedArrays) else output
                )
            jax.effects_barrier()
        finally:
            self._guard.raise_first()

    def _write_back(self, call: Call, outputs: Sequence[Array]) -> None:
        """Writes the new state into the objects; it may be done twice."""
        if call.record is None:
            return
        self.write_state(call.record, call.state, outputs)
        if self._attribute_changes:
            call.record.set_attributes(call.objects, self._attribute_changes)

    def write_state(self, record: Record, state: list[Any], outputs: Sequence[Any]) -> None:
        """Writes the new state, the first of the outputs, where the old one was."""
        if self.replaces_all:
            record.write(outputs[: len(state)])
            return
        new = list(state)
        for i, leaf in zip(self._changed, outputs, strict=False):
            new[i] = leaf
        record.write(new)


def shards_of(traced: TracedStep, plan: Plan, carried: Sequence[tuple[int, int]]) -> Shards:
    """What of a step would be sharded, for a report; `carried` as of `StepProgram`."""
    return _shards(traced, plan, _finish(traced.steps[0], traced.jaxprs[0], plan), carried)


def _shards(
    traced: TracedStep, plan: Plan, finish: ClosedJaxpr, carried: Sequence[tuple[int, int]]
) -> Shards:
    step = traced.steps[0]
    pairs = [(i, k) for k, i in enumerate(plan.changed) if not step.per_replica[i]]
    pairs += [(i, len(plan.changed) + k) for i, k in carried]
    n = step.group.num_replicas_in_sync
    return find_shards([traced.jaxprs[0], finish], pairs, step.per_replica, n)


def _kinds(per_replica: Sequence[bool], sharded: Mapping[int, int] | None) -> list[Kind]:
    axes = sharded or {}
    return [Kind(is_own, axes.get(i)) for i, is_own in enumerate(per_replica)]


def _tree_of_results(step: Step, plan: Plan) -> Any:
    """The structure of what `run` returns: that of the step's result, with `PerReplica` leaves."""
    per_replica = iter(plan.per_replica_results)
    slots = [
        PerReplica.from_stacked(np.zeros(1))
        if i not in step.static_results and next(per_replica)
        else 0
        for i in range(step.out_tree.num_leaves)
    ]
    return jax.tree.structure(step.out_tree.unflatten(slots))


def _finish(step: Step, proved: ClosedJaxpr, plan: Plan) -> ClosedJaxpr:
    """The program after the proved one: averages and merges state, picks what comes out."""
    num_inputs, num_results = len(step.avals), len(step.out_names)

    def finish(*values: Any) -> list[Array]:
        results = values[num_inputs : num_inputs + num_results]
        after = list(values[num_inputs + num_results :][: step.num_state])
        means = step.group._all_reduce(ReduceOp.MEAN, [after[i] for i in plan.averaged])
        for i, mean in zip(plan.averaged, means, strict=True):
            after[i] = mean
        updates = [_update(each, values, after) for each in plan.merged]
        psum = lambda arrays: step.group._all_reduce(ReduceOp.SUM, arrays)  # noqa: E731
        for each, states in zip(plan.merged, merge(updates, psum), strict=True):
            for name, i in each.places.items():
                after[i] = states[name]
        return [*(after[i] for i in plan.changed), *results]

    outputs = [struct_of(var.aval) for var in proved.jaxpr.outvars]
    # Values of 64 bit that the step made in a context of its own keep them.
    with jax.enable_x64(True):
        return trace(finish, [*step.avals, *outputs], step.group.num_replicas_in_sync)


def _update(plan: Merge, before: Sequence[Any], after: Sequence[Any]) -> Update:
    return Update(
        plan.rule,
        {name: before[i] for name, i in plan.places.items()},
        {name: after[i] for name, i in plan.places.items()},
        plan.dependences,
    )
