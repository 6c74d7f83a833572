"""Names of functions, arguments and pytree paths, for messages."""

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import jax

_thread = threading.local()


def name_of(fn: Callable[..., Any]) -> str:
    """Returns the function's name, also for a `functools.partial`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Returns the parameter names of the positional arguments, or `args[i]` without a name."""
    names = parameter_names(fn)
    return [names[i] if i < len(names) else f"args[{i}]" for i in range(count)]


def parameter_names(fn: Callable[..., Any]) -> list[str]:
    """Returns the names of the positional parameters; [] if they are unknown."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def require_parameters(
    fn: Callable[..., Any], what: str, arguments: Sequence[str], fix: str
) -> None:
    """Rejects a function that cannot be called with these positional arguments.

    Args:
        fn: The function. If its signature is unknown, it is not checked.
        what: The function in words, for the message.
        arguments: Names of the arguments.
        fix: How to change the function.

    Raises:
        TypeError: If it takes other arguments.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise TypeError(
            f"{what} takes {signature_of(fn)}, but it is called with "
            f"({', '.join(arguments)}). {fix}"
        ) from None


def signature_of(fn: Callable[..., Any], *, is_method: bool = False) -> str:
    """Returns the parameters of a function without annotations: `(model, x, y=None)`.

    Args:
        fn: The function.
        is_method: Whether to omit `self`.
    """
    signature = inspect.signature(fn)
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if not (is_method and parameter.name == "self")
    ]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def leaf_names(fn: Callable[..., Any], tree: tuple[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """Returns the path of each leaf as code: `batch['image']`, `state.params['w']`."""
    args, kwargs = tree
    names = argument_names(fn, len(args))
    paths = []
    for path, _ in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
        head = names[path[1].idx] if path[0].idx == 0 else path[1].key
        paths.append(head + keys(path[2:]))
    return paths


def keys(path: Sequence[Any]) -> str:
    """Returns a path as code, without the key from a `PerReplica` to its array."""
    text = jax.tree_util.keystr(tuple(path))
    return text.removesuffix(".stacked")


def layers_of(fn: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Returns a function, and what its partials and decorators, such as `jax.jit`, wrap."""
    layers = [fn]
    while len(layers) < 100:  # some objects wrap themselves
        inner = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__wrapped__", fn)
        if inner is fn:
            break
        layers.append(fn := inner)
    return layers


def code_of(fn: Callable[..., Any]) -> CodeType | None:
    """Returns the code object of a function, also of a partial and of a decorated one."""
    return getattr(layers_of(fn)[-1], "__code__", None)


def depth_of_user(caller: str = "mirror") -> int:
    """Returns the `stacklevel` with which `warnings.warn` shows the user's line.

    Args:
        caller: Name of a library that calls mirror, whose frames are skipped, too.
    """
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None:
        package = frame.f_globals.get("__package__") or frame.f_globals.get("__name__")
        if not any(_is_in(package, skipped) for skipped in ("mirror", "contextlib", caller)):
            break
        frame, depth = frame.f_back, depth + 1
    return depth


def place_of_user() -> tuple[str, int]:
    """Returns the file and the line of the user that `warn_user` shows."""
    frame = sys._getframe(depth_of_user() - 1)
    return frame.f_code.co_filename, frame.f_lineno


def warn_at(place: tuple[str, int]) -> None:
    """Makes `warn_user` show a place in this thread, whose stack has no line of the user."""
    _thread.place = place


def is_first(warned: set[str], kind: str) -> bool:
    """Whether a warning of this kind is the first one; then it is added to the kinds."""
    is_first = kind not in warned
    warned.add(kind)
    return is_first


def warn_user(message: str, caller: str = "mirror") -> None:
    """Issues a warning at the user's line; `caller` as for `depth_of_user`."""
    place = getattr(_thread, "place", None)
    if place is None:
        warnings.warn(message, stacklevel=depth_of_user(caller))
    else:
        warnings.warn_explicit(message, UserWarning, *place)


def is_our_module(name: str | None) -> bool:
    """Whether a module or package belongs to mirror. The name may be None (`__main__`)."""
    return _is_in(name, "mirror")


def _is_in(name: str | None, package: str) -> bool:
    return name is not None and (name == package or name.startswith(f"{package}."))
