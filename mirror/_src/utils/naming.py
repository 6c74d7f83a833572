"""Names of functions, arguments and pytree paths, for messages; and which code is mirror's own."""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import jax


def name_of(fn: Callable[..., Any]) -> str:
    """The function's own name."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """What the user calls the positional arguments: the names of the parameters, else `args[i]`."""
    names: list[str] = []
    try:
        for parameter in inspect.signature(fn).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                break
            if parameter.kind is not parameter.KEYWORD_ONLY:
                names.append(parameter.name)
    except (TypeError, ValueError):
        pass
    return [names[i] if i < len(names) else f"args[{i}]" for i in range(count)]


def leaf_names(fn: Callable[..., Any], tree: tuple[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """The user's name for each leaf: `batch['image']`, `state.params['w']`."""
    args, kwargs = tree
    names = argument_names(fn, len(args))
    found = []
    for path, _ in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
        head = names[path[1].idx] if path[0].idx == 0 else path[1].key
        found.append(head + keys(path[2:]))
    return found


def keys(path: Sequence[Any]) -> str:
    """A path as code, without the step from a `PerReplica` to its array."""
    text = jax.tree_util.keystr(tuple(path))
    return text.removesuffix(".stacked")


def code_of(fn: Callable[..., Any]) -> CodeType | None:
    """The code that the function runs, under its partial arguments."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__code__", None)


def depth_of_user() -> int:
    """How far up the stack the caller of `mirror` is, as `warnings.warn` counts from its caller."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and is_our_module(frame.f_globals.get("__package__")):
        frame, depth = frame.f_back, depth + 1
    return depth


def is_our_module(name: str | None) -> bool:
    """Whether a module or package of that name is ours; a script's `__main__` may have none."""
    return name is not None and (name == "mirror" or name.startswith("mirror."))
