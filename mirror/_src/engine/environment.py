"""Names what a function references: closure, globals, bound objects, and what these contain.

A jaxpr lists the constants of a trace, but not the variables that they were read from, and no
public API reports what a step reads. The names in its code are a guess, because `co_names` also
contains names of attributes: for `x.model`, it returns the global `model`. Callers may only use it
where an extra object does no harm. Delete this module once the jaxpr says where a constant is from.
"""

import contextlib
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

_DEPTH = 3  # `trainer.state["losses"][0]`
_MOST_ITEMS = 50  # from each end of a container: a list that a step appends to may be long
_LEAVES = (str, bytes, int, float, complex, type(None), np.ndarray, jax.Array, ModuleType)

Named = Iterable[tuple[str, Any]]


def reachable(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields the values that a function can reach, with their paths, such as `losses[0]`."""
    yield from _expanded(referenced(fn), set(), _DEPTH)


def reachable_in(frames: Iterable[FrameType]) -> Iterator[tuple[str, Any]]:
    """Yields the values that running functions can reach, innermost function first."""
    seen: set[int] = set()
    for frame in reversed(list(frames)):
        # A comprehension has its own frame before Python 3.12, whose iterator is named `.0`.
        named = [(name, value) for name, value in frame.f_locals.items() if name.isidentifier()]
        yield from _expanded([*named, *_globals_of(frame.f_code, frame.f_globals)], seen, _DEPTH)


def bound_by(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Returns what is bound to a function: arguments of a partial, its object, and its closure."""
    return _bound(fn)[0]


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
    while isinstance(fn, functools.partial):
        named += [(f"args[{i}]", value) for i, value in enumerate(fn.args)]
        named += fn.keywords.items()
        fn = fn.func
    owner = getattr(fn, "__self__", None)
    with contextlib.suppress(ValueError):  # wraps itself
        fn = inspect.unwrap(fn)
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
        return [(f"{path}[{i}]", value[i]) for i in _ends(range(len(value)))]
    if isinstance(value, dict):
        return [(f"{path}[{key!r}]", value[key]) for key in _ends(list(value))]
    if isinstance(value, set | frozenset):
        return [(path, item) for item in _ends(list(value))]
    if isinstance(value, jax.core.Tracer | nnx.Pytree | nnx.Variable):
        return []
    code = code_of(inspect.unwrap(value)) if callable(value) else None
    if code is not None:
        return referenced(value) if is_users(code.co_filename) else []
    # The attributes of an object, and its methods, which may read globals.
    classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
    owners = [cls for cls in reversed(classes) if _is_users(sys.modules.get(cls.__module__))]
    attributes = {name: item for cls in owners for name, item in vars(cls).items()}
    if not isinstance(value, type):
        attributes |= getattr(value, "__dict__", {})
    return [(f"{path}.{name}", attributes[name]) for name in _ends(list(attributes))]


def _ends(items: Any) -> list[Any]:
    """Returns the items from both ends of a long sequence."""
    return [*items[:_MOST_ITEMS], *items[_MOST_ITEMS:][-_MOST_ITEMS:]]


def _is_users(module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    name = getattr(module, "__name__", "")
    return is_users(file) if file else name not in sys.stdlib_module_names
