"""What `strategy.run` does: find the program of a call, or trace, prove and compile it, and run it.

A value's way: the caller's arguments are told apart (`calls`), nnx objects become leaves
(`objects`), the leaves go through the program (`executors`), new state goes back into the objects
and results go back to the caller, mirrored ones as plain arrays (`step`).
"""

import functools
import operator
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Sharding

from mirror import calls
from mirror._errors import ReplicaDivergenceError, describe
from mirror._types import REPLICA_AXIS, Array, StepFunction
from mirror.context import Gathers, LengthsUnknown, ReplicaGroup
from mirror.cross_device_ops import CrossDeviceOps
from mirror.devices.log import placement_log
from mirror.devices.replicas import Kind, ReplicaDevices, any_deleted, buffers_of, move
from mirror.drift import Drift, carried_state, drifting, find_drifts, require_none_certain
from mirror.executors.callbacks import in_callback
from mirror.executors.choice import choose, choose_for_unequal
from mirror.executors.executor import MeshProgram, SignatureChanged
from mirror.executors.staged import StagedExecutor
from mirror.objects import ObjectTable, Record
from mirror.parts import Parts
from mirror.plan import find_merges, make_plan, unmerged
from mirror.program import exchanges
from mirror.program.axis import named_axis
from mirror.program.inner import arrays_in
from mirror.program.match import join_marks
from mirror.program.proof import Mark, Notes, prove
from mirror.program.trace import abstract, abstract_row, context_token, trace
from mirror.quick import Missed, QuickCall
from mirror.step import Call, Program, Step, Traced
from mirror.values import is_float0, is_numeric
from mirror.variables import Variable

Variants = tuple[tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[int, ...]], ...]

_FRESH_FUNCTIONS = 3
_sharding_of = operator.attrgetter("sharding")
_MOST_PROGRAMS = 256
_MOST_RECENT = 8
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
        self._group = group
        self.replicas = replicas
        self._executor = choose(replicas, ops, shard_update=shard_update)
        self.holds_slices = self._executor.can_shard
        self._for_unequal = functools.cache(lambda: choose_for_unequal(self._executor, ops))
        self._objects = ObjectTable(replicas, holds_slices=self.holds_slices)
        self._captured: dict[StepFunction, tuple[tuple[Variable, ...], Any]] = {}
        self._lock = threading.Lock()
        self._running = threading.RLock()
        self._layouts: dict[Any, calls.Layout] = {}
        self._programs: dict[Any, Program] = {}
        self._traces: dict[Any, Traced] = {}
        self._making: dict[Any, threading.RLock] = {}
        self._quick: dict[tuple[StepFunction, tuple[int, ...]], QuickCall] = {}
        # By identity, because comparing hundreds of shardings would cost as much as a launch. JAX
        # puts one object on all that a program returns: ours, or an equal one that it met before.
        self._mirrored: dict[int, Sharding] = {id(replicas.mirrored): replicas.mirrored}
        self._stacked: dict[int, Sharding] = {id(replicas.stacked): replicas.stacked}
        self._one_mirrored = id(replicas.mirrored)
        self._met: WeakValueDictionary[int, Array] = WeakValueDictionary()
        self._owners: WeakValueDictionary[int, Array] = WeakValueDictionary()
        self._recent: deque[Program] = deque(maxlen=_MOST_RECENT)
        self._by_code: dict[Any, list[Program]] = {}
        self._warned: set[Any] = set()
        self._drifting: dict[Any, dict[str, tuple[str, StepFunction | None]]] = {}
        self._drifted: WeakValueDictionary[int, Array] = WeakValueDictionary()

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
                quick = self._quick.get((fn, donate_argnums))
            except TypeError:  # what is not hashable is refused below
                quick = None
            if quick is not None and quick.is_worth_it:
                try:
                    with calls.outside_traces(fn), self._running:
                        found = quick(args)
                        self._ran(quick.program)
                        return found
                except Missed:
                    quick.misses += 1
        return self._with_variables(fn, lambda: self._run(fn, args, kwargs, donate_argnums))

    def _with_variables(self, fn: StepFunction, attempt: Callable[[], Any]) -> Any:
        """Does something outside traces; again, if it finds variables that the step uses."""
        if in_callback():
            raise RuntimeError(
                f"{calls.name_of(fn)} was passed to a strategy inside a host callback of a step, "
                "which waits for the callback to return. Return the values from the step and use "
                "them after strategy.run."
            )
        axis = self.replicas.axis_name
        while True:
            with calls.outside_traces(fn):
                try:
                    if axis == REPLICA_AXIS:
                        return attempt()
                    with named_axis(axis):
                        return attempt()
                except VariablesFound as error:
                    self._remember_variables(fn, error.variables)

    def _remember_variables(self, fn: StepFunction, found: Sequence[Variable]) -> None:
        around = calls.variables_around(fn)
        with self._lock:
            known, _ = self._captured.get(fn, ((), ()))
            new = {id(variable): variable for variable in (*known, *found)}
            self._captured[fn] = tuple(new.values()), around

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
                are_placed = self._are_placed(call.layout.per_replica, leaves)
                if not are_placed or any_deleted(leaves):
                    leaves = self._placed(call, leaves)
                key = call.key
                try:
                    program = self._programs.get(key)
                except TypeError:
                    calls.require_static(fn, call.tree, call.layout, call.leaves)
                    raise
                if program is not None:
                    if self.holds_slices:
                        call, leaves = self._as_wanted(program, call, leaves)
                    if self._drifting and self._came_back(call, leaves):
                        self._require_not_drifting(call, leaves)
                    try:
                        found = program(call, self._apart(call, leaves, program))
                        self._ran(program)
                        self._remember_quick(call, program)
                        return found
                    except SignatureChanged:  # other shapes, or a context that traces depend on
                        pass
            self._find(call, key, leaves)
        raise RuntimeError(
            f"{calls.name_of(fn)} was traced and proved {_MOST_ATTEMPTS - 1} times, and each time "
            "JAX asked for another trace of it. Call strategy.run where JAX's configuration does "
            "not change meanwhile, in another thread or in the step."
        )

    def _remember_quick(self, call: Call, program: Program) -> None:
        """Lets the next call like this one go the quick way, where there is one."""
        key = (call.fn, call.donate_argnums)
        known = self._quick.get(key)
        if known is not None and (known.program is program or not known.is_worth_it):
            return
        drifts = calls.code_of(call.fn) or call.fn
        layout, kwargs = call.layout, call.tree[1]
        if layout.static or layout.nested or kwargs or call.captured or drifts in self._drifting:
            return
        if program.is_simple:
            misses = known.misses if known is not None else 0
            self._quick[key] = QuickCall(
                call, program, self._objects, self._are_placed, self._separate, misses
            )

    def _ran(self, program: Program) -> None:
        """Remembers whose results the next call may bring back."""
        if not self._recent or self._recent[-1] is not program:
            if program in self._recent:
                self._recent.remove(program)
            self._recent.append(program)

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

    def examined(self, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> "Examined":
        """Returns a call with its arrays on the devices and its program, for a report."""

        def examined() -> Examined:
            call, leaves = self._prepared(fn, args, kwargs)
            traced = self._trace(call, self._variants(call, leaves))
            program = self._find(call, call.key, leaves)
            call, leaves = self._as_wanted(program, call, leaves)
            return _examined(call, traced, program, [*call.state, *leaves])

        return self._with_variables(fn, examined)

    def examined_without_arrays(
        self,
        fn: StepFunction,
        args: Sequence[Any],
        types: Mapping[int, jax.ShapeDtypeStruct],
        donate_argnums: tuple[int, ...] = (),
    ) -> "Examined":
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

        def examined() -> Examined:
            objects, tree = calls.hoist_nested(args, {})
            leaves, layout = self._flatten(fn, tree)
            calls.require_static(fn, tree, layout, leaves)
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
            traced = self._trace(call, variants)
            _require_no_tracers(traced)
            return _examined(call, traced, self._make(call, variants), avals)

        return self._with_variables(fn, examined)

    def _prepared(
        self, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Call, list[Any]]:
        """A call and its leaves on the replicas' devices."""
        with self._running:
            call = self._call(fn, args, kwargs, ())
            leaves = self._placed(call, call.layout.dynamic_leaves(call.leaves))
        for i in call.layout.per_replica:
            self._require_rows(call, i, leaves[i])
        return call, leaves

    def _call(
        self,
        fn: StepFunction,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        donate_argnums: tuple[int, ...],
    ) -> Call:
        objects, tree = calls.hoist(args, kwargs)
        leaves, layout = self._flatten(fn, tree)
        if layout.nested:
            objects, tree = calls.hoist_nested(args, kwargs)
            leaves, layout = self._flatten(fn, tree)
        captured = self.captured(fn)
        objects = [*objects, *captured] if captured else objects
        record, state = None, list[Any]()
        if objects:
            names = functools.partial(calls.object_names, fn, tree, objects, captured)
            record, state = self._objects.record(objects, names)
        return Call(fn, tree, layout, leaves, objects, record, state, donate_argnums, captured)

    def captured(self, fn: StepFunction) -> Sequence[Variable]:
        """The variables that a step was found to use without being passed them."""
        try:
            variables, around = self._captured[fn] if self._captured else ((), ())
        except (KeyError, TypeError):  # what is not hashable is refused later
            return ()
        if variables and around != calls.variables_around(fn):
            with self._lock:  # a name that the step uses means another variable now
                self._captured.pop(fn, None)
            return ()
        return variables

    def prepare(self, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> Program:
        """The program of a call, traced and proved, so that its variables are known. Not run."""

        def prepared() -> Program:
            call, leaves = self._prepared(fn, args, kwargs)
            return self._find(call, call.key, leaves)

        return self._with_variables(fn, prepared)

    def _flatten(self, fn: StepFunction, tree: Any) -> tuple[list[Any], calls.Layout]:
        leaves, treedef = jax.tree.flatten(tree)
        types = tuple(map(type, leaves))
        layout = self._layouts.get((treedef, types))
        if layout is None:
            calls.require_no_tracers(fn, tree)
            # A number, a NumPy array and a jax.Array have one layout: `step=0` becomes an array.
            kinds = (treedef, calls.kinds(treedef, types))
            layout = self._layouts.get(kinds) or calls.Layout(*kinds)
            self._layouts[kinds] = self._layouts[treedef, types] = layout
        return leaves, layout

    def _find(self, call: Call, key: Any, leaves: list[Any]) -> Program:
        """The program for these very shapes and dtypes in this context, made if there is none."""
        self._require_not_drifting(call, leaves)
        self._require_canonical(call, leaves)
        for i in call.layout.per_replica:
            self._require_rows(call, i, leaves[i])
        variants = self._variants(call, leaves)
        exact = (key, variants, _Identity(context_token()))
        with self._lock:
            making = self._making.setdefault(exact, threading.RLock())
        with making:
            program = self._programs.get(exact) or self._make(call, variants)
            self._programs[key] = self._programs[exact] = program
        return program

    def _apart(self, call: Call, leaves: list[Any], program: Program) -> list[Any]:
        """The leaves, none of which shares an array with a donated one: that would crash JAX.

        `{"params": p, "ema": p}` is common; the second place gets a copy.
        """
        donated = program.donated
        if not donated and not call.state:
            return leaves
        leaves = list(leaves)
        plain = set(range(len(leaves))).difference(call.layout.per_replica)
        self._separate(program, call.state, leaves, sorted(plain))
        ids = list(map(id, leaves))
        distinct = set(ids)
        alone = distinct.isdisjoint(map(id, call.state))
        if alone and (not donated or len(distinct) == len(ids)):
            return leaves
        taken = set(map(id, call.state))
        first = dict.fromkeys(donated)
        for i in first | dict.fromkeys(range(len(leaves))):
            if ids[i] in taken and isinstance(leaves[i], jax.Array):
                leaves[i] = self.replicas.copy(leaves[i])
            if i in first:
                taken.add(ids[i])
        return leaves

    def _are_placed(self, per_replica: Sequence[int], leaves: list[Any]) -> bool:
        """Whether every leaf is there, on the replicas' devices; quick, for hundreds of them."""
        try:
            found = list(map(id, map(_sharding_of, leaves)))
        except AttributeError:  # a number, a NumPy array, or a tracer
            return False
        for i in per_replica:
            if found[i] not in self._stacked:
                return False
            found[i] = self._one_mirrored
        return self._mirrored.keys() >= set(found)

    def _placed(self, call: Call, leaves: list[Any]) -> list[Any]:
        """The leaves on the replicas' devices: what was made elsewhere is mirrored now.

        JAX takes an array that is not yet there for another type than one that is, and would
        compile a second time for it.

        Raises:
            ValueError: a deleted array, a `PerReplica` of another number of replicas, or an integer
                that is too large.
            TypeError: a leaf that JAX has no array type for.
        """
        per_replica = set(call.layout.per_replica)
        ready = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError(self._deleted(call, i))
            if isinstance(leaf, jax.Ref):
                raise TypeError(calls.a_ref(call.leaf_names[i]))
            if is_float0(leaf):
                raise TypeError(
                    f"{call.leaf_names[i]} is {describe(leaf)}, JAX's gradient of an integer, "
                    "without numbers. Leave it out: take gradients with respect to floats only."
                )
            try:
                placed = self._rows(call, i, leaf) if i in per_replica else self._mirror(leaf)
            except TypeError as error:
                raise TypeError(
                    f"{call.leaf_names[i]} is {describe(leaf)}, which is no JAX array: {error}"
                ) from error
            except OverflowError as error:
                raise ValueError(
                    f"{call.leaf_names[i]} is {describe(leaf)}, which JAX's default integer cannot "
                    "hold. Pass a float, or switch 64 bit on: jax.config.update('jax_enable_x64', "
                    "True)."
                ) from error
            if placement_log.on and placed is not leaf and i not in per_replica:
                placement_log.mirrored(call.leaf_names[i], leaf, self.replicas.devices)
            if placed is not leaf and i not in per_replica:
                calls.require_not_stacked(call.leaf_names[i], leaf)
            known = self._stacked if i in per_replica else self._mirrored
            if placed is not leaf:
                if i not in per_replica:
                    self._met[id(placed)] = placed
            elif isinstance(leaf, jax.Array):
                sharding = leaf.sharding
                if id(sharding) not in known and sharding in known.values():
                    known[id(sharding)] = sharding
            ready.append(placed)
        return ready

    def _deleted(self, call: Call, i: int) -> str:
        return (
            f"{call.leaf_names[i]} is an array that has been deleted: an earlier `run` gave up its "
            "buffer (donate_argnums, or a model's state). Use the array that it returned."
        )

    def _separate(
        self, program: Program, state: list[Any], leaves: list[Any], positions: Iterable[int]
    ) -> None:
        """Copies those of some leaves that share memory with another array: one may be donated.

        What `mirror` made itself is known to share none. Whether another array does, its address
        tells, for which JAX waits until the array is there. Where there are such arrays in most
        calls, they are copied, which waits for nothing.
        """
        new = [i for i in positions if self._met.get(id(leaves[i])) is not leaves[i]]
        new = new and self._not_returned(program, leaves, new)
        if not new:
            return
        program.looks += 1
        if not program.is_rare(program.looks):
            for i in new:
                leaves[i] = self.replicas.copy(leaves[i])
            return
        chosen = frozenset(new)
        others = [*state, *(leaf for i, leaf in enumerate(leaves) if i not in chosen)]
        taken = set[int]().union(*map(buffers_of, others))
        for i in new:
            addresses = buffers_of(leaves[i])
            owners = map(self._owners.get, addresses)
            if not taken.isdisjoint(addresses) or any(o is not None for o in owners):
                leaves[i] = self.replicas.copy(leaves[i])
                addresses = buffers_of(leaves[i])
            taken |= addresses
            self._met[id(leaves[i])] = leaves[i]
            self._owners.update(dict.fromkeys(addresses, leaves[i]))

    def _not_returned(
        self, program: Program, leaves: list[Any], positions: Sequence[int]
    ) -> list[int]:
        """Those of the positions that hold arrays which no program returned lately."""
        for each in dict.fromkeys([program, *reversed(self._recent)]):
            for returned in reversed(each.returns):
                known = set(map(id, map(operator.call, returned)))
                positions = [i for i in positions if id(leaves[i]) not in known]
                if not positions:
                    return []
        return list(positions)

    def _mirror(self, leaf: Any) -> Array:
        if isinstance(leaf, jax.Array):
            if self.replicas.is_mirrored(leaf):
                return leaf
            if self.holds_slices and self.replicas.is_sharded(leaf):
                return leaf  # until it is known what the program wants
        return self.replicas.mirror(leaf)

    def _as_wanted(self, program: Program, call: Call, leaves: list[Any]) -> tuple[Call, list[Any]]:
        """The call and its leaves, each whole or in slices as the program takes it."""
        try:  # quick, for hundreds of leaves: they lie as at the last launch
            found = map(_sharding_of, [*call.state, *leaves])
            if program.taken and all(map(operator.is_, found, program.taken)):
                return call, leaves
        except AttributeError:  # a replica's own arrays, of unequal shapes
            pass
        num_state = len(call.state)
        state = list(map(self._of_kind, call.state, program.kinds))
        leaves = list(map(self._of_kind, leaves, program.kinds[num_state:]))
        program.taken = [getattr(leaf, "sharding", None) for leaf in (*state, *leaves)]
        return call._replace(state=state), leaves

    def _of_kind(self, leaf: Any, kind: Kind) -> Any:
        if kind.is_own:
            return leaf
        wanted = self.replicas.sharding(kind)
        if leaf.sharding is wanted or leaf.sharding == wanted:
            return leaf
        if kind.axis is not None:
            return self.replicas.shard(leaf, kind.axis)
        return leaf if self.replicas.is_mirrored(leaf) else self.replicas.mirror(leaf)

    def _rows(self, call: Call, i: int, stacked: Any) -> Any:
        self._require_rows(call, i, stacked)
        if isinstance(stacked, Parts):
            if any_deleted([part for part in stacked.arrays if isinstance(part, jax.Array)]):
                raise ValueError(self._deleted(call, i))
            if self.replicas.are_mixed or not stacked.are_equal:
                return Parts(list(map(move, stacked.arrays, self.replicas.devices)))
            stacked = np.stack([np.asarray(part) for part in stacked.arrays])
        there = isinstance(stacked, jax.Array) and stacked.sharding == self.replicas.stacked
        return stacked if there else self.replicas.stack(stacked)

    def _require_canonical(self, call: Call, leaves: Sequence[Any]) -> None:
        """Refuses leaves of 64 bit where these are switched off: JAX traces for 32 bit then.

        Raises:
            ValueError: There is one; the message names it.
        """
        for name, leaf in zip(call.input_names, [*call.state, *leaves], strict=True):
            dtype = leaf.dtype
            if is_numeric(dtype) and jax.dtypes.canonicalize_dtype(dtype) != dtype:
                raise ValueError(
                    f"{name} is {describe(leaf)} while JAX's 64 bit are off. Convert it, "
                    f"x.astype('{jax.dtypes.canonicalize_dtype(dtype)}'), or switch them on: "
                    "jax.config.update('jax_enable_x64', True)."
                )

    def _require_rows(self, call: Call, i: int, stacked: Any) -> None:
        wanted = self._group.num_replicas_in_sync
        if stacked.shape[0] != wanted:
            raise ValueError(
                f"{call.leaf_names[i]} is a PerReplica of {stacked.shape[0]} values, for a "
                f"strategy of {wanted} replicas. Make it with this strategy: distribute_dataset, "
                "run, or one value for each replica."
            )

    def _variants(self, call: Call, leaves: list[Any]) -> Variants:
        """The sets of shapes that replicas have, and which replicas have each."""
        differs = set(call.layout.per_replica)
        columns: list[Sequence[jax.ShapeDtypeStruct]] = []
        unequal = []
        for i, leaf in enumerate(leaves):
            if i not in differs:
                columns.append((abstract(leaf),))
            elif isinstance(leaf, Parts):
                unequal.append(i)
                columns.append([jax.ShapeDtypeStruct(s, leaf.dtype) for s in leaf.shapes])
            else:
                columns.append((_row(leaf),))
        is_own = call.structure.is_own if call.structure is not None else []
        state = [
            _row(leaf) if own else abstract(leaf)
            for leaf, own in zip(call.state, is_own, strict=True)
        ]
        if not unequal:
            return (
                ((*state, *(first for first, *_ in columns)), tuple(range(len(self.replicas)))),
            )
        members: dict[Any, list[int]] = {}
        for replica in range(len(self.replicas)):
            own = [column[replica if i in unequal else 0] for i, column in enumerate(columns)]
            members.setdefault((*state, *own), []).append(replica)
        return tuple((avals, tuple(ids)) for avals, ids in members.items())

    def traced(
        self, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Call, Traced]:
        """A call and its traces, for a report; neither proved nor run."""

        def traced() -> tuple[Call, Traced]:
            call, leaves = self._prepared(fn, args, kwargs)
            return call, self._trace(call, self._variants(call, leaves))

        return self._with_variables(fn, traced)

    def _trace(self, call: Call, variants: Variants) -> Traced:
        """The traces of a call for each set of shapes: made once, whoever asks for them."""
        context = context_token()
        key = (call.trace_key, variants, _Identity(context))
        traced = self._traces.get(key)
        if traced is None:
            traced = self._traces[key] = self._new_trace(call, variants, context)
        return traced

    def _new_trace(self, call: Call, variants: Variants, context: object) -> Traced:
        calls.require_nothing_bound(call.fn)
        gathers = Gathers() if len(variants) > 1 else None
        steps = [Step(self._group, call, avals, gathers) for avals, _ in variants]
        n = self._group.num_replicas_in_sync
        try:
            jaxprs = _trace_together([each.flat for each in steps], variants, gathers, n)
        except NameError as error:
            calls.require_bound_axis(call.fn, error)
            raise
        calls.require_no_mapping(call.fn, jaxprs[0])
        if any(hasattr(var.aval, "inner_aval") for var in jaxprs[0].jaxpr.constvars):
            raise TypeError(calls.a_ref(f"What {calls.name_of(call.fn)} reads from outside"))
        found = [variable for each in steps for variable in each.found]
        if found:
            raise VariablesFound({id(variable): variable for variable in found})
        _require_one_result(steps, variants, jaxprs)
        calls.require_nothing_captured(call.fn, list(arrays_in(jaxprs[0])))
        return Traced(steps, jaxprs, [ids for _, ids in variants], context)

    def _make(self, call: Call, variants: Variants) -> Program:
        """Traces, proves and plans; XLA compiles when the program first runs."""
        unequal = len(variants) > 1
        traced = self._trace(call, variants)
        steps, jaxprs = traced.steps, traced.jaxprs
        step, n = steps[0], self._group.num_replicas_in_sync
        notes, names = Notes(), call.input_names
        proved = [prove(jaxpr, step.per_replica, n, notes, names=names) for jaxpr in jaxprs]
        marks = join_marks(jaxprs, proved) if unequal else proved[0]
        results, after, keys = traced.apart(marks)
        avals = traced.avals
        dtypes = [aval.dtype for aval in avals[len(results) : len(results) + len(after)]]
        metrics = call.structure.metrics if call.structure is not None else []

        def detailed() -> Sequence[Mark]:
            return prove(jaxprs[0], step.per_replica, n, problems=[])

        merges, problems = find_merges(metrics, call.slots, after, jaxprs, len(results), detailed)
        if problems:
            raise ReplicaDivergenceError(unmerged(step.name, problems))
        plan = make_plan(
            step.name, call.slots, traced.given, results, after, keys, names, dtypes, merges
        )
        drifts = find_drifts(call, step, avals[: len(results)], results)
        require_none_certain(step.name, drifts)
        executor = self._for_unequal() if unequal else self._executor
        carried: list[tuple[int, int]] = []
        if executor.can_shard:
            differs = plan.per_replica_results
            carried = carried_state(call, step, avals[: len(results)], differs, donated=False)
        words = exchanges.in_words(jaxprs[0].jaxpr)
        program = Program(traced, plan, call, executor, words, carried)
        if program.shards is not None:
            for axis in set(program.shards.inputs.values()):
                sharding = self.replicas.sharding(Kind(axis=axis))
                self._mirrored[id(sharding)] = sharding
        program.shared_draws = list(dict.fromkeys(notes.shared_draws))
        program.drifts = [drift for drift in drifts if not drift.is_bare]
        self._expect_mirrored(call, program, drifts)
        self._warn(call, notes, marks)
        self._remember(call.fn, program)
        return program

    def _expect_mirrored(self, call: Call, program: Program, drifts: Sequence[Drift]) -> None:
        """Remembers arguments that were mirrored, and that may come back per-replica."""
        if not drifts:
            return
        program.drifting_results = sorted({i for drift in drifts for i in drift.results})
        program.drifted = self._drifted
        by_code = self._drifting.setdefault(calls.code_of(call.fn) or call.fn, {})
        for drift in drifts:
            for name, why in drift.causes.items():
                # Of a bare array, another one may have the shape by chance.
                by_code[name] = why, None if drift.is_bare else call.fn
        self._quick.clear()  # last: what is remembered from now on knows of it

    def _came_back(self, call: Call, leaves: Sequence[Any]) -> bool:
        """Whether an argument is a result that may be state, and came back per-replica."""
        drifted = self._drifted
        return any(drifted.get(id(leaves[i])) is leaves[i] for i in call.layout.per_replica)

    def _require_not_drifting(self, call: Call, leaves: Sequence[Any]) -> None:
        """Refuses a `PerReplica` where the same function has had a mirrored array before.

        Of another function object with the same code, as `functools.partial` makes, and in the
        place of a bare array, only what came back from it is refused.

        Raises:
            ReplicaDivergenceError: It is a result that came back per-replica.
        """
        known = self._drifting.get(calls.code_of(call.fn) or call.fn)
        if not known:
            return
        names, causes = call.leaf_names, {}
        for i in call.layout.per_replica:
            why, fn = known.get(names[i], ("", None))
            came_back = self._drifted.get(id(leaves[i])) is leaves[i]
            if why and (came_back or fn is call.fn):
                causes[names[i]] = why
        if causes:
            raise ReplicaDivergenceError(drifting(calls.name_of(call.fn), causes))

    def _warn(self, call: Call, notes: Notes, marks: Sequence[Mark]) -> None:
        """Warns, once for each function, of what is right for the proof and rarely meant."""
        if calls.is_our_module(getattr(call.fn, "__module__", None)) or len(self.replicas) == 1:
            return
        name, texts = calls.name_of(call.fn), {}
        is_data = [np.ndim(leaf) > 0 for leaf in call.layout.dynamic_leaves(call.leaves)]
        if notes.idle_collectives and any(is_data):
            texts["undistributed"] = (
                f"{name} computes the same on all {len(self.replicas)} replicas: the collective at "
                f"{notes.idle_collectives[0]} reduces values that are equal already. Pass batches "
                "from strategy.distribute_dataset(dataset), which gives each replica its own part."
            )
        if notes.shared_noise:
            texts["noise"] = (
                f"{name} applies the same random numbers on all {len(self.replicas)} replicas, "
                f"drawn at {', '.join(dict.fromkeys(notes.shared_noise))}. For noise that differs "
                "between replicas, draw with mirror.get_replica_context().fold_in(key)."
            )
        assumed = sorted({line for mark in marks if not mark.per_replica for line in mark.assumed})
        if assumed:
            texts["pure"] = (
                f"{name} takes what {', '.join(assumed)} returns to be the same on all replicas, "
                "because it is declared to be pure. If it is not, replicas drift apart: reduce it, "
                'mirror.get_replica_context().all_reduce("mean", y).'
            )
        for kind, text in texts.items():
            if (call.fn, kind) not in self._warned:
                self._warned.add((call.fn, kind))
                warnings.warn(text, stacklevel=calls.depth_of_user())

    def _remember(self, fn: StepFunction, program: Program) -> None:
        """Notices a step that is a new function object each time, and bounds what is kept."""
        if len(self._programs) > 2 * _MOST_PROGRAMS:
            self._programs.clear()
            self._traces.clear()
            self._making.clear()
            self._by_code.clear()
            self._captured.clear()
            self._drifting.clear()
            self._warned.clear()
            self._quick.clear()
            self._recent = deque(maxlen=_MOST_RECENT)
        code = calls.code_of(fn)
        ours = calls.is_our_module(getattr(fn, "__module__", None))
        if code is None or ours:  # our own are made with care
            return
        made = self._by_code.setdefault(code, [])
        made.append(program)
        lately = made[-_FRESH_FUNCTIONS:]
        if len({id(p.fn) for p in lately}) < _FRESH_FUNCTIONS or any(p.runs > 1 for p in lately):
            return
        self._forget(set(map(id, made[:-1])))
        del made[:-1]
        if code not in self._warned:
            self._warned.add(code)
            warnings.warn(
                f"{calls.name_of(fn)} ({code.co_filename}:{code.co_firstlineno}) was compiled "
                f"{_FRESH_FUNCTIONS} times in a row, each time as a new function object that ran "
                "once. Define it once, outside the loop, and pass what changes as an argument.",
                stacklevel=calls.depth_of_user(),
            )

    def _forget(self, programs: set[int]) -> None:
        for key, quick in list(self._quick.items()):
            if id(quick.program) in programs:
                self._quick.pop(key, None)
        kept_recent = [p for p in list(self._recent) if id(p) not in programs]
        self._recent = deque(kept_recent, _MOST_RECENT)
        self._programs = {k: p for k, p in list(self._programs.items()) if id(p) not in programs}
        kept = {program.fn for program in self._programs.values()}
        self._traces = {key: t for key, t in self._traces.items() if key[0][0] in kept}
        self._making = {key: m for key, m in self._making.items() if key in self._programs}
        codes = {calls.code_of(fn) or fn for fn in kept}
        self._drifting = {code: d for code, d in self._drifting.items() if code in codes}
        with self._lock:
            self._captured = {fn: found for fn, found in self._captured.items() if fn in kept}


class Examined(NamedTuple):
    """A call that is ready to run.

    Attributes:
        call: The call.
        traced: Its trace.
        leaves: What goes into the program: the arrays, or their types where there are no arrays.
        kinds: How the replicas hold each of them.
        lowered: The program lowered, not yet compiled; `None` if it is several, run in stages.
    """

    call: Call
    traced: Traced
    leaves: Sequence[Any]
    kinds: Sequence[Kind]
    lowered: jax.stages.Lowered | None


def _examined(call: Call, traced: Traced, program: Program, leaves: Sequence[Any]) -> Examined:
    compiled = program.compiled
    lowered = compiled.lower(leaves) if isinstance(compiled, MeshProgram) else None
    return Examined(call, traced, leaves, program.kinds, lowered)


class VariablesFound(Exception):
    """A step uses variables that it is not passed: it is to be traced again, with them."""

    def __init__(self, variables: dict[int, Variable]) -> None:
        super().__init__(f"{len(variables)} variables")
        self.variables = list(variables.values())


class ArrayEscapedError(ValueError):
    """A step uses an array of a trace that has ended."""


def _require_no_tracers(traced: Traced) -> None:
    """Rejects a step that uses an array of another trace.

    Raises:
        ArrayEscapedError: If there is one; the message is its type.
    """
    for jaxpr in traced.jaxprs:
        for array in arrays_in(jaxpr):
            if isinstance(array, jax.core.Tracer):
                raise ArrayEscapedError(describe(array))


class _Identity:
    """An object as part of a key: equal to itself alone, and alive as long as the key."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value


def _row(stacked: Any) -> jax.ShapeDtypeStruct:
    """One replica's shape, dtype and weak type, where all have the same."""
    if isinstance(stacked, Parts):
        return jax.ShapeDtypeStruct(stacked.shapes[0], stacked.dtype)
    return abstract_row(stacked)


def _trace_together(
    traces: Sequence[Any], variants: Variants, gathers: Gathers | None, num_replicas: int
) -> list[ClosedJaxpr]:
    """Traces a step for each set of shapes, up to each all-gather until all lengths are known.

    Raises:
        ValueError: the replicas do not bring to an all-gather what can be joined.
    """
    while True:
        jaxprs: list[ClosedJaxpr] = []
        asked: list[LengthsUnknown] = []
        for fn, (avals, _) in zip(traces, variants, strict=True):
            try:
                jaxprs.append(trace(fn, avals, num_replicas))
            except LengthsUnknown as unknown:
                asked.append(unknown)
        if gathers is None or not asked:
            return jaxprs
        gathers.known.append(_lengths(asked, variants, len(gathers.known) + 1))


def _lengths(asked: list[LengthsUnknown], variants: Variants, number: int) -> tuple[int, ...]:
    """Each replica's length at an all-gather."""
    if len(asked) < len(variants):
        raise ValueError(
            f"Replicas of different shapes talk differently: all_gather number {number} of the "
            "step is met by some only. A step must not choose by a shape whether it gathers."
        )
    axis = asked[0].axis
    found: dict[int, int] = {}
    for unknown, (_, ids) in zip(asked, variants, strict=True):
        found.update(dict.fromkeys(ids, unknown.shape[axis] if unknown.shape else 0))
    others = {(u.axis, u.shape[:axis], u.shape[axis + 1 :]) for u in asked}
    if len(others) > 1:
        shapes = ", ".join(
            f"{unknown.shape} on replica {ids[0]}"
            for unknown, (_, ids) in zip(asked, variants, strict=True)
        )
        raise ValueError(
            f"all_gather number {number} of the step joins along axis {axis} arrays of shapes "
            f"{shapes}. All other axes must be equal."
        )
    return tuple(found[i] for i in sorted(found))


def _require_one_result(
    steps: Sequence[Step], variants: Variants, jaxprs: Sequence[ClosedJaxpr]
) -> None:
    """Refuses a step that returns other kinds of results on replicas of other shapes."""
    avals: list[list[Any]] = [[var.aval for var in jaxpr.jaxpr.outvars] for jaxpr in jaxprs]
    kinds = [[(aval.dtype, aval.ndim) for aval in each] for each in avals]
    for found, (_, ids) in zip(kinds[1:], variants[1:], strict=True):
        pairs = zip(steps[0].out_names, kinds[0], found, strict=False)
        for name, (dtype, ndim), (other, other_ndim) in pairs:
            if (dtype, ndim) != (other, other_ndim):
                raise ValueError(
                    f"{name} of {steps[0].name} is {dtype} of {ndim} dimensions on replica 0 and "
                    f"{other} of {other_ndim} on replica {ids[0]}. Return the same dtype and "
                    "number of dimensions, whatever the shapes."
                )
    for step, (_, ids) in zip(steps[1:], variants[1:], strict=True):
        if step.out_tree != steps[0].out_tree:
            raise ValueError(
                f"{step.name} returned another structure on replica {ids[0]}, {step.out_tree}, "
                f"than on replica 0, {steps[0].out_tree}. A step must not choose by a shape what "
                "it returns."
            )
