"""`StepProgram`: a traced and proved step, compiled; `ExaminedStep`: a call of one, for reports."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mirror._src.base.errors import bytes_in_words, counted, describe
from mirror._src.base.tracebacks import line_of
from mirror._src.base.types import Array, num_bytes
from mirror._src.devices.launch import wait_for
from mirror._src.devices.op_log import placement_log
from mirror._src.devices.replicas import Kind
from mirror._src.devices.transfer import UnstackedArrays
from mirror._src.engine.agreement import require_no_failure
from mirror._src.engine.analysis import Analysis
from mirror._src.engine.arguments import Call
from mirror._src.engine.closures import captured_arrays
from mirror._src.engine.executor import (
    CompiledProgram,
    Executor,
    MeshProgram,
    ReplicaProgram,
    collectives_and_callbacks,
)
from mirror._src.engine.nnx.structure import follow
from mirror._src.engine.per_replica import PerReplica
from mirror._src.engine.plan import Plan
from mirror._src.engine.recent_arrays import KnownLeaves, MirroredCopies, RecentArrays, taking
from mirror._src.engine.replica_function import ReplicaFunction, TracedStep
from mirror._src.jaxprs.equations import arrays_in
from mirror._src.passes.callbacks import CallbackGuard, calls_back, check_callbacks, is_callback
from mirror._src.passes.program import Program

_FREE_ATTEMPTS = 4
_RUNS_PER_ATTEMPT = 8


class StepProgram:
    """A traced and proved step, compiled for one set of shapes.

    Args:
        analysis: The analyzed step.
        call: Call that the program is made for.
        executor: Executor that compiles the program.

    Attributes:
        runs: Number of completed runs.
        donated: Positions, among the leaves of the arguments, of those whose buffers are donated.
        kinds: For each input, whether it is per-replica, mirrored or sharded.
        shards: The program with sharded state; `None` if the executor cannot shard.
        last_shardings: Shardings of the inputs at the last launch.
        num_reshards: Number of calls whose leaves had the shardings of another program.
        num_address_checks: Number of calls with arrays that might share memory.
        known: The leaves that later calls are expected to have, which need no check.
        copies: The mirrored copies of the plain arrays of the last call.
        to_agree_on: The program, until all processes have agreed on it; None in a single process.
        identity: What is equal in all processes that run this program, once they have agreed.
        changed: Positions of the objects' leaves that it changes, and donates.
        may_repeat_rows: Whether a `PerReplica` may be an array that a launch donates.
        label: The name of the step and its line, for messages.
        input_names: The user's names for the inputs; empty until they are needed.
        captured_arrays: The arrays and the variables that the step reads and does not receive.
        attributes: The attributes of static arguments after the trace; see `attributes_of`.
    """

    def __init__(self, analysis: Analysis, call: Call, executor: Executor) -> None:
        traced, plan, notes = analysis.traced, analysis.plan, analysis.notes
        assert analysis.finish is not None  # `run` raises the problems of an analysis
        step = traced.function
        self.runs = 0
        self._name = step.name
        self._executor = executor
        devices = executor.replicas.distinct
        check_callbacks(traced.jaxpr, len(devices))
        self._guard = CallbackGuard() if calls_back(traced.jaxpr) else None
        # With host callbacks, nothing is donated: if one fails, the arguments stay as they were.
        self.donated = call.donated() if self._guard is None else []
        state = filter(step.is_donated, plan.changed) if self._guard is None else ()
        # A `PerReplica` is stored in other ways than a mirrored array, unless that is in slices.
        is_own = step.per_replica[step.num_state :]
        has_slices = executor.replicas.slice_bytes is not None
        self.may_repeat_rows = has_slices or any(is_own[i] for i in self.donated)
        self.last_shardings: Sequence[Any] = ()
        self._out_tree = _result_tree(step, plan)
        self.final = analysis.final
        self.kinds: Sequence[Kind] = _kinds(step.per_replica, self.final.sharded_inputs)
        outputs = [step.per_replica[i] for i in plan.changed] + plan.per_replica_results
        mirrored = [i for i, is_own in enumerate(plan.per_replica_results) if not is_own]
        self._mirrored_results = taking(mirrored)
        self.known = KnownLeaves()
        self.copies = MirroredCopies()
        self.num_reshards = 0
        self.num_address_checks = 0
        self._attribute_changes = step.attribute_changes
        self._static_results = step.static_results
        self.changed = plan.changed
        replica_program = ReplicaProgram(
            step.name,
            line_of(call.fn),
            traced.jaxpr,
            analysis.finish,
            step.avals,
            self.kinds,
            _kinds(outputs, self.final.sharded_outputs),
            traced.context,
            self.final,
            [*state, *(step.num_state + i for i in self.donated)],
            self._guard,
            bool(notes.races) and len(devices) > 1,
        )
        self.compiled: CompiledProgram = executor.compile(replica_program)
        self.to_agree_on = replica_program if executor.replicas.spans_processes else None
        self.identity = self.origins = ""
        self.label = f"{step.name} ({replica_program.line})" if replica_program.line else step.name
        self.input_names: list[str] = []
        self.captured_arrays = captured_arrays(call, traced.jaxpr)
        self.attributes = step.attributes
        self._results = slice(len(plan.changed), len(plan.changed) + len(step.out_names))
        self._replaces_all = plan.changed == list(range(step.num_state))

    def is_rare(self, count: int) -> bool:
        """Whether something that happened in `count` calls is rare, so that it may happen again."""
        return count <= _FREE_ATTEMPTS + self.runs // _RUNS_PER_ATTEMPT

    def compile(self) -> None:
        """Compiles the program, unless it is compiled.

        A program of several processes is compiled when it first runs: they agree on it before, and
        the compilation may wait for the other processes.
        """
        if not self._executor.replicas.spans_processes:
            self.compiled.compile()

    def __call__(self, call: Call, leaves: list[Any], recent: RecentArrays) -> Any:
        """Runs the program, writes the new state into the objects, and returns the results.

        Args:
            call: The call.
            leaves: Its leaves on the devices; the objects have others.
            recent: Receives the mirrored results.
        """
        if placement_log.on:
            devices, reduces_on = self._executor.replicas.devices, self._executor.reduces_on
            placement_log.step(self._name, devices, _communication(self.final), reduces_on)
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
        self.runs += 1
        results = outputs[self._results]
        state = call.record.last if call.record is not None else None
        donated = leaves[self.donated[0]] if self.donated else None
        self.known.record_launch(self._mirrored_results(results), state, donated)
        recent.add(self.known.last)
        if not self._static_results:
            return self._out_tree.unflatten(results)
        dynamic = iter(results)
        return self._out_tree.unflatten(
            self._static_results[i] if i in self._static_results else next(dynamic)
            for i in range(self._out_tree.num_leaves)
        )

    def _require_no_errors(self, outputs: Sequence[Any]) -> None:
        """Waits for the launch, and raises the first exception of its host callbacks."""
        assert self._guard is not None
        try:
            for output in outputs:
                wait_for(output.arrays if isinstance(output, UnstackedArrays) else output)
            jax.effects_barrier()
            if self._executor.replicas.spans_processes:
                require_no_failure(self._name, self._guard.first)
        finally:
            self._guard.raise_first()

    def _write_back(self, call: Call, outputs: Sequence[Array]) -> None:
        """Writes the new state into the objects; may be repeated."""
        if call.record is None:
            return
        new = outputs[: len(call.state)]
        if not self._replaces_all:
            new = list(call.state)
            for i, leaf in zip(self.changed, outputs, strict=False):
                new[i] = leaf
        call.record.write(new)
        for path, name, value in self._attribute_changes:
            setattr(follow(call.objects, path), name, value)


def _communication(program: Program) -> list[tuple[str, str]]:
    """Returns what each kind of collective sends: `("all-reduce", "3 arrays, 1.5 KiB")`.

    A collective in a loop counts once.
    """
    operands: dict[str, list[Any]] = {}
    for kind, eqn, sent, _ in collectives_and_callbacks(program):
        if not is_callback(eqn):
            operands.setdefault(kind, []).extend(atom.aval for atom in sent)
    return [
        (kind, f"{counted(len(avals), 'array')}, {bytes_in_words(sum(map(num_bytes, avals)))}")
        for kind, avals in operands.items()
    ]


def _kinds(per_replica: Sequence[bool], sharded: Mapping[int, int]) -> list[Kind]:
    return [Kind(is_own, sharded.get(i)) for i, is_own in enumerate(per_replica)]


def _result_tree(step: ReplicaFunction, plan: Plan) -> Any:
    """Returns the structure of the results of `run`, with `PerReplica` for per-replica leaves."""
    per_replica = iter(plan.per_replica_results)
    slots = [
        PerReplica.from_stacked(np.zeros(1))
        if i not in step.static_results and next(per_replica)
        else 0
        for i in range(step.out_tree.num_leaves)
    ]
    return jax.tree.structure(step.out_tree.unflatten(slots))


class StandIn(np.ndarray):
    """Host array that takes no memory, in place of an array that does not exist.

    Attributes:
        declared: Shape and dtype of the array. In a `PerReplica`, the shape is
            `(num_replicas, *shape)`.
    """

    declared: jax.ShapeDtypeStruct


class ExaminedStep(NamedTuple):
    """A call that is ready to run.

    Attributes:
        call: The call.
        traced: Its trace.
        leaves: Inputs of the program: arrays, or shapes and dtypes of arrays that do not exist.
        kinds: For each input, whether it is per-replica, mirrored or sharded.
        lowered: The lowered program, not yet compiled; `None` for a staged program.
    """

    call: Call
    traced: TracedStep
    leaves: Sequence[Any]
    kinds: Sequence[Kind]
    lowered: jax.stages.Lowered | None


def examine(
    call: Call, traced: TracedStep, program: StepProgram, leaves: Sequence[Any]
) -> ExaminedStep:
    """Returns a call with its trace and its program."""
    compiled = program.compiled
    lowered = compiled.lower(leaves) if isinstance(compiled, MeshProgram) else None
    return ExaminedStep(call, traced, leaves, program.kinds, lowered)


class ArrayEscapedError(ValueError):
    """Raised if a step uses an array of another trace."""


def require_no_escaped_arrays(traced: TracedStep) -> None:
    """Rejects a step that uses an array of another trace.

    Raises:
        ArrayEscapedError: If it uses one. The message is the array's shape and dtype.
    """
    for array in arrays_in(traced.jaxpr):
        if isinstance(array, jax.core.Tracer):
            raise ArrayEscapedError(describe(array))
