"""A step on its way to a program: the call, the function on flat leaves, the finished program."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from mirror.executors.executor import (
    CompiledProgram,
    Executor,
    ReplicaProgram,
    SignatureChanged,
    Variant,
)
from mirror.objects import Record, Slot, Structure, is_object
from mirror.plan import Plan
from mirror.program.proof import Mark
from mirror.program.trace import abstract, afresh
from mirror.values import PerReplica
from mirror.variables import Captures, Variable


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
        """Positions of the leaves whose buffers the user gives up."""
        num_args = len(self.tree[0])
        for argnum in self.donate_argnums:
            if not (isinstance(argnum, int) and 0 <= argnum < num_args):
                raise ValueError(
                    f"donate_argnums={self.donate_argnums}: there is no argument {argnum}; "
                    f"{calls.name_of(self.fn)} got {num_args}, numbered from 0."
                )
        paths = jax.tree_util.tree_flatten_with_path(self.tree)[0]
        given_up = [
            i for i, (p, _) in enumerate(paths) if p[0].idx == 0 and p[1].idx in self.donate_argnums
        ]
        return [self.layout.dynamic.index(i) for i in given_up if i in self.layout.dynamic]


class Step:
    """The user's function as a function of flat leaves, for one replica.

    It keeps what a program needs of a call, and nothing of its values.
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
        self.statics = call.layout.key(call.leaves)[0]
        self.attribute_changes: list[tuple[Any, str, Any]] = []
        self.out_tree: Any = None
        self.out_names: list[str] = []

    def __call__(self, *leaves: Any) -> tuple[list[Array], list[Array], dict[int, Array]]:
        """The results, the objects' leaves afterwards, and the keys as this replica had them."""
        if list(map(abstract, leaves)) != list(self.avals):
            raise SignatureChanged
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
                return results, [], {}
            after = clones.collect(self.name, self.object_names)
            self.attribute_changes = clones.attribute_changes()
        return results, after, {i: folded for i, (_, folded) in clones.keys.items()}

    def gives_up(self, i: int) -> bool:
        """Whether a leaf of the objects is given up; what a captured variable holds is not."""
        assert self.structure is not None
        return self.structure.leaf_slots[i].path[0] < self.num_objects - len(self._captured)

    def traced_as(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """How a function that calls the step is to be traced."""
        return afresh(fn) if self.gathers is not None or Variable.in_use else fn

    def _captures(self, objects: Sequence[Any]) -> Captures:
        stand_ins = objects[len(objects) - len(self._captured) :]
        own = [node for _, node in nnx.iter_graph(objects) if isinstance(node, Variable)]
        return Captures(list(zip(self._captured, stand_ins, strict=True)), own)

    def _results(self, out: Any) -> list[Array]:
        paths, self.out_tree = jax.tree_util.tree_flatten_with_path(out, is_leaf=is_object)
        self.out_names = ["result" + calls.keys(path) for path, _ in paths]
        results = []
        for name, (_, leaf) in zip(self.out_names, paths, strict=True):
            if is_object(leaf):
                raise TypeError(
                    f"{self.name} returned the nnx object {type(leaf).__name__} as {name}. Objects "
                    "that are arguments are updated in place; return arrays."
                )
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
                raise TypeError(
                    f"{self.name} returned {describe(leaf)} as {name}. A step returns arrays, "
                    "numbers or None, in any nest of containers."
                )
            results.append(jnp.asarray(leaf))
        return results


class Traced(NamedTuple):
    """A step and its replica programs, one for each set of shapes; not yet proved.

    Attributes:
        steps: the step, for each set of shapes.
        jaxprs: what each was traced to. The outputs are the results, the objects' leaves
            afterwards, and the keys as the replica had them.
        keys: positions of those keys among the objects' leaves.
    """

    steps: Sequence[Step]
    jaxprs: Sequence[ClosedJaxpr]
    keys: Sequence[int]

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
        return marks[:start], marks[start:end], dict(zip(self.keys, marks[end:], strict=True))


class Program:
    """A step that is traced, proved and ready to run."""

    def __init__(
        self,
        steps: Sequence[tuple[Step, Sequence[int]]],
        plan: Plan,
        call: Call,
        executor: Executor,
        exchanges: Sequence[tuple[str, str]],
    ) -> None:
        step = steps[0][0]
        self.runs = 0
        self.shared_draws: list[str] = []
        averaged = [("all-reduce", f"{len(plan.averaged)} batch statistics")]
        self._exchanges = [*exchanges, *(averaged if plan.averaged else [])]
        self._name = step.name
        self._devices = executor.replicas.devices
        self._reduces_on = executor.reduces_on
        self.fn = call.fn
        self.donated = call.donated()
        self._attribute_changes = step.attribute_changes
        self._changed = plan.changed
        self.compiled: CompiledProgram = executor.compile(
            ReplicaProgram(
                step.name,
                [Variant(_replica(each, plan), each.avals, ids) for each, ids in steps],
                step.per_replica,
                [step.per_replica[i] for i in plan.changed] + plan.per_replica_results,
                [*filter(step.gives_up, plan.changed), *(step.num_state + i for i in self.donated)],
            )
        )
        self._results = slice(len(plan.changed), len(plan.changed) + len(step.out_names))
        slots = [PerReplica.from_stacked(np.zeros(1)) if d else 0 for d in plan.per_replica_results]
        self._out_tree: Any = jax.tree.structure(step.out_tree.unflatten(slots))

    def __call__(self, call: Call, leaves: list[Any]) -> Any:
        """Runs the program, writes the new state into the objects, returns the results."""
        if placement_log.on:
            placement_log.step(self._name, self._devices, self._exchanges, self._reduces_on)
        outputs: list[Array] = []
        try:
            self.compiled([*call.state, *leaves] if call.state else leaves, outputs)
            self._write_back(call, outputs)
        except BaseException:  # an interrupt must not leave a model without its arrays
            if outputs:
                self._write_back(call, outputs)
            raise
        self.runs += 1
        return self._out_tree.unflatten(outputs[self._results])

    def _write_back(self, call: Call, outputs: Sequence[Array]) -> None:
        """Writes the new state into the objects; it may be done twice."""
        record = call.record
        if record is None:
            return
        new = list(call.state)
        for i, leaf in zip(self._changed, outputs, strict=False):
            new[i] = leaf
        record.write(new)
        if self._attribute_changes:
            record.set_attributes(call.objects, self._attribute_changes)


def _replica(step: Step, plan: Plan) -> Callable[..., tuple[Array, ...]]:
    """What one replica runs: the changed state, its batch statistics averaged, and the results."""

    def run(*leaves: Any) -> tuple[Array, ...]:
        results, after, _ = step(*leaves)
        if step.found:
            raise RuntimeError(
                f"{step.name} uses {', '.join(v.described for v in step.found)} now, and did not "
                "when it was traced before: it must do the same each time. Take what it remembers "
                "from call to call out of it, or pass it as an argument."
            )
        means = step.group._all_reduce(ReduceOp.MEAN, [after[i] for i in plan.averaged])
        for i, mean in zip(plan.averaged, means, strict=True):
            after[i] = mean
        return (*[after[i] for i in plan.changed], *results)

    return step.traced_as(run)
