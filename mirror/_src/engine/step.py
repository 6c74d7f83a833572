"""`Step`: all that a strategy knows of one step function, until the function is dropped.

Its warnings are about valid steps that are probably mistakes: each is issued once per step.
"""

import contextlib
import functools
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
    Chains,
    NamedVariables,
    chains_to,
    leaked_names,
    variables_along,
)
from mirror._src.engine.plan import ALL_REDUCE, IF_INTENDED, LeafOutcome, own_values
from mirror._src.engine.program import StepProgram
from mirror._src.engine.replica_function import TracedStep
from mirror._src.engine.variable import Variable
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
        self._values: dict[Hashable, tuple[V, object]] = {}
        self._on_drop = on_drop

    def get(self, fn: Function) -> V | None:
        """Returns the value of a function, or None."""
        is_plain = type(fn) is FunctionType  # the common case, and fast
        entry = self._values.get(weakref.ref(fn) if is_plain else _key(fn))
        return None if entry is None else entry[0]

    def set_default(self, fn: Function, value: V) -> V:
        """Returns the value of a function, which is `value` unless it has one."""
        key = _key(fn)
        drop = functools.partial(self._dropped, key)
        owner = fn.__self__ if isinstance(fn, MethodType) else fn
        with contextlib.suppress(TypeError):  # no support for weak references
            return self._values.setdefault(key, (value, weakref.ref(owner, drop)))[0]
        return self._values.setdefault(key, (value, owner))[0]

    def values(self) -> Iterator[V]:
        """Yields the values of all functions."""
        return iter([value for value, _ in list(self._values.values())])

    def clear(self) -> None:
        """Removes all values."""
        self._values.clear()

    def _dropped(
        self, key: Hashable, _: object, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        entry = self._values.pop(key, None)
        # When Python ends, the names that `on_drop` uses may be None.
        if entry is not None and self._on_drop is not None and not is_finalizing():
            self._on_drop(entry[0])


def _key(fn: Any) -> Hashable:
    """Returns what is equal for the same function, and does not keep it."""
    try:
        hash(fn)
    except TypeError:  # an object with `__call__`, such as a dataclass
        fn = fn.__call__
    if isinstance(fn, MethodType):  # an id is not used again before its entry is dropped
        return id(fn.__self__), fn.__func__
    try:
        return weakref.ref(fn)
    except TypeError:
        return fn


_MAX_PROGRAMS = 256
_MAX_NEW_FUNCTIONS = 3


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

    def warn(self, kind: str, text: str | None) -> None:
        """Issues a warning, unless there is no text, or one of this kind was issued."""
        if text and is_first(self.warned, kind):
            warn_user(text)

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

    def warn_if_recompiled(self, fn: StepFunction) -> None:
        """Warns about a step that is a new function object in every call."""
        code = code_of(fn)
        lone = self._lone.get(code) if code is not None else None
        if code is None or lone is None or lone.count < _MAX_NEW_FUNCTIONS - 1:
            return
        if is_first(lone.warned, "recompiled"):
            warn_user(
                f"{name_of(fn)} ({code.co_filename}:{code.co_firstlineno}) was recompiled "
                f"{_MAX_NEW_FUNCTIONS} times because each call passes a new function object. "
                "Define it once, outside the loop, and pass the changing values as arguments."
            )

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


def warn_about_step(step: Step, call: Call, analysis: Analysis, num_replicas: int) -> None:
    """Issues the warnings about a new program of a step, each kind once."""
    texts = {"optimizer": _idle_optimizer(call, analysis)}
    if not is_our_module(getattr(call.fn, "__module__", None)):
        if num_replicas > 1:
            texts |= _texts_of_proof(call, analysis, num_replicas)
            texts["drift"] = _drift(step, call, analysis)
        texts["lost"] = _lost_update(call, analysis.notes)
        texts["leaks"] = _leaks(call.fn)
    for kind, text in texts.items():
        step.warn(kind, text)


def _texts_of_proof(call: Call, analysis: Analysis, num_replicas: int) -> dict[str, str | None]:
    """Returns the warnings about the notes of the proof, by kind."""
    name, notes, texts = name_of(call.fn), analysis.notes, dict[str, str | None]()
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
    assumed = sorted(
        {line for mark in analysis.marks if not mark.per_replica for line in mark.assumed}
    )
    if assumed:
        texts["pure"] = (
            f"{name} assumes that {', '.join(assumed)} returns the same on all replicas, "
            "because the callback is declared pure. If it is not, the replicas diverge: "
            'all-reduce its result, mirror.all_reduce("mean", y).'
        )
    return texts


def _drift(step: Step, call: Call, analysis: Analysis) -> str | None:
    """Returns the warning about values per replica that were returned for mirrored arguments."""
    known = step.own_values.setdefault(call.layout.treedef, {})
    causes = [known[i] for i in call.layout.per_replica if i in known]
    results, _, _ = analysis.traced.split(analysis.marks)
    known.update(own_values(call, analysis.traced, results))
    if not causes:
        return None
    return (
        f"{name_of(call.fn)} receives values that an earlier call has returned, and that "
        f"differ between replicas, so that each replica trains on its own:\n{listing(causes)}"
        f"\n{ALL_REDUCE}{IF_INTENDED}"
    )


def _lost_update(call: Call, notes: Notes) -> str | None:
    """Returns the warning about new values of arguments that the step does not return."""
    if not notes.lost_updates:
        return None
    step_name, names = name_of(call.fn), call.input_names
    lost = list(dict.fromkeys(names[update.input] for update in notes.lost_updates))
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    _, collective, line = notes.lost_updates[0]
    changed = {_path_name(call, path) for path in notes.changed_in_place}
    why = "which does not return it"
    if lost[0] in changed:
        why = "which changed it in place: each replica changed its own copy"
    state = re.split(r"[.\[]", lost[0])[0]
    return (
        f"The new {lost[0]}{more}, computed at {line} from the all-reduce at {collective}, is "
        f"lost: it reaches no result of {step_name}, {why}. Return the new state, and pass it "
        f"to the next call: {state}, loss = strategy.run({step_name}, ({state}, batch))."
    )


def _idle_optimizer(call: Call, analysis: Analysis) -> str | None:
    """Returns the warning about an updated `nnx.Optimizer` whose `wrt` selects no variable."""
    models = [each for each in call.objects if isinstance(each, nnx.Module)]
    pairs = zip(call.slots, analysis.outcomes, strict=True)
    written = {slot.path for (slot, _), outcome in pairs if outcome is LeafOutcome.MIRRORED}
    for i, each in enumerate(call.objects):
        is_updated = isinstance(each, nnx.Optimizer) and (i, "step") in written
        if not is_updated or not models or each.wrt is nnx.Param:  # of a model without parameters
            continue
        if (message := nothing_selected(models, each.wrt)) is not None:
            return f"{name_of(call.fn)}: {message}"
    return None


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


def _leaks(fn: StepFunction) -> str | None:
    """Returns the warning about traced values that a step has stored outside itself."""
    leaked = leaked_names(fn)
    if not leaked:
        return None
    name = name_of(fn)
    stored = ", ".join(f"{path} ({describe(value)})" for path, value in leaked[:3])
    container = leaked[0][0].partition("[")[0]
    fix = f"{container}.append(value)" if "[" in leaked[0][0] else f"{container} = value"
    return (
        f"{name} stored traced values outside the step: {stored}. They never receive numbers, "
        "because the step is traced once and runs compiled. Return the value, and store the "
        f"result: value = strategy.run({name}, args); {fix}."
    )


def _path_name(call: Call, path: Sequence[Any]) -> str:
    """Returns the user's name for a path in the arguments, as `Call.leaf_names` does."""
    names = argument_names(call.fn, len(call.tree[0]))
    return (names[path[1].idx] if path[0].idx == 0 else path[1].key) + keys(path[2:])
