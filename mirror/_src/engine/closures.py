"""Inputs of a step outside its arguments: closure, globals, bound objects, and what these contain.

State among them is rejected, variables of mirror are captured, and arrays become constants. Reading
a constant is valid, and so is a constant that `strategy.run` returned, such as the mean of a
dataset. A mistake shows later: the name of the array refers to another one, and the compiled step
still uses the old one. Nothing tells when a name is rebound, so later calls look it up again.

A jaxpr lists the constants of a trace, but not the variables that they were read from, and no
public API reports what a step reads. The names in its code are a guess, because `co_names` also
contains names of attributes: for `x.model`, it returns the global `model`. Callers may only use it
where an extra object does no harm. Delete the guess once the jaxpr says where a constant is from.
"""

import argparse
import contextlib
import functools
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import CellType, CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr, set_current_trace, take_current_trace

from mirror._src.base.errors import describe
from mirror._src.base.keras_library import STATELESS_CALL, has_variables, library, variables_of
from mirror._src.base.naming import (
    code_of,
    is_our_module,
    layers_of,
    leaf_names,
    name_of,
    parameter_names,
)
from mirror._src.base.tracebacks import is_users, users_function, users_functions
from mirror._src.base.types import is_numeric
from mirror._src.engine.arguments import Call
from mirror._src.engine.nnx.structure import is_object
from mirror._src.engine.storage import dtype_of, read_value, shape_of
from mirror._src.engine.variable import Variable
from mirror._src.jaxprs.equations import arrays_in, equations, inner_programs
from mirror._src.jaxprs.primitives import SIMPLE

_DEPTH = 3  # `trainer.state["losses"][0]`
_MOST_ITEMS = 50  # from each end of a container: a list that a step appends to may be long
_LARGE = 2**24  # bytes; of larger arrays, no copy is kept to notice a change in place
_MOST_ATTRIBUTES = 500  # of a static argument, which each call compares
_NUMBERS = (str, bytes, int, float, complex, np.generic)
_ARRAYS = (np.ndarray, jax.Array)
_LEAVES = (*_NUMBERS, type(None), *_ARRAYS, ModuleType)

Named = Iterable[tuple[str, Any]]
Items = Callable[[str, Any], list[tuple[str, Any]]]


def reachable(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields the values that a function can reach, with their paths, such as `losses[0]`."""
    yield from _expanded(referenced(fn), set(), _DEPTH)


def _reached(call: Call) -> Iterator[tuple[str | None, str, Any]]:
    """Yields what a step can reach: names of functions, None for the step itself; paths; values.

    Besides the step, these are the other functions of a trainer, static arguments, and functions in
    the objects of the call: methods of a model, and the schedule of an optimizer.
    """
    functions = users_functions(call.fn)
    for each in reversed(functions):  # a named loss calls metrics
        name = None if each is call.fn else name_of(each)
        yield from ((name, path, value) for path, value in reachable(each))
    seen = set(map(id, functions))
    names = leaf_names(call.fn, call.tree) if call.layout.static else []
    static = [(names[i], call.leaves[i]) for i in call.layout.static]
    static = [(name, each) for name, each in static if callable(each) or _has_users_class(each)]
    yield from ((None, path, value) for path, value in _expanded(static, seen, _DEPTH))
    for attributes, node in nnx.iter_graph(call.objects):
        if isinstance(node, (nnx.Variable, *_LEAVES)) or not (is_object(node) or callable(node)):
            continue
        name = type(node).__name__ if is_object(node) else ".".join(map(str, attributes[1:]))
        named = _contained(name, type(node)) if is_object(node) else [(name, node)]
        yield from ((name, path, value) for path, value in _expanded(named, seen, _DEPTH))


def reachable_in(frames: Iterable[FrameType]) -> Iterator[tuple[str, Any]]:
    """Yields the values that running functions can reach, innermost function first."""
    seen: set[int] = set()
    for frame in reversed(list(frames)):
        # A comprehension has its own frame before Python 3.12, whose iterator is named `.0`.
        named = [(name, value) for name, value in frame.f_locals.items() if name.isidentifier()]
        yield from _expanded([*named, *_globals_of(frame.f_code, frame.f_globals)], seen, _DEPTH)


def referenced(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Returns what a function names: what is bound to it, defaults of parameters, and globals."""
    named, fn = _bound(fn)
    code = code_of(fn)
    if code is None:
        return named
    defaults = getattr(fn, "__defaults__", None) or ()
    parameters = code.co_varnames[: code.co_argcount]
    named += zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)
    named += (getattr(fn, "__kwdefaults__", None) or {}).items()
    return [*named, *_globals_of(code, getattr(fn, "__globals__", {}))]


def _bound(fn: Callable[..., Any]) -> tuple[list[tuple[str, Any]], Callable[..., Any]]:
    """Returns what is bound to a function, and the function without partials and decorators."""
    named: list[tuple[str, Any]] = []
    owner = None
    for layer in layers_of(fn):
        if isinstance(layer, functools.partial):
            named += [(f"args[{i}]", value) for i, value in enumerate(layer.args)]
            named += layer.keywords.items()
        owner = getattr(layer, "__self__", owner)
        fn = layer
    code = code_of(fn)
    if owner is None and code is None:
        owner = fn  # an object with `__call__`
    if owner is not None:
        named.append(("self", owner))
    if code is not None:
        named += zip(code.co_freevars, map(_contents, fn.__closure__ or ()), strict=True)
    return named, fn


def _contents(cell: CellType) -> Any:
    """Returns the value in a cell of a closure, or None if the cell is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _globals_of(code: CodeType, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the globals that a function or the functions defined in it may read."""
    for name in code.co_names:
        value = values.get(name)
        if name in values:
            yield name, value
        if isinstance(value, ModuleType) and _is_users(value):
            own = vars(value)
            yield from ((f"{name}.{each}", own[each]) for each in code.co_names if each in own)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _globals_of(const, values)


def _expanded(named: Named, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yields named values and what they contain, breadth first, each value once."""
    return ((chain[-1], value) for chain, value in _chains(named, seen, depth))


def _chains(
    named: Named, seen: set[int], depth: int, contained: Items | None = None
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the same values with the paths of what contains them, outermost first."""
    level = [((path,), value) for path, value in named]
    for remaining in reversed(range(depth + 1)):
        inner: list[tuple[Any, Any]] = []
        for chain, value in level:
            is_leaf = isinstance(value, (*_LEAVES, Variable))
            if id(value) in seen and not is_leaf:
                continue
            seen.add(id(value))
            yield chain, value
            if remaining and not is_leaf:
                items = _items(chain[-1], value, contained)
                inner += [((*chain, path), each) for path, each in items]
        level = inner


def _items(path: str, value: Any, contained: Items | None = None) -> list[tuple[str, Any]]:
    try:
        return (contained or _contained)(path, value)
    except Exception:  # a proxy whose attributes raise
        return []


def _contained(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        return [(f"{path}[{i}]", value[i]) for i in _ends(range(len(value)))]
    if isinstance(value, dict):
        return [(f"{path}[{key!r}]", value[key]) for key in _ends(list(value))]
    if isinstance(value, set | frozenset):
        return [(path, item) for item in _ends(list(value))]
    if isinstance(value, jax.core.Tracer | nnx.Pytree | nnx.Variable):
        return []
    code = code_of(value) if callable(value) else None
    if code is not None:
        return referenced(value) if is_users(code.co_filename) else _inside_library(value)
    # The attributes of an object, and its methods, which may read globals.
    classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
    owners = [cls for cls in reversed(classes) if _is_users(sys.modules.get(cls.__module__))]
    attributes = {name: item for cls in owners for name, item in vars(cls).items()}
    if not isinstance(value, type):
        attributes |= _attributes(value)
    return [(f"{path}.{name}", attributes[name]) for name in _ends(list(attributes))]


def _attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes that an object itself has, in its dict and in slots."""
    state = object.__getstate__(value)
    in_dict, in_slots = state if isinstance(state, tuple) else (state, None)
    return {**(in_dict or {}), **(in_slots or {})}


def _inside_library(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Returns the user's functions in closures of a library, such as a schedule in `optax.sgd`."""
    found, waiting, seen = [], [fn], set[int]()
    while waiting and len(seen) < _MOST_ITEMS:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        code = code_of(each) if callable(each) else None
        if isinstance(each, list | tuple):
            waiting += _ends(each)
        elif code is not None and is_users(code.co_filename):
            found.append((name_of(each), each))
        elif code is not None:
            waiting += [value for _, value in _bound(each)[0]]
    return found


def _ends(items: Any) -> list[Any]:
    """Returns the items from both ends of a long sequence."""
    return [*items[:_MOST_ITEMS], *items[_MOST_ITEMS:][-_MOST_ITEMS:]]


def _is_users(module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    name = getattr(module, "__name__", "")
    return is_users(file) if file else name not in sys.stdlib_module_names


def _has_users_class(value: Any) -> bool:
    return _is_users(sys.modules.get(type(value).__module__))


class Captures:
    """Variables that a step reads or writes without receiving them as arguments.

    Args:
        known: Variables captured by an earlier trace of the step, each with its stand-in in this
            trace.
        local: Variables of this trace, which need no stand-in.

    Attributes:
        discovered: Variables that this trace captured for the first time.
    """

    def __init__(self, known: Sequence[tuple[Variable, Variable]], local: Sequence[Any]) -> None:
        self._stand_ins = {id(variable): clone for variable, clone in known}
        self._local = set(map(id, local))
        with take_current_trace() as trace:
            self._trace = trace
        self.discovered: list[Variable] = []

    def stand_in(self, variable: Variable) -> Variable:
        """Returns the variable that replaces `variable` in the current trace."""
        value = read_value(variable)
        is_traced = isinstance(value, jax.core.Tracer)
        if is_traced or id(variable) in self._local or getattr(variable, "_can_update", False):
            return variable  # created inside the step, as by `jax.tree.map(f, v)`
        clone = self._stand_ins.get(id(variable))
        if clone is None:  # first use: the step will be traced again, with this variable as input
            self.discovered.append(variable)
            # The first use may be inside a nested transformation. In its trace the zeros would be
            # tracers that the rest of the step must not use.
            with set_current_trace(self._trace):
                zeros = jnp.zeros(shape_of(value), dtype_of(value))
                clone = cast(Variable, variable.copy(zeros))
            self._stand_ins[id(variable)] = clone
            self._local.add(id(clone))
        return clone


Captured = Mapping[tuple[str | None, str], Any]
"""Arrays and variables that a step has read and not received as arguments, by their names."""


def captured_arrays(call: Call, program: ClosedJaxpr) -> Captured:
    """Returns the arrays and variables that a step has read and not received as arguments."""
    fn = call.fn
    eqns = [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name not in SIMPLE]
    inner = [x for eqn in eqns for x in inner_programs(eqn.params.values())]
    closed = [x for x in (program, *inner) if isinstance(x, ClosedJaxpr)]
    values = [*arrays_in(program), *(x for each in closed for x in each.consts), *call.captured]
    constants = set(map(_identity, values)) - {None}
    is_own = users_function(fn) is fn and is_our_module(getattr(fn, "__module__", None))
    if not constants or is_own:
        return {}
    on_host = [x for x in values if isinstance(x, np.ndarray)]
    found = {}
    for name, path, value in _reached(call):
        converted = [x for x in on_host if _is_converted(value, x)]
        if converted or _identity(value) in constants:
            found[name, path] = converted[0] if converted else _copy_if_mutable(value)
    return found


def _is_converted(value: Any, constant: np.ndarray) -> bool:
    """Whether JAX has made a constant of an array of NumPy, such as 32 bits of `float64`."""
    is_other = isinstance(value, np.ndarray) and value.dtype != constant.dtype
    is_similar = is_other and value.shape == constant.shape and is_numeric(value.dtype)
    return is_similar and not _differs(constant, value)


def _canonical(array: np.ndarray) -> np.ndarray:
    """Returns an array with the dtype that JAX gives it."""
    with np.errstate(over="ignore"):
        return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _copy_if_mutable(value: Any) -> Any:
    is_mutable = isinstance(value, np.ndarray) and value.nbytes <= _LARGE
    return value.copy() if is_mutable else value


def stale_array(call: Call, captured: Captured) -> str | None:
    """Returns the message for a captured array whose name refers to another array now, or None.

    Or for a variable, if the call has the old one in place of the new one.
    """
    ids = set(map(id, call.captured))
    now: dict[Any, list[Any]] = defaultdict(list)
    for name, path, value in _reached(call):
        if (name, path) in captured:
            now[name, path].append(value)
    for key, values in now.items():
        if all(_differs(captured[key], value, ids) for value in values):
            return _message(call.fn, captured[key], *key)
    return None


def _differs(old: Any, new: Any, ids: Set[int] = frozenset()) -> bool:
    """Whether a value replaces another one and is not equal, or a variable another variable."""
    if isinstance(old, Variable):
        return isinstance(new, Variable) and id(old) in ids and id(new) not in ids
    was_array = isinstance(old, _ARRAYS)
    if new is old or (was_array and not isinstance(new, (*_NUMBERS, *_ARRAYS))):
        return False
    try:
        new = _canonical(new) if isinstance(new, np.ndarray) else new
        is_other = was_array and isinstance(new, _ARRAYS) and new.dtype != old.dtype
        return is_other or not np.array_equal(new, old, equal_nan=was_array)
    except Exception:  # deleted, traced, or on the devices of other processes
        return False


def _identity(value: Any) -> object:
    """Returns what is equal for an array and its constant in a program; None for other values."""
    if not isinstance(value, (*_ARRAYS, Variable)):
        return None
    if not isinstance(value, np.ndarray):
        return id(value)
    return value.ctypes.data, value.shape, value.strides  # of which the constant is a view


def _message(fn: Callable[..., Any], array: Any, inner: str | None, path: str) -> str:
    name = inner or name_of(fn)
    if isinstance(array, Variable):
        return (
            f"{name} still uses the first {path!r}, and ignores the mirror.Variable that has "
            f"replaced it. Keep the variable, and assign to it: {path}.assign(value)."
        )
    if inner is not None:  # strategy.run does not pass its arguments
        fix = "Make it a mirror.Variable, and assign to it."
    else:
        fix = _as_argument(fn, name, path.rpartition(".")[2].partition("[")[0])
    return (
        f"{name} still uses the first {path!r}, {describe(array)}, and ignores its new value: an "
        "array that a step does not receive as an argument is a constant of the compiled step. "
        f"{fix}"
    )


Attributes = Mapping[int, Mapping[str, Any]]
"""What the attributes of static arguments hold, by position of the leaf, and path."""


def attributes_of(static: Iterable[int], leaves: Sequence[Any]) -> Attributes:
    """Returns the attributes of the static arguments that are equal only to themselves."""
    found = {}
    for i in static:
        if type(leaves[i]).__hash__ is object.__hash__ and _has_users_class(leaves[i]):
            chains = _chains([("", leaves[i])], set(), 2 * _DEPTH, _data_in)
            chains = itertools.islice(chains, _MOST_ATTRIBUTES)
            found[i] = {chain[-1]: x for chain, x in chains if isinstance(x, _LEAVES)}
    return found


def _data_in(path: str, value: Any) -> list[tuple[str, Any]]:
    """Returns what a container or an object of the user contains, except what its class does."""
    if isinstance(value, list | tuple | dict):
        return _contained(path, value)
    is_data = isinstance(value, SimpleNamespace | argparse.Namespace) or _has_users_class(value)
    if is_object(value) or not is_data:
        return []
    return [(f"{path}.{name}", item) for name, item in _attributes(value).items()]


def unwritten(before: Attributes, after: Attributes) -> Attributes:
    """Returns the numbers, texts and None in attributes that a trace has not written."""
    return {
        i: {
            path: value
            for path, value in found.items()
            if not isinstance(value, (*_ARRAYS, ModuleType))
            and before[i].get(path, before) is value
        }
        for i, found in after.items()
    }


def changed_attribute(call: Call, before: Attributes) -> str | None:
    """Returns the message for an attribute that has another value than in the trace, or None."""
    fn = call.fn
    for i, now in attributes_of(before, call.leaves).items():
        for path, old in before[i].items():
            if _differs(old, now.get(path, old)):
                name = path[1:].partition(".")[0].partition("[")[0]
                new = now[path]
                new = describe(new) if isinstance(new, _ARRAYS) else repr(new)
                return (
                    f"{name_of(fn)} still uses the first {leaf_names(fn, call.tree)[i]}{path}, "
                    f"{old!r}, and ignores its new value, {new}: what a step reads from an "
                    "object that is not a pytree is a constant of the compiled step. "
                    f"{_as_argument(fn, name_of(fn), name)}"
                )
    return None


def require_nothing_bound(fn: Callable[..., Any]) -> None:
    """Rejects a step that has an nnx object bound to it or in its closure.

    Raises:
        ValueError: If there is such an object.
    """
    for name, value in _bound(fn)[0]:
        if _would_be_constant(value):
            is_owner = name == "self"
            what = f"{type(value).__name__!r} that it is bound to" if is_owner else repr(name)
            raise ValueError(_capture_message(fn, f"the nnx object {what}"))


def require_nothing_captured(call: Call, constants: Sequence[Any]) -> None:
    """Rejects a step that has read nnx or Keras variables that are not among its arguments.

    The array that such a variable holds during the trace would be a constant of the program.

    Args:
        call: The call.
        constants: Constants of its trace.

    Raises:
        ValueError: If a variable that the step can reach by names holds one of the constants.
    """
    fn = call.fn
    for constant in constants:
        if isinstance(constant, jax.core.Tracer):
            raise ValueError(stale_message(fn, constant))
    ids = {id(constant) for constant in constants if isinstance(constant, jax.Array)}
    for name, path, value in _reached(call) if ids else ():
        if library() is not None and has_variables(value):
            if any(id(variable.value) in ids for variable in variables_of(value)):
                raise ValueError(
                    f"{name or name_of(fn)} captures the Keras {type(value).__name__} {path!r}, so "
                    "the current values of its variables would become constants of the step. "
                    f"{STATELESS_CALL}"
                )
        elif _would_be_constant(value) and any(id(leaf) in ids for leaf in _leaves(value)):
            raise ValueError(_capture_message(fn, f"the nnx object {path!r}", name))


@contextlib.contextmanager
def keeps_keras(fn: Callable[..., Any]) -> Iterator[None]:
    """Context manager around a trace of a step, which must not assign to variables of Keras.

    They would hold traced values afterwards, so they get their values back.

    Raises:
        ValueError: If the step has assigned to a variable.
    """
    found = [] if library() is None else [pair for pair in reachable(fn) if has_variables(pair[1])]
    saved = [(path, each, v, v.value) for path, each in found for v in variables_of(each)]
    assigned = []
    try:
        yield
    finally:
        for path, each, variable, value in saved:
            if isinstance(variable.value, jax.core.Tracer):
                variable.assign(value)
                assigned.append((path, each))
    for path, each in assigned[:1]:
        raise ValueError(
            f"{name_of(fn)} changes the Keras {type(each).__name__} {path!r}, which strategy.run "
            f"does not update. {STATELESS_CALL}"
        )


def captured_message(fn: Callable[..., Any], frames: Iterable[FrameType]) -> str | None:
    """Returns the message for a step of which a frame names an nnx object from outside the trace.

    Args:
        fn: The step.
        frames: Frames of the step and of the functions that it called.
    """
    names = [path for path, value in reachable_in(frames) if _is_concrete(value)]
    return _capture_message(fn, f"the nnx object {names[0]!r}") if names else None


def leaked_names(fn: Callable[..., Any]) -> list[tuple[str, jax.core.Tracer]]:
    """Returns the traced values that a step has stored outside itself, with their paths."""
    return [(path, value) for path, value in reachable(fn) if isinstance(value, jax.core.Tracer)]


STORED = "that was stored by an earlier call of the step,"
"""Part of the message for a value of another trace, by which `mirror estimate-memory` tells it."""


def stale_message(fn: Callable[..., Any], tracer: jax.core.Tracer) -> str:
    """Returns the message for a step that uses a value that an earlier trace has stored."""
    leaked = leaked_names(fn)
    names = [path for path, value in leaked if value is tracer] or [path for path, _ in leaked]
    what = (
        f"{names[0]!r}, a traced {describe(tracer)}," if names else f"a traced {describe(tracer)}"
    )
    name = name_of(fn)
    return (
        f"{name} uses {what} {STORED} or belongs to the "
        f"transformation around it. A traced value has no number after its trace. Return it from "
        f"the step, and pass it as an argument: value = strategy.run({name}, (value, ...))."
    )


Chains = Sequence[tuple[int, tuple[str, ...]]]
"""Where functions name variables: the number of the function, and paths, outermost first."""
NamedVariables = Mapping[tuple[int, tuple[str, ...]], Mapping[str, int]]
"""The `id` of each variable in a container, by path."""


def chains_to(fn: Callable[..., Any], variables: Iterable[Variable]) -> Chains:
    """Returns where the functions of a step name the variables that it captures."""
    ids = set(map(id, variables))
    return [
        (i, chain)
        for i, each in enumerate(users_functions(fn))
        for chain, value in _chains(referenced(each), set(), _DEPTH)
        if id(value) in ids
    ]


def variables_along(fn: Callable[..., Any], chains: Chains) -> NamedVariables:
    """Returns the variables in all containers along some chains: called before each run.

    They also change if a step reads the last item of a list, to which another one is appended.
    """
    functions = users_functions(fn)
    found: dict[Any, dict[str, Any]] = {}
    for i, chain in chains:
        value = None
        for k, path in enumerate(chain):
            outer = i, chain[:k]
            if outer not in found:
                found[outer] = dict(_items(chain[k - 1], value) if k else referenced(functions[i]))
            value = found[outer].get(path)
    return {
        outer: {path: id(value) for path, value in items.items() if isinstance(value, Variable)}
        for outer, items in found.items()
    }


def _would_be_constant(value: object) -> bool:
    """Whether this is an nnx object whose reads are not tracked; reads of a `Variable` are."""
    return is_object(value) and not isinstance(value, Variable)


def _is_concrete(value: object) -> bool:
    """Whether this is an nnx object with an array that is not traced."""
    return _would_be_constant(value) and any(
        isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in _leaves(value)
    )


def _leaves(value: object) -> list[Any]:
    """Returns what the variables of an nnx object hold."""
    variables = [node for _, node in nnx.iter_graph(value) if isinstance(node, nnx.Variable)]
    return jax.tree.leaves([variable.get_raw_value() for variable in variables])


def _capture_message(fn: Callable[..., Any], what: str, inner: str | None = None) -> str:
    user = users_function(fn)
    name = inner or name_of(user)
    if user is not fn or inner is not None:
        return (
            f"{name} captures {what}, so its current values would become constants of the compiled "
            "step. Make it a part of the model that a loss or penalty receives, and select what to "
            "train: mirror.Trainer(wrt=...). A constant must be plain arrays, such as "
            "nnx.to_pure_dict(nnx.state(model))."
        )
    head = what.rpartition(" ")[2].strip("'") if what.endswith("'") else "model"
    own = head.rpartition(".")[2]
    own = own if own.isidentifier() else "model"
    return (
        f"{name} captures {what}, so its current values would become constants of the compiled "
        f"step. {_as_argument(fn, name, own)}"
    )


def _as_argument(fn: Callable[..., Any], name: str, own: str) -> str:
    """Returns the sentence that turns a captured value into an argument of the step."""
    arguments = ", ".join([own, *parameter_names(fn)])
    definition = f"def {name}({arguments}), and " if name.isidentifier() else ""
    comma = "," if arguments == own else ""
    return f"Pass it as an argument: {definition}strategy.run({name}, ({arguments}{comma}))."
