"""Captured arrays: a compiled step keeps the arrays that it read from outside its arguments.

Reading a constant is valid, and so is a constant that `strategy.run` returned, such as the mean of
a dataset. A mistake shows later: the name of the array refers to another one, and the compiled step
still uses the old one. Nothing tells when a name is rebound, so later calls look it up again.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from mirror._src.base.errors import describe
from mirror._src.base.naming import is_our_module, name_of, parameter_names
from mirror._src.engine.environment import reachable
from mirror._src.jaxprs.equations import arrays_in


def captured_arrays(fn: Callable[..., Any], program: ClosedJaxpr) -> dict[str, Any]:
    """Returns the float arrays from outside its arguments that a step has read, by path."""
    constants = {_identity(const) for const in [*arrays_in(program), *program.consts]}
    constants.discard(None)
    if not constants or is_our_module(getattr(fn, "__module__", None)):
        return {}
    return {path: value for path, value in reachable(fn) if _identity(value) in constants}


def is_time_to_look(runs: int) -> bool:
    """Whether to look for stale arrays before a call: at 1, 2, 4, 8, ... completed runs.

    A look takes longer than a call of a small step, so that not every call can have one.
    """
    return runs > 0 and runs & (runs - 1) == 0


def stale_array(fn: Callable[..., Any], captured: Mapping[str, Any]) -> str | None:
    """Returns the message for a captured array whose name refers to another array now, or None."""
    now: dict[str, list[Any]] = defaultdict(list)
    for path, value in reachable(fn):
        if path in captured:
            now[path].append(value)
    for path, values in now.items():
        if all(_differs(captured[path], value) for value in values):
            return _message(fn, path, captured[path])
    return None


def _differs(old: Any, new: Any) -> bool:
    """Whether an array replaces another one and has other values."""
    if new is old or not _is_float(new) or isinstance(new, jax.core.Tracer):
        return False
    if new.shape != old.shape or new.dtype != old.dtype:
        return True
    try:
        return np.asarray(new).tobytes() != np.asarray(old).tobytes()
    except Exception:  # deleted, or on the devices of other processes
        return False


def _identity(value: Any) -> object:
    """Returns what is equal for a float array and its constant in a program; None for others."""
    if not _is_float(value):
        return None
    if isinstance(value, jax.Array):
        return id(value)
    return value.ctypes.data, value.shape, value.strides  # of which the constant is a view


def _is_float(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray) and jnp.issubdtype(value.dtype, jnp.inexact)


def _message(fn: Callable[..., Any], path: str, array: Any) -> str:
    name, own = name_of(fn), path.rpartition(".")[2].partition("[")[0]
    arguments = ", ".join([own, *parameter_names(fn)])
    return (
        f"{name} still uses the first {path!r}, {describe(array)}, and ignores its new value: an "
        "array that a step reads from outside its arguments is a constant of the compiled step. "
        f"Pass it as an argument: def {name}({arguments}), and strategy.run({name}, ({arguments}"
        f"{',' if arguments == own else ''}))."
    )
