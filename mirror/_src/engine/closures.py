"""Finds state that a step reads from outside its arguments: closure, globals, bound objects.

A jaxpr lists the constants of a trace, but not the variables that they were read from. The checks
therefore inspect the function itself.
"""

import contextlib
import functools
import gc
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

import jax
from flax import nnx

from mirror._src.base.errors import describe
from mirror._src.base.keras_library import STATELESS_CALL, has_variables, library, variables_of
from mirror._src.base.naming import name_of, parameter_names
from mirror._src.engine.environment import contents, named_globals, reachable, reachable_in
from mirror._src.engine.nnx.structure import is_object
from mirror._src.engine.variable import Variable


def require_nothing_bound(fn: Callable[..., Any]) -> None:
    """Rejects a step that has an nnx object bound to it or in its closure.

    Raises:
        ValueError: If there is such an object.
    """
    while isinstance(fn, functools.partial):
        bound = [*((f"args[{i}]", v) for i, v in enumerate(fn.args)), *fn.keywords.items()]
        for name, value in bound:
            if _would_be_constant(value):
                raise ValueError(_capture_message(fn, f"the nnx object {name!r}"))
        fn = fn.func
    owner = fn if is_object(fn) else getattr(fn, "__self__", None)
    if is_object(owner):
        what = f"the nnx object {type(owner).__name__!r} that it is bound to"
        raise ValueError(_capture_message(fn, what))
    cells = getattr(inspect.unwrap(fn), "__closure__", None) or ()
    names = inspect.unwrap(fn).__code__.co_freevars if cells else ()
    for name, cell in zip(names, cells, strict=True):
        if _would_be_constant(contents(cell)):
            raise ValueError(_capture_message(fn, f"the nnx object {name!r}"))


def require_nothing_captured(fn: Callable[..., Any], constants: Sequence[Any]) -> None:
    """Rejects a step that has read nnx variables that are not among its arguments.

    The array that such a variable holds during the trace would be a constant of the program.

    Args:
        fn: The step.
        constants: Constants of its trace.

    Raises:
        ValueError: If an nnx or Keras variable holds one of the constants.
    """
    leaked = [x for x in constants if isinstance(x, jax.core.Tracer)]
    if leaked:
        raise ValueError(stale_message(fn, leaked[0]))
    arrays = [x for x in constants if isinstance(x, jax.Array)]
    if arrays and library() is not None:
        _require_no_keras(fn, set(map(id, arrays)))
    variables = _variables_holding(fn, arrays)
    if not variables:
        return
    ids = set(map(id, variables))
    names = [
        path for path, value in reachable(fn) if _would_be_constant(value) and _holds(value, ids)
    ]
    if names:
        raise ValueError(_capture_message(fn, f"the nnx object {names[0]!r}"))
    shapes = ", ".join(f"{type(v).__name__} {describe(v.get_raw_value())}" for v in variables[:3])
    raise ValueError(_capture_message(fn, f"the nnx variables ({shapes})"))


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


def _require_no_keras(fn: Callable[..., Any], constants: set[int]) -> None:
    """Rejects a step with a Keras object of which a variable holds one of the constants."""
    for path, value in reachable(fn):
        if has_variables(value) and any(id(v.value) in constants for v in variables_of(value)):
            raise ValueError(
                f"{name_of(fn)} captures the Keras {type(value).__name__} {path!r}, so the current "
                f"values of its variables would become constants of the step. {STATELESS_CALL}"
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


def referenced_variables(fn: Callable[..., Any]) -> list[Variable]:
    """Returns the variables in a function's closure, named globals and bound objects.

    Includes the attributes of the objects there, but no deeper levels.
    """
    values: list[Any] = []
    while isinstance(fn, functools.partial):
        values += [*fn.args, *fn.keywords.values()]
        fn = fn.func
    values.append(getattr(fn, "__self__", None))
    values += map(contents, getattr(inspect.unwrap(fn), "__closure__", None) or ())
    values += named_globals(fn).values()
    attributes = [vars(value).values() for value in values if _has_attributes(value)]
    candidates = [*values, *itertools.chain.from_iterable(attributes)]
    return [value for value in candidates if isinstance(value, Variable)]


def referenced_ids(fn: Callable[..., Any]) -> list[int]:
    """Returns the `id` of each of the `referenced_variables` of a function."""
    return list(map(id, referenced_variables(fn)))


# `_variables_holding` and `environment` look into CPython: no public API tells what a step reads.
# - JAX 0.10 and 0.12 turn an array that a trace reads into a constant without any callback; the
#   jaxpr holds the array, not where it was read from.
# - Flax 0.12.8 checks the trace when a variable is assigned, not when it is read. `on_get_value`
#   hooks reads of a single variable, so the user's variables would have to be found and changed.
# - `inspect.getclosurevars` resolves `co_names` as below, but raises an error for partial
#   functions, callable objects, and closures with an empty cell.
# Delete `_variables_holding` once Flax can report all reads of variables in a trace, and
# `environment` once the jaxpr also says where a constant was read.


def _variables_holding(fn: Callable[..., Any], arrays: Sequence[jax.Array]) -> list[nnx.Variable]:
    """Returns the nnx variables that hold one of the arrays.

    `gc.get_referrers` scans all objects of the process: 52 ms for 150,000 objects, once for each
    compilation that has constants. It does not find an array inside a container in a variable. Nor
    does it find objects that `gc.freeze` has set aside, as programs do before they fork: among
    these, only objects that the function reaches are searched.
    """
    holders = gc.get_referrers(*arrays) if arrays else []
    if arrays and gc.get_freeze_count():
        reached = [value for _, value in reachable(fn) if _would_be_constant(value)]
        nodes = [node for value in reached for _, node in nnx.iter_graph(value)]
        ids = set(map(id, arrays))
        holders += [
            n for n in nodes if isinstance(n, nnx.Variable) and id(n.get_raw_value()) in ids
        ]
    return [holder for holder in holders if isinstance(holder, nnx.Variable)]


def _has_attributes(value: object) -> bool:
    """Whether this is an object whose attributes a step may read variables from."""
    is_instance = not isinstance(value, type | ModuleType | Variable) and not callable(value)
    return is_instance and hasattr(value, "__dict__")


def _would_be_constant(value: object) -> bool:
    """Whether this is an nnx object whose reads are not tracked; reads of a `Variable` are."""
    return is_object(value) and not isinstance(value, Variable)


def _is_concrete(value: object) -> bool:
    """Whether this is an nnx object with an array that is not traced."""
    if not _would_be_constant(value):
        return False
    variables = [node for _, node in nnx.iter_graph(value) if isinstance(node, nnx.Variable)]
    values = [leaf for v in variables for leaf in jax.tree.leaves(v.get_raw_value())]
    return any(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in values)


def _holds(value: object, ids: set[int]) -> bool:
    """Whether an nnx object contains one of these variables."""
    return any(id(node) in ids for _, node in nnx.iter_graph(value))


def _capture_message(fn: Callable[..., Any], what: str) -> str:
    name = name_of(fn)
    head = what.rpartition(" ")[2].strip("'") if what.endswith("'") else "model"
    own = head.rpartition(".")[2]
    own = own if own.isidentifier() else "model"
    arguments = ", ".join([own, *parameter_names(fn)])
    definition = f"def {name}({arguments}), and " if name.isidentifier() else ""
    return (
        f"{name} captures {what}, so its current values would become constants of the compiled "
        f"step. Pass it as an argument: {definition}strategy.run({name}, "
        f"({arguments}{',' if arguments == own else ''}))."
    )
