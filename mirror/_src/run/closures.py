"""What a step reads from outside its arguments: its closure, its globals, what is bound to it.

JAX can tell the constants of a trace but not where they come from, hence the look at the function.
"""

import functools
import gc
import inspect
import itertools
from collections.abc import Callable, Sequence
from types import CellType, ModuleType
from typing import Any

import jax
from flax import nnx

from mirror._src.run.nnx.structure import is_object
from mirror._src.utils.errors import describe
from mirror._src.utils.naming import code_of, name_of
from mirror._src.variables.variable import Variable


def require_nothing_bound(fn: Callable[..., Any]) -> None:
    """Refuses a step that has an nnx object bound to it or in its closure.

    Raises:
        ValueError: it has; the message names it.
    """
    while isinstance(fn, functools.partial):
        bound = [*((f"args[{i}]", v) for i, v in enumerate(fn.args)), *fn.keywords.items()]
        for name, value in bound:
            if _is_frozen(value):
                raise ValueError(_frozen(fn, f"the nnx object {name!r}"))
        fn = fn.func
    if is_object(fn) or is_object(getattr(fn, "__self__", None)):
        raise ValueError(_frozen(fn, f"the nnx object {name_of(fn)!r} that it belongs to"))
    inside = getattr(inspect.unwrap(fn), "__closure__", None) or ()
    names = inspect.unwrap(fn).__code__.co_freevars if inside else ()
    for name, cell in zip(names, inside, strict=True):
        if _is_frozen(_contents(cell)):
            raise ValueError(_frozen(fn, f"the nnx object {name!r}"))


def variables_around(fn: Callable[..., Any]) -> list[int]:
    """Identities of the variables that the names in a function mean; see `named_variables`."""
    return list(map(id, named_variables(fn)))


def named_variables(fn: Callable[..., Any]) -> list[Variable]:
    """The variables that the names in a function mean: its closure's, globals', its object's."""
    found: list[Any] = []
    while isinstance(fn, functools.partial):
        found += [*fn.args, *fn.keywords.values()]
        fn = fn.func
    found.append(getattr(fn, "__self__", None))
    code, inner = code_of(fn), inspect.unwrap(fn)
    found += map(_contents, getattr(inner, "__closure__", None) or ())
    known = getattr(inner, "__globals__", {})
    found += [known.get(name) for name in (code.co_names if code else ())]
    held = [vars(value).values() for value in found if _holds_variables(value)]
    every = [*found, *itertools.chain.from_iterable(held)]
    return [value for value in every if isinstance(value, Variable)]


def _holds_variables(value: object) -> bool:
    """Whether it is an object whose attributes a step may read variables from."""
    plain = not isinstance(value, type | ModuleType | Variable) and not callable(value)
    return plain and hasattr(value, "__dict__")


def _is_frozen(value: object) -> bool:
    """Whether it would be frozen into a program; a `mirror.Variable` is found while tracing."""
    return is_object(value) and not isinstance(value, Variable)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def require_nothing_captured(fn: Callable[..., Any], constants: Sequence[Any]) -> None:
    """Refuses a step that has read nnx variables which are not among its arguments.

    What a traced step reads from outside is a constant of its program; one that a variable holds
    would be the variable's value of this moment for ever.

    Raises:
        ValueError: it has.
    """
    arrays = [constant for constant in constants if isinstance(constant, jax.Array)]
    holders = gc.get_referrers(*arrays) if arrays else []
    held = [v for v in holders if isinstance(v, nnx.Variable)]
    if not held:
        return
    code, known = code_of(fn), getattr(fn, "__globals__", {})
    named = [n for n in (code.co_names if code else ()) if is_object(known.get(n))]
    if named:
        raise ValueError(_frozen(fn, f"the nnx object {named[0]!r}"))
    shapes = ", ".join(f"{type(v).__name__} {describe(v.get_raw_value())}" for v in held[:3])
    raise ValueError(_frozen(fn, f"the nnx variables ({shapes})"))


def _frozen(fn: Callable[..., Any], what: str) -> str:
    return (
        f"{name_of(fn)} reads {what} from outside its arguments: its values would be frozen into "
        f"the compiled step. Pass the model: strategy.run({name_of(fn)}, (model, ...))."
    )
