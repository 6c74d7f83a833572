"""Finds the values that a step can reach without receiving them, and what the user calls them.

A guess, for messages only: it reads closures, globals and containers, but not what code computes.
"""

import contextlib
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, CodeType, FrameType, ModuleType
from typing import Any

import jax
import numpy as np
from flax import nnx

from mirror._src.base.naming import code_of
from mirror._src.base.source_lines import is_users

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_DEPTH = 3  # `trainer.state["losses"][0]`
_MOST_ITEMS = 50  # from each end of a container: a list that a step appends to may be long
_LEAVES = (str, bytes, int, float, complex, type(None), np.ndarray, jax.Array, ModuleType)

Named = Iterable[tuple[str, Any]]


def reachable(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields the values that a function can reach, with their paths, such as `losses[0]`."""
    yield from _expanded(_named_by(fn), set(), _DEPTH)


def reachable_in(frames: Iterable[FrameType]) -> Iterator[tuple[str, Any]]:
    """Yields the values that running functions can reach, innermost function first."""
    seen: set[int] = set()
    for frame in reversed(list(frames)):
        # A comprehension has its own frame before Python 3.12, whose iterator is named `.0`.
        named = [(name, value) for name, value in frame.f_locals.items() if name.isidentifier()]
        yield from _expanded(named + _globals_of(frame.f_code, frame.f_globals), seen, _DEPTH)


def named_globals(fn: Callable[..., Any]) -> dict[str, Any]:
    """Returns the globals that a function may read, by name.

    This is a guess, because `co_names` also contains names of attributes: for `x.model`, it returns
    the global `model`. Callers may only use it where an extra object does no harm.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    code, values = code_of(fn), getattr(inspect.unwrap(fn), "__globals__", {})
    return {name: values[name] for name in (code.co_names if code else ()) if name in values}


def contents(cell: CellType) -> Any:
    """Returns the value in a cell of a closure, or None if the cell is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _globals_of(code: CodeType, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns the globals that a function or the functions defined in it may read."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    loads = (i.argval for i in dis.get_instructions(code) if i.opname in _LOADS)
    own = [(name, values[name]) for name in dict.fromkeys(loads) if name in values]
    return own + [pair for each in inner for pair in _globals_of(each, values)]


def _named_by(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Returns what a function names: bound arguments, its closure, and globals."""
    named: list[tuple[str, Any]] = []
    while isinstance(fn, functools.partial):
        named += [(f"args[{i}]", value) for i, value in enumerate(fn.args)]
        named += fn.keywords.items()
        fn = fn.func
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        named.append(("self", owner))
    try:
        fn = inspect.unwrap(fn)
    except ValueError:  # wraps itself
        return named
    code, cells = code_of(fn), getattr(fn, "__closure__", None) or ()
    if code is not None and cells:
        named += zip(code.co_freevars, map(contents, cells), strict=True)
    return named + (_globals_of(code, getattr(fn, "__globals__", {})) if code is not None else [])


def _expanded(named: Named, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yields named values and what they contain, breadth first, each value once."""
    inner: list[tuple[str, Any]] = []
    for path, value in named:
        if id(value) in seen and not isinstance(value, _LEAVES):
            continue
        seen.add(id(value))
        yield path, value
        if depth and not isinstance(value, _LEAVES):
            with contextlib.suppress(Exception):  # a proxy whose attributes raise
                inner += _contained(path, value)
    if inner:
        yield from _expanded(inner, seen, depth - 1)


def _contained(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        ends = [*range(len(value))[:_MOST_ITEMS], *range(len(value))[_MOST_ITEMS:][-_MOST_ITEMS:]]
        return [(f"{path}[{i}]", value[i]) for i in ends]
    if isinstance(value, dict):
        keys = list(value)
        keys = [*keys[:_MOST_ITEMS], *keys[_MOST_ITEMS:][-_MOST_ITEMS:]]
        return [(f"{path}[{key!r}]", value[key]) for key in keys]
    if isinstance(value, set | frozenset):
        return [(path, item) for item in list(value)[:_MOST_ITEMS]]
    if isinstance(value, jax.core.Tracer | nnx.Pytree | nnx.Variable):
        return []
    if isinstance(value, type):
        return _attributes(path, vars(value)) if _is_users_class(value) else []
    code = code_of(inspect.unwrap(value)) if callable(value) else None
    if code is not None:
        return _named_by(value) if is_users(code.co_filename) else []
    attributes = getattr(value, "__dict__", None)
    return _attributes(path, attributes) if isinstance(attributes, dict) else []


def _attributes(path: str, attributes: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(f"{path}.{name}", item) for name, item in list(attributes.items())[:_MOST_ITEMS]]


def _is_users_class(cls: type) -> bool:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__module__ != "builtins" and (file is None or is_users(file))
