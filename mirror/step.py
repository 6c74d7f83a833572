"""A step on its way to a program: the call, the function on flat leaves, the finished program."""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr

from mirror import calls
from mirror._errors import describe
from mirror._types import Array, StepFunction
from mirror.context import Gathers, ReplicaGroup, replica
from mirror.cross_device_ops import ReduceOp
from mirror.devices.log import placement_log
from mirror.devices.replicas import Kind
from mirror.executors.callbacks import CallbackGuard, calls_back
from mirror.executors.executor import (
    CompiledProgram,
    Executor,
    MeshProgram,
    ReplicaProgram,
    Variant,
)
from mirror.nnx_metrics import Update, merge
from mirror.objects import Record, Slot, Structure, is_object
from mirror.parts import Parts
from mirror.plan import Merge, Plan
from mirror.program.proof import Mark
from mirror.program.shards import Shards, find_shards
from mirror.program.trace import struct_of, trace, uncached
from mirror.values import PerReplica, is_float0
from mirror.variables import Captures, Variable

_FREE = 4
_RUNS_FOR_ANOTHER = 8
_MOST_RETURNS = 16


class Call(NamedTuple):
    """One call of `run`, its arguments told apart."""

    fn: StepFunction
    tree: tuple[tuple[Any, ...], dict[str, Any]]
    layout: calls.Layout
    leaves: list[Any]
    objects: list[Any]
    record: Record | None
    state: list[Any]
    donate_argnums: tuple[int, ...]
    captured: Sequence[Variable]

    @property
    def structure(self) -> Structure | None:
        """The structure of the nnx objects, if there are any."""
        return self.record.structure if self.record is not None else None

    @property
    def key(self) -> tuple[Any, ...]:
        """What the program of this call is found by."""
        layout = self.layout
        return (self.fn, layout, layout.key(self.leaves), self.structure, self.donate_argnums)

    @property
    def trace_key(self) -> tuple[Any, ...]:
        """What its trace is found by: the same whatever is donated."""
        return self.key[:-1]

    @property
    def object_names(self) -> list[str]:
        """The user's names for the nnx objects."""
        return calls.object_names(self.fn, self.tree, self.objects, self.captured)

    @property
    def leaf_names(self) -> list[str]:
        """The user's names for the leaves that are arrays or numbers."""
        names = calls.leaf_names(self.fn, self.tree)
        return [names[i] for i in self.layout.dynamic]

    @property
    def slots(self) -> list[tuple[Slot, str]]:
        """The place of each leaf of the nnx objects, with the user's name for it."""
        found = self.structure
        if found is None:
            return []
        return list(zip(found.leaf_slots, found.names(self.object_names), strict=True))

    @property
    def input_names(self) -> list[str]:
        """The user's names of all inputs of the program: the objects' leaves, then the others."""
        return [*(name for _, name in self.slots), *self.leaf_names]

    def donated(self) -> list[int]:
        """Positions of the leaves whose buffers the user donates."""
        num_args = len(self.tree[0])
        for argnum in self.donate_argnums:
            if not (isinstance(argnum, int) and 0 <= argnum < num_args):
                raise ValueError(
                    f"donate_argnums={self.donate_argnums}: there is no argument {argnum}; "
                    f"{calls.name_of(self.fn)} got {num_args}, numbered from 0."
                )
        paths = jax.tree_util.tree_flatten_with_path(self.tree)[0]
        donated = [
            i for i, (p, _) in enumerate(paths) if p[0].idx == 0 and p[1].idx in self.donate_argnums
        ]
        return [self.layout.dynamic.index(i) for i in donated if i in self.layout.dynamic]


class Step:
    """The user's function as a function of flat leaves, for one replica.

    It keeps what a program needs of a call, and nothing of its values.

    Args:
        group: The strategy.
        call: A call of the function.
        avals: Shapes and dtypes of the leaves: of the nnx objects' first, then of the others.
        gathers: The lengths that replicas of different shapes bring to their all-gathers.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        call: Call,
        avals: Sequence[jax.ShapeDtypeStruct],
        gathers: Gathers | None,
    ) -> None:
        self.fn = call.fn
        self.name = calls.name_of(call.fn)
        self.group = group
        self.avals = avals
        self.gathers = gathers
        self.structure = call.structure
        self.object_names = call.object_names
        self.num_state = len(call.state)
        self.num_objects = len(call.objects)
        self.layout = call.layout
        own = [i in call.layout.per_replica for i in range(len(avals) - self.num_state)]
        self._captured = list(call.captured)
        self.found: list[Variable] = []
        held = self.structure.is_own if self.structure is not None else []
        self.per_replica = [*held, *own]
        self.statics = call.layout.statics(call.leaves)
        self.attribute_changes: list[tuple[Any, str, Any]] = []
        self.keys: list[int] = []
        self.out_tree: Any = None
        self.out_names: list[str] = []
        self.static_results: dict[int, Any] = {}

    @property
    def flat(self) -> Callable[..., list[Array]]:
        """The function to trace.

        Its outputs are the results, the objects' leaves afterwards, and the PRNG keys as the
        replica had them. Messages of JAX and profiles show the user's name for it.
        """

        def flat(*leaves: Any) -> list[Array]:
            return self._run(leaves)

        flat.__name__ = flat.__qualname__ = self.name
        flat.__wrapped__ = self.fn  # type: ignore[attr-defined]
        return uncached(flat) if self.gathers is not None or Variable.in_use else flat

    def _run(self, leaves: Sequence[Any]) -> list[Array]:
        state, rest = leaves[: self.num_state], leaves[self.num_state :]
        if self.gathers is not None:
            self.gathers.restart()
        clones = self.structure.rebuild(state) if self.structure is not None else None
        objects = clones.objects if clones is not None else ()
        captures = self._captures(objects)
        self.found = captures.found
        with replica(self.group, self.gathers, captures):
            args, kwargs = self.layout.rebuild(rest, self.statics, objects)
            results = self._results(self.fn(*args, **kwargs))
            if clones is None:
                return results
            after = clones.collect(self.name, self.object_names)
            self.attribute_changes = clones.attribute_changes()
        self.keys = list(clones.keys)
        return [*results, *after, *(folded for _, folded in clones.keys.values())]

    def is_donated(self, i: int) -> bool:
        """Whether a leaf of the objects is donated; what a captured variable holds is not."""
        assert self.structure is not None
        return self.structure.leaf_slots[i].path[0] < self.num_objects - len(self._captured)

    def _captures(self, objects: Sequence[Any]) -> Captures:
        stand_ins = objects[len(objects) - len(self._captured) :]
        own = [node for _, node in nnx.iter_graph(objects) if isinstance(node, Variable)]
        return Captures(list(zip(self._captured, stand_ins, strict=True)), own)

    def _results(self, out: Any) -> list[Array]:
        paths, self.out_tree = jax.tree_util.tree_flatten_with_path(out, is_leaf=is_object)
        numbers = calls.fixed_numbers(self.out_tree)
        results, self.out_names, self.static_results = [], [], {}
        for i, (path, leaf) in enumerate(paths):
            name = "result" + calls.keys(path)
            if is_object(leaf):
                raise TypeError(
                    f"{self.name} returned the nnx object {type(leaf).__name__} as {name}. Objects "
                    "that are arguments are updated in place; return arrays."
                )
            if self._is_static(leaf, i in numbers):
                self.static_results[i] = leaf
                continue
            _require_array(self.name, name, leaf)
            self.out_names.append(name)
            results.append(jnp.asarray(leaf))
        return results

    def _is_static(self, leaf: Any, stays_number: bool) -> bool:
        """Whether a leaf of the result is not an array: returned as the trace found it."""
        if isinstance(leaf, bool):
            return True
        if isinstance(leaf, calls.ARRAY_LIKE):
            return stays_number and calls.is_number(type(leaf))
        return any(leaf is s or (type(leaf) is type(s) and leaf == s) for s in self.statics)


def _require_array(step_name: str, name: str, leaf: Any) -> None:
    if is_float0(leaf):
        raise TypeError(
            f"{step_name} returned {describe(leaf)} as {name}: JAX's gradient of an integer, which "
            "holds nothing. Leave it out: take gradients with respect to floats only."
        )
    if not isinstance(leaf, calls.ARRAY_LIKE):
        raise TypeError(
            f"{step_name} returned {describe(leaf)} as {name}. A step returns arrays, numbers, "
            "None, and what is not an array as it was passed in, in any nest of containers."
        )


class Traced(NamedTuple):
    """A step and its replica programs, one for each set of shapes; not yet proved.

    Attributes:
        steps: The step, for each set of shapes.
        jaxprs: What each was traced to. The outputs are the results, the objects' leaves
            afterwards, and the keys as the replica had them.
        replicas: The replicas that have each set of shapes.
        context: The context of the trace, see `context_token`.
    """

    steps: Sequence[Step]
    jaxprs: Sequence[ClosedJaxpr]
    replicas: Sequence[Sequence[int]]
    context: object

    @property
    def avals(self) -> Sequence[Any]:
        """Shapes and dtypes of the outputs, on the replicas of the first set of shapes."""
        return [var.aval for var in self.jaxprs[0].jaxpr.outvars]

    @property
    def given(self) -> Sequence[object]:
        """The variables of the program that hold the objects' leaves at first."""
        return self.jaxprs[0].jaxpr.invars[: self.steps[0].num_state]

    def apart(
        self, marks: Sequence[Mark]
    ) -> tuple[Sequence[Mark], Sequence[Mark], dict[int, Mark]]:
        """What is known of the results, of the objects' leaves, and of the keys."""
        start = len(self.steps[0].out_names)
        end = start + self.steps[0].num_state
        keys = zip(self.steps[0].keys, marks[end:], strict=True)
        return marks[:start], marks[start:end], dict(keys)


class Program:
    """A step that is traced, proved and ready to run.

    Args:
        traced: The step and its trace.
        plan: What the proof decided.
        call: The call that it is made for.
        executor: Compiles it.
        exchanges: Its collectives in words, for the placement log.
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
        traced: Traced,
        plan: Plan,
        call: Call,
        executor: Executor,
        exchanges: Sequence[tuple[str, str]],
        carried: Sequence[tuple[int, int]] = (),
    ) -> None:
        step = traced.steps[0]
        self.runs = 0
        self.shared_draws: list[str] = []
        self.drifts: Sequence[Any] = ()
        self.drifting_results: Sequence[int] = ()
        self.drifted: WeakValueDictionary[int, Array] = WeakValueDictionary()
        averaged = [("all-reduce", f"{len(plan.averaged)} batch statistics")]
        self._exchanges = [*exchanges, *(averaged if plan.averaged else [])]
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
            placement_log.step(self._name, self._devices, self._exchanges, self._reduces_on)
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
                jax.block_until_ready(output.arrays if isinstance(output, Parts) else output)
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


def shards_of(traced: Traced, plan: Plan, carried: Sequence[tuple[int, int]]) -> Shards:
    """What of a step would be sharded, for a report; `carried` as of `Program`."""
    return _shards(traced, plan, _finish(traced.steps[0], traced.jaxprs[0], plan), carried)


def _shards(
    traced: Traced, plan: Plan, finish: ClosedJaxpr, carried: Sequence[tuple[int, int]]
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
