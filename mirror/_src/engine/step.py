"""`Step`: all that a strategy knows of one step function, until the function is dropped.

Its warnings are about valid steps that are probably mistakes: each is issued once per step.
"""

import re
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, Generic, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import jax
import numpy as np
from flax import nnx

from mirror._src.base.errors import describe, listing
from mirror._src.base.naming import (
    argument_names,
    code_of,
    is_first,
    is_our_module,
    keys,
    name_of,
    warn_user,
)
from mirror._src.base.types import StepFunction
from mirror._src.engine.analysis import Analysis
from mirror._src.engine.arguments import Call, Layout
from mirror._src.engine.closures import (
    Captured,
    Chains,
    NamedVariables,
    chains_to,
    is_time_to_look,
    leaked_names,
    stale_array,
    variables_along,
)
from mirror._src.engine.plan import ALL_REDUCE, IF_INTENDED, LeafOutcome, own_values
from mirror._src.engine.program import StepProgram
from mirror._src.engine.replica_function import TracedStep
from mirror._src.engine.variable import Variable
from mirror._src.jaxprs.marks import Mark
from mirror._src.jaxprs.proof import Notes

V = TypeVar("V")
Function: TypeAlias = Callable[..., Any] | CodeType


class WeakTable(Generic[V]):
    """Values by function or code object, each dropped when the function is.

    `weakref.WeakKeyDictionary` does not serve: `obj.method` is a new object in every call, so the
    object is referenced in its place, which need not be hashable. A function without support for
    weak references is kept.

    Args:
        on_drop: Receives the value of a function that is dropped.
    """

    def __init__(self, on_drop: Callable[[V], None] | None = None) -> None:
        self._values: dict[Hashable, V] = {}
        self._on_drop = on_drop

    def get(self, fn: Function) -> V | None:
        """Returns the value of a function, or None."""
        is_plain = type(fn) is FunctionType  # the common case, and fast
        return self._values.get(weakref.ref(fn) if is_plain else reference(fn))

    def set_default(self, fn: Function, value: V) -> V:
        """Returns the value of a function, which is `value` unless it has one."""
        key = reference(fn)
        known = self._values.get(key)
        if known is not None:
            return known
        return self._values.setdefault(reference(fn, self._dropped), value)

    def pop(self, fn: Function) -> None:
        """Removes the value of a function, if it has one."""
        self._values.pop(reference(fn), None)

    def values(self) -> Iterator[V]:
        """Yields the values of all functions."""
        return iter(list(self._values.values()))

    def clear(self) -> None:
        """Removes all values."""
        self._values.clear()

    def _dropped(
        self, key: Hashable, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        value = self._values.pop(key, None)
        # When Python ends, the names that `on_drop` uses may be None.
        if value is not None and self._on_drop is not None and not is_finalizing():
            self._on_drop(value)


class _Method:
    """A weak reference to a bound method: equal for the same object and function."""

    __slots__ = ("_function", "_hash", "_object")

    def __init__(self, method: MethodType, on_drop: Callable[[Any], None] | None) -> None:
        self._function = method.__func__
        self._hash = hash((id(method.__self__), method.__func__))
        drop = None if on_drop is None else lambda _: on_drop(self)
        self._object = weakref.ref(method.__self__, drop)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, _Method) or self._function != other._function:
            return False
        owner = self._object()
        return owner is not None and owner is other._object()


def reference(fn: Any, on_drop: Callable[[Any], None] | None = None) -> Hashable:
    """Returns a weak reference to a function, equal for the same function."""
    try:
        hash(fn)
    except TypeError:  # an object with `__call__`, such as a dataclass
        fn = fn.__call__
    try:
        if isinstance(fn, MethodType):
            return _Method(fn, on_drop)
        return weakref.ref(fn, on_drop)
    except TypeError:  # no support for weak references
        return fn


_MAX_PROGRAMS = 256


class Step:
    """Layouts, traces and programs of one step function.

    Args:
        fn: The function, which is not kept.

    Attributes:
        programs: The last compiled program for each call key, and the exact program for each call
            key, types and trace context.
        traces: The trace for each trace key, types and trace context.
        layouts: The layout of the arguments, by their structure and types.
        depth: Index in `HOISTS` of the function that finds the nnx objects among the arguments.
        warned: Kinds of the warnings that were issued.
        own_values: For each structure of arguments, the mirrored ones of which it returns new
            values per replica, and why.
        variables: The variables that a trace has found to be used without being arguments.
    """

    def __init__(self, fn: StepFunction) -> None:
        self.programs: dict[Any, StepProgram] = {}
        self.traces: dict[Any, TracedStep] = {}
        self.layouts: dict[Any, Layout] = {}
        self.depth = 0
        self.warned: set[str] = set()
        self.own_values: dict[Any, dict[int, str]] = {}
        self.code = None if is_our_module(getattr(fn, "__module__", None)) else code_of(fn)
        self.variables: Sequence[Variable] = ()
        self._chains: Chains = ()
        self._named: NamedVariables = {}
        # An entry exists while a thread makes a program or waits for it.
        self._making: WeakValueDictionary[Any, threading.RLock] = WeakValueDictionary()
        self._lock = threading.Lock()

    def making(self, key: Any) -> threading.RLock:
        """Returns the lock to hold while the program for a key is made and compiled."""
        with self._lock:
            return self._making.setdefault(key, threading.RLock())

    def captured(self, fn: StepFunction) -> Sequence[Variable]:
        """Returns `variables`; none if a name in the step now refers to another variable."""
        with self._lock:
            if self.variables and self._named != variables_along(fn, self._chains):
                self.variables = ()
            return self.variables

    def capture(self, fn: StepFunction, variables: Sequence[Variable]) -> None:
        """Adds variables that a trace has found."""
        with self._lock:
            merged = {id(variable): variable for variable in (*self.variables, *variables)}
            self.variables = tuple(merged.values())
            self._chains = chains_to(fn, self.variables)
            self._named = variables_along(fn, self._chains)


class _Lone:
    """The functions with one code that were dropped after at most one run.

    Attributes:
        count: Their number.
        warned: Kinds of the warnings that were issued about them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.warned: set[str] = set()


class Steps:
    """The step functions of a strategy. Each is dropped with its function.

    Attributes:
        get: Returns the step of a function, or None; see `WeakTable.get`.
    """

    def __init__(self) -> None:
        self._steps: WeakTable[Step] = WeakTable(self._dropped)
        self.get = self._steps.get
        self._lone: WeakTable[_Lone] = WeakTable()

    def of(self, fn: StepFunction) -> Step:
        """Returns the step of a function."""
        return self.get(fn) or self._steps.set_default(fn, Step(fn))

    def lone(self, fn: StepFunction) -> _Lone | None:
        """Returns what is known of dropped functions with the same code, if there are any."""
        code = code_of(fn)
        return self._lone.get(code) if code is not None else None

    def limit_size(self) -> None:
        """Forgets everything if there are too many programs."""
        steps = self._steps.values()
        sizes = (max(len(step.programs) // 2, len(step.traces)) for step in steps)
        if sum(sizes) > _MAX_PROGRAMS:
            self._steps.clear()
            self._lone.clear()

    def forget_programs(self) -> None:
        """Forgets the programs, but not the traces."""
        for step in self._steps.values():
            step.programs.clear()

    def _dropped(self, step: Step) -> None:
        ran = {id(program): program.runs for program in step.programs.values()}
        if step.code is not None and ran and max(ran.values()) <= 1:
            self._lone.set_default(step.code, _Lone()).count += 1


MAX_NEW_FUNCTIONS = 3


def warn_about_proof(
    warned: set[str], call: Call, notes: Notes, marks: Sequence[Mark], num_replicas: int
) -> None:
    """Warns about the notes of the proof, once per function.

    Args:
        warned: Kinds of the warnings about this step that were issued.
        call: The call that was proved.
        notes: Notes of the proof.
        marks: Marks of the outputs.
        num_replicas: Number of replicas.
    """
    if is_our_module(getattr(call.fn, "__module__", None)) or num_replicas == 1:
        return
    name, texts = name_of(call.fn), {}
    is_data = [np.ndim(leaf) > 0 for leaf in call.layout.dynamic_leaves(call.leaves)]
    if notes.idle_collectives and any(is_data):
        texts["undistributed"] = (
            f"{name} computes the same on all {num_replicas} replicas: the collective at "
            f"{notes.idle_collectives[0]} reduces values that are already equal. Pass batches "
            "from strategy.distribute_dataset(dataset), which splits them across the replicas."
        )
    lines = dict.fromkeys(notes.shared_noise)
    if summed := [line for line in lines if line in notes.summed_noise]:
        texts["summed noise"] = (
            f"{name} adds the same random numbers on all {num_replicas} replicas, sampled at "
            f"{', '.join(summed)}, to values that it then all-reduces. A key per replica would "
            "add other noise on each of them. Add the noise once, as for private "
            'gradients, after mirror.all_reduce("sum", grads).'
        )
    if own := [line for line in lines if line not in notes.summed_noise]:
        texts["noise"] = (
            f"{name} applies the same random numbers on all {num_replicas} replicas, "
            f"sampled at {', '.join(own)}. For noise that differs between replicas, sample "
            "with mirror.get_replica_context().fold_in(key). Add noise for a sum, such as "
            "private gradients, after the all-reduce."
        )
    assumed = sorted({line for mark in marks if not mark.per_replica for line in mark.assumed})
    if assumed:
        texts["pure"] = (
            f"{name} assumes that {', '.join(assumed)} returns the same on all replicas, "
            "because the callback is declared pure. If it is not, the replicas diverge: "
            'all-reduce its result, mirror.all_reduce("mean", y).'
        )
    for kind, text in texts.items():
        if is_first(warned, kind):
            warn_user(text)


def warn_about_drift(step: Step, call: Call, analysis: Analysis, num_replicas: int) -> None:
    """Warns about values per replica that the step has returned for mirrored arguments."""
    if is_our_module(getattr(call.fn, "__module__", None)) or num_replicas == 1:
        return
    known = step.own_values.setdefault(call.layout.treedef, {})
    causes = [known[i] for i in call.layout.per_replica if i in known]
    results, _, _ = analysis.traced.split(analysis.marks)
    known.update(own_values(call, analysis.traced, results))
    if causes and is_first(step.warned, "drift"):
        warn_user(
            f"{name_of(call.fn)} receives values that an earlier call has returned, and that "
            f"differ between replicas, so that each replica trains on its own:\n{listing(causes)}"
            f"\n{ALL_REDUCE}{IF_INTENDED}"
        )


def warn_about_lost_updates(warned: set[str], call: Call, notes: Notes) -> None:
    """Warns about new values of arguments that the step computes and does not return."""
    if is_our_module(getattr(call.fn, "__module__", None)) or not notes.lost_updates:
        return
    if not is_first(warned, "lost"):
        return
    step_name, names = name_of(call.fn), call.input_names
    lost = list(dict.fromkeys(names[update.input] for update in notes.lost_updates))
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    _, collective, line = notes.lost_updates[0]
    changed = {_path_name(call, path) for path in notes.changed_in_place}
    why = "which does not return it"
    if lost[0] in changed:
        why = "which changed it in place: each replica changed its own copy"
    state = re.split(r"[.\[]", lost[0])[0]
    warn_user(
        f"The new {lost[0]}{more}, computed at {line} from the all-reduce at {collective}, is "
        f"lost: it reaches no result of {step_name}, {why}. Return the new state, and pass it "
        f"to the next call: {state}, loss = strategy.run({step_name}, ({state}, batch))."
    )


def warn_about_idle_optimizers(warned: set[str], call: Call, analysis: Analysis) -> None:
    """Warns about an `nnx.Optimizer` that is updated, and whose `wrt` selects no variable."""
    models = [each for each in call.objects if isinstance(each, nnx.Module)]
    pairs = zip(call.slots, analysis.outcomes, strict=True)
    written = {slot.path for (slot, _), outcome in pairs if outcome is LeafOutcome.MIRRORED}
    for i, each in enumerate(call.objects):
        is_updated = isinstance(each, nnx.Optimizer) and (i, "step") in written
        if not is_updated or not models or each.wrt is nnx.Param:  # of a model without parameters
            continue
        message = nothing_selected(models, each.wrt)
        if message is not None and is_first(warned, "optimizer"):
            warn_user(f"{name_of(call.fn)}: {message}")


def nothing_selected(models: Sequence[nnx.Module], wrt: Any) -> str | None:
    """Returns the message for a filter that selects no variable of any model, or None."""
    states = [nnx.state(model) for model in models]
    if any(jax.tree.leaves(nnx.filter_state(state, wrt)) for state in states):
        return None
    kinds = sorted({type(x).__name__ for state in states for _, x in nnx.to_flat_state(state)})
    return (
        f"`wrt` ({describe(wrt)}) selects no variable of the model, so nothing would train. "
        f"Its variables are of the types {kinds}. Select some of them, such as wrt=nnx.Param."
    )


def warn_about_leaks(warned: set[str], fn: StepFunction) -> None:
    """Warns about traced values that a step has stored outside itself, once per function."""
    if is_our_module(getattr(fn, "__module__", None)):
        return
    leaked = leaked_names(fn)
    if not leaked or not is_first(warned, "leaks"):
        return
    name = name_of(fn)
    stored = ", ".join(f"{path} ({describe(value)})" for path, value in leaked[:3])
    container = leaked[0][0].partition("[")[0]
    fix = f"{container}.append(value)" if "[" in leaked[0][0] else f"{container} = value"
    warn_user(
        f"{name} stored traced values outside the step: {stored}. They never receive numbers, "
        "because the step is traced once and runs compiled. Return the value, and store the "
        f"result: value = strategy.run({name}, args); {fix}."
    )


def warn_about_stale_arrays(warned: set[str], call: Call, captured: Captured, runs: int) -> None:
    """Warns about a captured array or variable that was replaced since the step was compiled.

    Args:
        warned: Kinds of the warnings about this step that were issued.
        call: The call.
        captured: The program's `captured_arrays`.
        runs: Number of completed runs of the program.
    """
    if not is_time_to_look(runs):
        return
    message = stale_array(call.fn, call.objects, captured, call.captured)
    if message is not None and is_first(warned, "stale"):
        warn_user(message)


def warn_about_recompilation(warned: set[str], fn: StepFunction) -> None:
    """Warns about a step that is a new function object in every call."""
    code = code_of(fn)
    if code is not None and is_first(warned, "recompiled"):
        warn_user(
            f"{name_of(fn)} ({code.co_filename}:{code.co_firstlineno}) was recompiled "
            f"{MAX_NEW_FUNCTIONS} times because each call passes a new function object. "
            "Define it once, outside the loop, and pass the changing values as arguments."
        )


def _path_name(call: Call, path: Sequence[Any]) -> str:
    """Returns the user's name for a path in the arguments, as `Call.leaf_names` does."""
    names = argument_names(call.fn, len(call.tree[0]))
    return (names[path[1].idx] if path[0].idx == 0 else path[1].key) + keys(path[2:])
