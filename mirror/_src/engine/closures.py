"""Rejects state that a step reads from outside its arguments: closure, globals, bound objects."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

import jax
from flax import nnx

from mirror._src.base.errors import describe
from mirror._src.base.keras_library import STATELESS_CALL, has_variables, library, variables_of
from mirror._src.base.naming import name_of, parameter_names
from mirror._src.engine.environment import bound_by, reachable, reachable_in, referenced
from mirror._src.engine.nnx.structure import is_object
from mirror._src.engine.variable import Variable


def require_nothing_bound(fn: Callable[..., Any]) -> None:
    """Rejects a step that has an nnx object bound to it or in its closure.

    Raises:
        ValueError: If there is such an object.
    """
    for name, value in bound_by(fn):
        if _would_be_constant(value):
            is_owner = name == "self"
            what = f"{type(value).__name__!r} that it is bound to" if is_owner else repr(name)
            raise ValueError(_capture_message(fn, f"the nnx object {what}"))


def require_nothing_captured(fn: Callable[..., Any], constants: Sequence[Any]) -> None:
    """Rejects a step that has read nnx or Keras variables that are not among its arguments.

    The array that such a variable holds during the trace would be a constant of the program.

    Args:
        fn: The step.
        constants: Constants of its trace.

    Raises:
        ValueError: If a variable that the step can reach by names holds one of the constants.
    """
    for constant in constants:
        if isinstance(constant, jax.core.Tracer):
            raise ValueError(stale_message(fn, constant))
    ids = {id(constant) for constant in constants if isinstance(constant, jax.Array)}
    for path, value in reachable(fn) if ids else ():
        if library() is not None and has_variables(value):
            if any(id(variable.value) in ids for variable in variables_of(value)):
                raise ValueError(
                    f"{name_of(fn)} captures the Keras {type(value).__name__} {path!r}, so the "
                    "current values of its variables would become constants of the step. "
                    f"{STATELESS_CALL}"
                )
        elif _would_be_constant(value) and any(id(leaf) in ids for leaf in _leaves(value)):
            raise ValueError(_capture_message(fn, f"the nnx object {path!r}"))


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


def referenced_variables(fn: Callable[..., Any]) -> list[Variable]:
    """Returns the variables in a function's closure, named globals and bound objects.

    Includes the attributes of the objects there, but no deeper levels.
    """
    values = [value for _, value in referenced(fn)]
    attributes = [vars(value).values() for value in values if _has_attributes(value)]
    candidates = [*values, *itertools.chain.from_iterable(attributes)]
    return [value for value in candidates if isinstance(value, Variable)]


def referenced_ids(fn: Callable[..., Any]) -> list[int]:
    """Returns the `id` of each of the `referenced_variables` of a function."""
    return list(map(id, referenced_variables(fn)))


def _has_attributes(value: object) -> bool:
    """Whether this is an object whose attributes a step may read variables from."""
    is_instance = not isinstance(value, type | ModuleType | Variable) and not callable(value)
    return is_instance and hasattr(value, "__dict__")


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
