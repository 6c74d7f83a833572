"""What `strategy.run` does: find the program of a call, or trace, prove and compile it, and run it.

A value's way: the caller's arguments are told apart (`arguments`), nnx objects become leaves
(`nnx`), the leaves go onto the devices (`argument_placer`) and through the program (`program`), new
state goes back into the objects and results go back to the caller, mirrored ones as plain arrays.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mirror._src.collectives.cross_device_ops import CrossDeviceOps
from mirror._src.context.replica_context import ReplicaGroup
from mirror._src.devices.op_log import placement_log
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import any_deleted
from mirror._src.executors.callbacks import in_callback
from mirror._src.executors.choice import choose
from mirror._src.executors.executor import SignatureChanged
from mirror._src.executors.staged.executor import StagedExecutor
from mirror._src.program.axis import named_axis
from mirror._src.program.trace import abstract, abstract_row, context_token
from mirror._src.run.argument_placer import ArgumentPlacer, require_canonical
from mirror._src.run.arguments import (
    Layout,
    hoist,
    hoist_nested,
    kinds,
    object_names,
    require_no_tracers,
    require_static,
)
from mirror._src.run.cache import Identity, ProgramCache
from mirror._src.run.call import Call
from mirror._src.run.captured import CapturedVariables, VariablesFound
from mirror._src.run.drift_history import DriftHistory
from mirror._src.run.examined import ExaminedStep, examined_call, require_no_escaped_arrays
from mirror._src.run.mesh import outside_traces
from mirror._src.run.nnx.record import Record
from mirror._src.run.nnx.table import ObjectTable
from mirror._src.run.program import StepProgram
from mirror._src.run.program_maker import ProgramMaker
from mirror._src.run.quick import Missed, QuickCall
from mirror._src.run.shapes import Variants, variants_of
from mirror._src.run.step import TracedStep
from mirror._src.run.step_warnings import StepWarnings
from mirror._src.utils.naming import name_of
from mirror._src.utils.types import REPLICA_AXIS, StepFunction
from mirror._src.variables.variable import Variable

_MOST_ATTEMPTS = 3  # find a program, make it, and once more where another thread's change crossed


class Runner:
    """Finds, makes and runs the programs of one strategy."""

    def __init__(
        self,
        group: ReplicaGroup,
        replicas: ReplicaDevices,
        ops: CrossDeviceOps,
        *,
        shard_update: bool = False,
    ) -> None:
        self.replicas = replicas
        self._executor = choose(replicas, ops, shard_update=shard_update)
        self.holds_slices = self._executor.can_shard
        self._cache = ProgramCache()
        self._maker = ProgramMaker(group, self._executor, ops, self._cache)
        self._placer = ArgumentPlacer(group, replicas, holds_slices=self.holds_slices)
        self._objects = ObjectTable(replicas, holds_slices=self.holds_slices)
        self._captured = CapturedVariables()
        self._drifts = DriftHistory()
        self._warnings = StepWarnings()
        self._running = threading.RLock()
        self._layouts: dict[Any, Layout] = {}

    def run(
        self,
        fn: StepFunction,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        donate_argnums: tuple[int, ...] = (),
    ) -> Any:
        """Runs `fn` once per replica; see `Strategy.run`."""
        if not kwargs and not placement_log.on and not in_callback():
            try:
                quick = self._cache.quick.get((fn, donate_argnums))
            except TypeError:  # what is not hashable is refused below
                quick = None
            if quick is not None and quick.is_worth_it:
                try:
                    with outside_traces(fn), self._running:
                        found = quick(args)
                        self._placer.ran(quick.program)
                        return found
                except Missed:
                    quick.misses += 1
        return self._with_variables(fn, lambda: self._run(fn, args, kwargs, donate_argnums))

    def _with_variables(self, fn: StepFunction, attempt: Callable[[], Any]) -> Any:
        """Does something outside traces; again, if it finds variables that the step uses."""
        if in_callback():
            raise RuntimeError(
                f"{name_of(fn)} was passed to a strategy inside a host callback of a step, "
                "which waits for the callback to return. Return the values from the step and use "
                "them after strategy.run."
            )
        axis = self.replicas.axis_name
        while True:
            with outside_traces(fn):
                try:
                    if axis == REPLICA_AXIS:
                        return attempt()
                    with named_axis(axis):
                        return attempt()
                except VariablesFound as error:
                    self._captured.add(fn, error.variables)

    def _run(
        self,
        fn: StepFunction,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        donate_argnums: tuple[int, ...],
    ) -> Any:
        leaves: list[Any] | None = None
        for _ in range(_MOST_ATTEMPTS):
            # One thread at a time, from reading the state to writing it back: two that donate the
            # same buffers would end the process (JAX 0.10.2). Programs are traced outside, because
            # a step may itself start a thread that runs another one.
            with self._running:
                call = self._call(fn, args, kwargs, donate_argnums)
                if leaves is None:
                    leaves = call.layout.dynamic_leaves(call.leaves)
                are_placed = self._placer.are_placed(call.layout.per_replica, leaves)
                if not are_placed or any_deleted(leaves):
                    leaves = self._placer.placed(call, leaves)
                key = call.key
                try:
                    program = self._cache.programs.get(key)
                except TypeError:
                    require_static(fn, call.tree, call.layout, call.leaves)
                    raise
                if program is not None:
                    if self.holds_slices:
                        call, leaves = self._placer.as_wanted(program, call, leaves)
                    if self._drifts.came_back(call, leaves):
                        self._drifts.require_not_drifting(call, leaves)
                    try:
                        found = program(call, self._placer.apart(call, leaves, program))
                        self._placer.ran(program)
                        self._remember_quick(call, program)
                        return found
                    except SignatureChanged:  # other shapes, or a context that traces depend on
                        pass
            self._find(call, key, leaves)
        raise RuntimeError(
            f"{name_of(fn)} was traced and proved {_MOST_ATTEMPTS - 1} times, and each time "
            "JAX asked for another trace of it. Call strategy.run where JAX's configuration does "
            "not change meanwhile, in another thread or in the step."
        )

    def _remember_quick(self, call: Call, program: StepProgram) -> None:
        """Lets the next call like this one go the quick way, where there is one."""
        key = (call.fn, call.donate_argnums)
        known = self._cache.quick.get(key)
        if known is not None and (known.program is program or not known.is_worth_it):
            return
        layout, kwargs = call.layout, call.tree[1]
        if layout.static or layout.nested or kwargs or call.captured or self._drifts.has(call.fn):
            return
        if program.is_simple:
            misses = known.misses if known is not None else 0
            self._cache.quick[key] = QuickCall(
                call,
                program,
                self._objects,
                self._placer.are_placed,
                self._placer.separate,
                misses,
            )

    @property
    def pack_bytes(self) -> int:
        """All-reduces of at most this many bytes travel together where they can."""
        return self._executor.pack_bytes

    @property
    def is_staged(self) -> bool:
        """Whether programs are run in stages, so that there is no one program to lower."""
        return isinstance(self._executor, StagedExecutor)

    def lower(self, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The program of a call, lowered: its text, its cost and its memory. Runs nothing."""
        lowered = self.examined(fn, args, kwargs).lowered
        assert lowered is not None  # a staged one is several
        return lowered

    def examined(
        self, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> ExaminedStep:
        """Returns a call with its arrays on the devices and its program, for a report."""

        def examined() -> ExaminedStep:
            call, leaves = self._prepared(fn, args, kwargs)
            traced = self._maker.trace(call, variants_of(call, leaves, len(self.replicas)))
            program = self._find(call, call.key, leaves)
            call, leaves = self._placer.as_wanted(program, call, leaves)
            return examined_call(call, traced, program, [*call.state, *leaves])

        return self._with_variables(fn, examined)

    def examined_without_arrays(
        self,
        fn: StepFunction,
        args: Sequence[Any],
        types: Mapping[int, jax.ShapeDtypeStruct],
        donate_argnums: tuple[int, ...] = (),
    ) -> ExaminedStep:
        """Returns a call of arrays that do not exist with its program; allocates nothing for them.

        Args:
            fn: The step.
            args: Its arguments. Host arrays stand in for the arrays that do not exist, also in the
                variables of nnx objects.
            types: By the `id` of a stand-in, its type; a `PerReplica` holds one of type
                `(num_replicas, *shape)`.
            donate_argnums: As of `run`.

        Raises:
            ArrayEscapedError: If the step uses an array that does not exist and is no argument.
        """

        def type_of(leaf: Any) -> jax.ShapeDtypeStruct:
            found = types.get(id(leaf))
            return abstract(leaf) if found is None else found

        def examined() -> ExaminedStep:
            objects, tree = hoist_nested(args, {})
            leaves, layout = self._flatten(fn, tree)
            require_static(fn, tree, layout, leaves)
            captured = self.captured(fn)
            objects = [*objects, *captured]
            record = Record(objects, {}) if objects else None
            state = (record.read() or []) if record is not None else []
            call = Call(fn, tree, layout, leaves, objects, record, state, donate_argnums, captured)
            own = [
                *(call.structure.is_own if call.structure is not None else ()),
                *(i in layout.per_replica for i in range(len(layout.dynamic))),
            ]
            avals = list(map(type_of, [*state, *layout.dynamic_leaves(leaves)]))
            rows = [abstract_row(x) if o else x for x, o in zip(avals, own, strict=True)]
            variants = ((tuple(rows), tuple(range(len(self.replicas)))),)
            traced = self._maker.trace(call, variants)
            require_no_escaped_arrays(traced)
            return examined_call(call, traced, self._make(call, variants), avals)

        return self._with_variables(fn, examined)

    def _prepared(
        self, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Call, list[Any]]:
        """A call and its leaves on the replicas' devices."""
        with self._running:
            call = self._call(fn, args, kwargs, ())
            leaves = self._placer.placed(call, call.layout.dynamic_leaves(call.leaves))
        for i in call.layout.per_replica:
            self._placer.require_rows(call, i, leaves[i])
        return call, leaves

    def _call(
        self,
        fn: StepFunction,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        donate_argnums: tuple[int, ...],
    ) -> Call:
        objects, tree = hoist(args, kwargs)
        leaves, layout = self._flatten(fn, tree)
        if layout.nested:
            objects, tree = hoist_nested(args, kwargs)
            leaves, layout = self._flatten(fn, tree)
        captured = self.captured(fn)
        objects = [*objects, *captured] if captured else objects
        record, state = None, list[Any]()
        if objects:
            names = functools.partial(object_names, fn, tree, objects, captured)
            record, state = self._objects.record(objects, names)
        return Call(fn, tree, layout, leaves, objects, record, state, donate_argnums, captured)

    def captured(self, fn: StepFunction) -> Sequence[Variable]:
        """The variables that a step was found to use without being passed them."""
        return self._captured.of(fn)

    def prepare(self, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> StepProgram:
        """The program of a call, traced and proved, so that its variables are known. Not run."""

        def prepared() -> StepProgram:
            call, leaves = self._prepared(fn, args, kwargs)
            return self._find(call, call.key, leaves)

        return self._with_variables(fn, prepared)

    def _flatten(self, fn: StepFunction, tree: Any) -> tuple[list[Any], Layout]:
        leaves, treedef = jax.tree.flatten(tree)
        types = tuple(map(type, leaves))
        layout = self._layouts.get((treedef, types))
        if layout is None:
            require_no_tracers(fn, tree)
            # A number, a NumPy array and a jax.Array have one layout: `step=0` becomes an array.
            form = (treedef, kinds(treedef, types))
            layout = self._layouts.get(form) or Layout(*form)
            self._layouts[form] = self._layouts[treedef, types] = layout
        return leaves, layout

    def _find(self, call: Call, key: Any, leaves: list[Any]) -> StepProgram:
        """The program for these very shapes and dtypes in this context, made if there is none."""
        self._drifts.require_not_drifting(call, leaves)
        require_canonical(call, leaves)
        for i in call.layout.per_replica:
            self._placer.require_rows(call, i, leaves[i])
        variants = variants_of(call, leaves, len(self.replicas))
        exact = (key, variants, Identity(context_token()))
        with self._cache.making(exact):
            program = self._cache.programs.get(exact) or self._make(call, variants)
            self._cache.programs[key] = self._cache.programs[exact] = program
        return program

    def traced(
        self, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Call, TracedStep]:
        """A call and its traces, for a report; neither proved nor run."""

        def traced() -> tuple[Call, TracedStep]:
            call, leaves = self._prepared(fn, args, kwargs)
            return call, self._maker.trace(call, variants_of(call, leaves, len(self.replicas)))

        return self._with_variables(fn, traced)

    def _make(self, call: Call, variants: Variants) -> StepProgram:
        """Makes a program, warns of what is rarely meant, remembers what later calls must know."""
        program, drifts, notes, marks = self._maker.make(call, variants)
        if program.shards is not None:
            self._placer.accept_slices(program.shards)
        if drifts:
            self._drifts.expect_mirrored(call, program, drifts)
            self._cache.quick.clear()  # last: what is remembered from now on knows of it
        self._warnings.of_proof(call, notes, marks, len(self.replicas))
        self._remember(call.fn, program)
        return program

    def _remember(self, fn: StepFunction, program: StepProgram) -> None:
        """Notices a step that is a new function object each time, and bounds what is kept."""
        if self._cache.is_full:
            self._cache.clear()
            self._placer.forget_all()
            self._captured.clear()
            self._drifts.clear()
            self._warnings.clear()
        superseded = self._cache.superseded(fn, program)
        if superseded:
            self._placer.forget(set(map(id, superseded)))
            kept = self._cache.forget(set(map(id, superseded)))
            self._captured.keep_only(kept)
            self._drifts.keep_only(kept)
            self._warnings.of_fresh_functions(fn)
