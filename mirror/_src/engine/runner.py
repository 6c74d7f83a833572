"""`Runner`: implements `strategy.run`.

A call classifies its arguments (`arguments`), flattens the nnx objects (`nnx`), puts the leaves on
the devices (`argument_placer`), finds the program or makes it (`step`, `analysis`), and runs it
(`program`). The new state is written back into the objects. Mirrored results are returned as plain
arrays.
"""

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mirror._src.base.naming import name_of
from mirror._src.base.types import PyTree, StepFunction
from mirror._src.cluster import store
from mirror._src.cluster.ledger import ledger
from mirror._src.devices.launch import require_not_forked, started_in
from mirror._src.devices.malloc import keep_freed_memory
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import require_not_lost
from mirror._src.engine.agreement import require_agreement
from mirror._src.engine.analysis import Analysis, analyze
from mirror._src.engine.argument_placer import ArgumentPlacer, Prepared, require_canonical
from mirror._src.engine.arguments import (
    HOISTS,
    Call,
    Layout,
    hoist_nested,
    kinds,
    object_names,
    require_no_tracers,
    require_static,
)
from mirror._src.engine.choice import choose, fitting
from mirror._src.engine.closures import changed_attribute, stale_array
from mirror._src.engine.cross_device_ops import CrossDeviceOps
from mirror._src.engine.executor import Executor, SignatureChanged, uncollected
from mirror._src.engine.host_values import HostValues
from mirror._src.engine.mesh import outside_traces
from mirror._src.engine.nnx.record import ObjectTable, Record
from mirror._src.engine.program import (
    ExaminedStep,
    StandIn,
    StepProgram,
    examine,
    require_no_escaped_arrays,
)
from mirror._src.engine.replica_context import ReplicaGroup
from mirror._src.engine.replica_function import (
    TracedStep,
    Types,
    VariablesFound,
    trace_step,
    types_of,
)
from mirror._src.engine.step import Step, Steps, warn_about_step
from mirror._src.engine.variable import Variable
from mirror._src.jaxprs.trace import abstract, abstract_row, context_token
from mirror._src.passes.callbacks import in_callback

_logger = logging.getLogger("mirror")
_MAX_ATTEMPTS = 4  # find; make; reshard; again, if another thread changed JAX's settings


class Runner:
    """Finds, makes and runs the programs of one strategy."""

    def __init__(
        self,
        group: ReplicaGroup,
        replicas: ReplicaDevices,
        ops: CrossDeviceOps,
        *,
        chooses: bool = False,
    ) -> None:
        require_not_forked()
        self._process = started_in()
        if replicas.on_cpus:
            keep_freed_memory()
        self.replicas = replicas
        self._ops = ops
        self.executor = choose(replicas, ops)
        self.chooses = chooses
        self.choice = ""
        self._steps = Steps()
        self._group = group
        self._placer = ArgumentPlacer(group, replicas)
        self._objects = ObjectTable(replicas)
        self._host_values: HostValues | None = None
        if replicas.spans_processes:
            self._host_values = HostValues(self._objects)
        self._running = threading.RLock()
        self.on_new_step: Callable[[Call, Analysis, set[str]], None] | None = None

    def run(
        self,
        fn: StepFunction,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        donate_argnums: tuple[int, ...] = (),
    ) -> Any:
        """Runs `fn` once per replica; see `Strategy.run`."""
        if os.getpid() != self._process:
            require_not_forked()
        try:
            if self._host_values is not None:
                store.require_not_stopped()
            return self._with_variables(fn, self._run, fn, args, kwargs, donate_argnums)
        except Exception as error:
            if self._host_values is not None:
                store.require_not_stopped(error)  # of which this error is a consequence
            raise

    def borrow(self, tree: PyTree) -> PyTree:
        """Returns mirrored arrays for `run`; see `ArgumentPlacer.borrow`."""
        return self._placer.borrow(tree)

    def _with_variables(
        self, fn: StepFunction, attempt: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Calls `attempt` outside of traces, and again if it found variables that the step uses."""
        if in_callback():
            raise RuntimeError(
                f"{name_of(fn)} was passed to a strategy inside a host callback of a step, "
                "which waits for the callback to return. Return the values from the step, and use "
                "them after strategy.run."
            )
        while True:
            with outside_traces(fn):
                try:
                    return attempt(*arguments)
                except VariablesFound as error:
                    self._steps.of(fn).capture(fn, error.variables)

    def _run(
        self,
        fn: StepFunction,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        donate_argnums: tuple[int, ...],
    ) -> Any:
        step = self._steps.get(fn) or self._steps.of(fn)
        placed: list[Any] | None = None
        found: tuple[Any, StepProgram] | None = None
        reshards = False
        for _ in range(_MAX_ATTEMPTS):
            has_slices = self.replicas.slice_bytes is not None  # `_find` may choose otherwise
            # The lock is held from reading the state to writing it back: two threads that donate
            # the same buffers would end the process (JAX 0.10.2). It is not held while a step is
            # traced and compiled: other threads continue, and the step may start a thread that runs
            # another step and wait for it.
            with self._running:
                call = self._call(fn, step, args, kwargs, donate_argnums)
                key = call.key
                try:
                    program = step.programs.get(key)
                except Exception:
                    require_static(fn, call.tree, call.layout, call.leaves)
                    raise
                if found is not None and found[0] == key:
                    program = found[1]  # another thread may have run other shapes since
                passed = call.layout.dynamic_leaves(call.leaves)
                prepared = self._placer.prepare(call, passed if placed is None else placed, program)
                leaves = placed = prepared.leaves
                if program is not None:
                    if reshards or (has_slices and not program.is_rare(program.num_reshards)):
                        call, leaves = self._placer.reshard(program, call, leaves)
                    if self._host_values is not None:
                        self._agree(call, program, passed, leaves, prepared)
                    captured, runs = program.captured_arrays, program.runs
                    # At 1, 2, 4, 8, ... runs: a look takes longer than a call of a small step.
                    if captured and runs and not runs & (runs - 1):
                        step.warn("stale", stale_array(call, captured))
                    if program.attributes and "attributes" not in step.warned:
                        step.warn("attributes", changed_attribute(call, program.attributes))
                    try:
                        ready = self._placer.copy_repeated(call, leaves, program, prepared)
                        if prepared.unexpected is None or prepared.unexpected:
                            self._placer.expect(call, ready, program)
                        result = program(call, ready, self._placer.recent)
                        if self._host_values is not None:
                            self._host_values.note_results(call, program)
                        return result
                    except SignatureChanged:  # other shapes, or another trace context
                        require_not_lost(program.label, [*call.state, *leaves])
                    except RuntimeError:
                        require_not_lost(program.label, [*call.state, *leaves])
                        raise
                    except ValueError as error:
                        # JAX has compared the shardings of all leaves, in C++.
                        if reshards or not has_slices or "harding" not in str(error):
                            raise
                        program.num_reshards += 1
                        reshards = True
                        continue
            found = key, self._find(call, key, leaves, compiles=True)
            reshards = has_slices
        raise RuntimeError(
            f"{name_of(fn)} was traced several times, but JAX requested another trace "
            "every time, because its configuration changed. Do not change jax.config in the step, "
            "or in another thread while strategy.run compiles."
        )

    def _agree(
        self,
        call: Call,
        program: StepProgram,
        passed: list[Any],
        leaves: list[Any],
        prepared: Prepared,
    ) -> None:
        """Compares a program with the other processes, at once if it is new, else while it runs."""
        assert self._host_values is not None
        is_new = program.to_agree_on is not None
        if program.to_agree_on is not None:
            inputs = [*call.state, *leaves]
            program.identity = require_agreement(call, program.to_agree_on, self.executor, inputs)
            program.to_agree_on = None
            ledger.changes_program(program.identity)  # which was just compared
        unexpected = prepared.unexpected
        self._host_values.note(
            *(call, program, passed, leaves, prepared.new),
            unexpected=call.layout.mirrored if unexpected is None else unexpected,
            are_compared=is_new,
        )

    @property
    def is_staged(self) -> bool:
        """Whether steps run as several programs, so that they cannot be lowered as one."""
        return self.executor.name == "staged"

    def lower(self, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the lowered program of a call, with its text, cost and memory. Runs nothing."""
        lowered = self.examined(fn, args, kwargs).lowered
        assert lowered is not None  # the executor is not staged
        return lowered

    def examined(
        self, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> ExaminedStep:
        """Returns a call with its placed arrays and its program, for a report."""

        def attempt() -> ExaminedStep:
            call, leaves = self._prepared(fn, args, kwargs)
            traced = self._trace(call, types_of(call, leaves))
            program = self._find(call, call.key, leaves)
            call, leaves = self._placer.reshard(program, call, leaves)
            return examine(call, traced, program, [*call.state, *leaves])

        return self._with_variables(fn, attempt)

    def examined_without_arrays(
        self, fn: StepFunction, args: Sequence[Any], donate_argnums: tuple[int, ...] = ()
    ) -> ExaminedStep:
        """Returns a call and its program for arrays that do not exist, without allocating them.

        Args:
            fn: The step function.
            args: Arguments of the step, with a `StandIn` for each array that does not exist, also
                in the variables of nnx objects.
            donate_argnums: As in `run`.

        Raises:
            ArrayEscapedError: If the step uses an array that does not exist and that is not one of
                its arguments.
        """

        def attempt() -> ExaminedStep:
            objects, tree = hoist_nested(args, {})
            leaves, layout = self._flatten(fn, tree, self._steps.of(fn))
            require_static(fn, tree, layout, leaves)
            captured = self.captured(fn)
            objects = [*objects, *captured]
            record = Record(objects, {}) if objects else None
            state = (record.read() or []) if record is not None else []
            call = Call(fn, tree, layout, leaves, objects, record, state, donate_argnums, captured)
            values = [*state, *layout.dynamic_leaves(leaves)]
            avals = [x.declared if isinstance(x, StandIn) else abstract(x) for x in values]
            rows = [abstract_row(x) if o else x for x, o in zip(avals, call.is_own, strict=True)]
            traced = self._trace(call, tuple(rows))
            require_no_escaped_arrays(traced)
            return examine(call, traced, self._make(call, tuple(rows)), avals)

        return self._with_variables(fn, attempt)

    def _prepared(
        self, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Call, list[Any]]:
        """Returns a call and its leaves on the replicas' devices."""
        with self._running:
            call = self._call(fn, self._steps.of(fn), args, kwargs, ())
            leaves = self._placer.place(call, call.layout.dynamic_leaves(call.leaves))
        for i in call.layout.per_replica:
            self._placer.require_num_replicas(call, i, leaves[i])
        return call, leaves

    def _call(
        self,
        fn: StepFunction,
        step: Step,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        donate_argnums: tuple[int, ...],
    ) -> Call:
        objects, tree = HOISTS[step.depth](args, kwargs)
        leaves, layout = self._flatten(fn, tree, step)
        while layout.nested:
            step.depth += 1
            objects, tree = HOISTS[step.depth](args, kwargs)
            leaves, layout = self._flatten(fn, tree, step)
        captured = step.captured(fn) if step.variables else ()
        objects = [*objects, *captured] if captured else objects
        record: Record | None = None
        state: list[Any] = []  # not `list[Any]()`, which takes 0.3 us
        if objects:
            names = lambda: object_names(fn, tree, objects, captured)  # noqa: E731
            record, state = self._objects.record(objects, names)
        return Call(fn, tree, layout, leaves, objects, record, state, donate_argnums, captured)

    def captured(self, fn: StepFunction) -> Sequence[Variable]:
        """Returns the variables that the step is known to use without receiving them."""
        return self._steps.of(fn).captured(fn)

    def _flatten(self, fn: StepFunction, tree: Any, step: Step) -> tuple[list[Any], Layout]:
        leaves, treedef = jax.tree.flatten(tree)
        types = tuple(map(type, leaves))
        layout = step.layouts.get((treedef, types))
        if layout is None:
            require_no_tracers(fn, tree)
            # A number, a NumPy array and a jax.Array share a layout: `step=0` becomes an array.
            key = (treedef, kinds(treedef, types))
            layout = step.layouts.get(key) or Layout(*key)
            step.layouts[key] = step.layouts[treedef, types] = layout
        return leaves, layout

    def _find(
        self, call: Call, key: Any, leaves: list[Any], *, compiles: bool = False
    ) -> StepProgram:
        """Returns the program for these exact shapes, dtypes and trace context, made if needed.

        A program that runs is compiled here, where no thread waits except for the same program.
        """
        require_canonical(call, leaves)
        for i in call.layout.per_replica:
            self._placer.require_num_replicas(call, i, leaves[i])
        types = types_of(call, leaves)
        exact = (key, types, context_token())
        step = self._steps.of(call.fn)
        with step.making(exact):
            program = step.programs.get(exact)
            if program is None:
                with uncollected():
                    program = step.programs[exact] = self._make(call, types)
            if compiles:
                program.compile()
                step.programs[key] = program
        return program

    def traced(
        self, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Call, TracedStep]:
        """Returns a call and its traces, neither proved nor run, for a report."""

        def attempt() -> tuple[Call, TracedStep]:
            call, leaves = self._prepared(fn, args, kwargs)
            return call, self._trace(call, types_of(call, leaves))

        return self._with_variables(fn, attempt)

    def traced_as(self, call: Call, types: Types) -> TracedStep:
        """Returns the trace of a call for other types of its inputs, for a report.

        Args:
            call: A call of another runner.
            types: The types of its inputs.
        """
        traced = functools.partial(trace_step, self._group, self.replicas.axis_name, call, types)
        return self._with_variables(call.fn, lambda: traced({}))

    def analyzed(
        self, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Call, Analysis]:
        """Returns a call and its analysis, with the errors that `run` would raise, for a report."""

        def attempt() -> tuple[Call, Analysis]:
            call, leaves = self._prepared(fn, args, kwargs)
            return call, self._analyze(call, types_of(call, leaves), reports=True)

        return self._with_variables(fn, attempt)

    def warned(self, fn: StepFunction) -> set[str]:
        """Returns the kinds of the warnings about a step that were issued, or need not be."""
        return self._steps.of(fn).warned

    def _trace(self, call: Call, types: Types) -> TracedStep:
        known = self._steps.of(call.fn).traces
        return trace_step(self._group, self.replicas.axis_name, call, types, known)

    def _analyze(
        self, call: Call, types: Types, executor: Executor | None = None, *, reports: bool = False
    ) -> Analysis:
        traced, donated = self._trace(call, types), None if reports else call.donate_argnums
        return analyze(call, traced, executor or self.executor, donated=donated, reports=reports)

    def _choose(self, call: Call, types: Types) -> StepProgram:
        """Chooses how the state is stored, by the memory that a step needs; returns its program."""

        def make(executor: Executor) -> StepProgram:
            program = StepProgram(self._analyze(call, types, executor), call, executor)
            program.compile()
            return program

        executor, program, self.choice = fitting(make, self.replicas, self._ops)
        with self._running:
            self.chooses = False
            self.replicas.slice_bytes = executor.replicas.slice_bytes
            self.executor, executor.replicas = executor, self.replicas
            # Other programs, and records of where arrays are, do not fit any more.
            self._steps.forget_programs()
            self._placer = ArgumentPlacer(self._group, self.replicas)
            self._objects = ObjectTable(self.replicas)
        _logger.info("shard='auto': %s", self.choice)
        return program

    def _make(self, call: Call, types: Types) -> StepProgram:
        """Makes a program, and issues its warnings."""
        analysis = self._analyze(call, types)
        if self.chooses and analysis.has_state:
            program = self._choose(call, types)
        else:
            program = StepProgram(analysis, call, self.executor)
        self._placer.accept_sharded(program.final)
        step = self._steps.of(call.fn)
        warn_about_step(step, call, analysis, len(self.replicas))
        if self.on_new_step is not None:
            self.on_new_step(call, analysis, step.warned)
        self._steps.warn_if_recompiled(call.fn)
        self._steps.limit_size()
        return program
