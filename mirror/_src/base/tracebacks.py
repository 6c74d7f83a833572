"""The user's source lines in messages, and tracebacks that show only these lines."""

import contextlib
import functools
import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

import chex
import flax
import jax
import optax

from mirror._src.base.naming import code_of
from mirror._src.base.unknown_names import explain_unknown_names, mismatch_message

F = TypeVar("F", bound=Callable[..., Any])
_USERS = "_mirror_users_function"


def is_users(filename: str) -> bool:
    """Whether a file belongs neither to mirror, JAX, Flax, optax or chex nor to Python itself."""
    return not is_library(filename) and not is_standard(filename)


def is_library(filename: str) -> bool:
    """Whether a file belongs to mirror, JAX, Flax, optax or chex."""
    return filename.startswith(_directories()[1:])


def is_own(filename: str) -> bool:
    """Whether a file belongs to mirror."""
    return filename.startswith(_directories()[1])


def is_standard(filename: str) -> bool:
    """Whether a file belongs to Python's standard library."""
    if filename.startswith("<frozen "):
        return True
    stdlib = _directories()[0]
    if not filename.startswith(stdlib):
        return False
    # Packages are installed below the standard library, whose own path may contain these names.
    return filename[len(stdlib) :].split(os.sep)[0] not in ("site-packages", "dist-packages")


def line_of_user() -> str:
    """Returns the current line of the user's code, like `train.py:12: x = jnp.zeros(3)`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    location = place(frame.f_code.co_filename, frame.f_lineno)
    return f"{location}: {text}" if text else location


def place(filename: str, line: int | None) -> str:
    """Returns `train.py:12`; for a cell of a notebook, `Cell In[3], line 12`."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    compiler = getattr(shell, "compile", None)  # not in every shell
    cell = None if compiler is None else compiler.format_code_name(filename)
    return " ".join(cell) + f", line {line}" if cell else f"{os.path.basename(filename)}:{line}"


def on_behalf_of(fn: F, *users: Callable[..., Any]) -> F:
    """Lets `line_of` return the line of the user's first function for a function of mirror."""
    setattr(fn, _USERS, users)
    return fn


def users_functions(fn: Callable[..., Any]) -> Sequence[Callable[..., Any]]:
    """Returns the user's functions that a function of mirror calls, or the function itself."""
    users: Sequence[Callable[..., Any]] = getattr(fn, _USERS, (fn,))
    return users


def users_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the first of the `users_functions`, by which messages name a step."""
    return users_functions(fn)[0]


def line_of(fn: Callable[..., Any]) -> str:
    """Returns where a function of the user is defined, such as `train.py:12`; `""` if unknown."""
    code = code_of(users_function(fn))
    if code is None or not is_users(code.co_filename):
        return ""
    return place(code.co_filename, code.co_firstlineno)


@functools.cache
def _directories() -> tuple[str, ...]:
    """Returns the directories of the standard library, mirror, JAX, Flax, optax and chex."""
    modules = [sys.modules["mirror"], jax, flax, optax, chex]
    packages = [os.path.dirname(module.__file__) + os.sep for module in modules if module.__file__]
    return (sysconfig.get_paths()["stdlib"] + os.sep, *packages)


P = ParamSpec("P")
R = TypeVar("R")

# Where the innermost frame is ours, these are bugs of ours: a report needs every frame.
_BUGS = (AssertionError, AttributeError, NameError)


def hide_internal_frames(error: BaseException) -> None:
    """Removes the frames of mirror, JAX, Flax, optax and chex from the traceback of an error.

    The causes (`raise ... from`) are filtered too. `MIRROR_TRACEBACK=full` or
    `jax_traceback_filtering="off"` keep all frames.
    """
    with contextlib.suppress(Exception):  # what describes an error never replaces it
        _hide_internal_frames(error)


def _hide_internal_frames(error: BaseException) -> None:
    if os.environ.get("MIRROR_TRACEBACK") == "full":
        return
    if getattr(jax.config, "jax_traceback_filtering", None) == "off" or _is_bug(error):
        return
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.__traceback__ = _user_frames(cause.__traceback__)
        cause = cause.__cause__


def api_boundary(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function whose errors show no internal frames."""

    @functools.wraps(fn)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            hide_internal_frames(interrupt)
            raise
        except Exception as error:
            traceback = error.__traceback__
            if isinstance(error, TypeError) and traceback is not None and not traceback.tb_next:
                # Python rejected the call, before the function started.
                raise TypeError(mismatch_message(fn, error, args, kwargs)) from None
            hide_internal_frames(error)
            raise  # keeps __traceback__ as it is, and adds no frame

    return inside


_public: set[Callable[..., Any]] = set()


def make_public(name: str) -> None:
    """Decorates the functions and constructors of a module as `api_boundary`.

    The module also explains the names that it does not have.
    """
    explain_unknown_names(name)
    module = sys.modules[name]
    for key, value in list(vars(module).items()):
        fn = vars(value).get("__init__") if inspect.isclass(value) else value
        if key.startswith("_") or not inspect.isfunction(fn) or fn in _public:
            continue
        _public.add(boundary := api_boundary(fn))
        for owner in [value] if fn is not value else [module, sys.modules[fn.__module__]]:
            setattr(owner, fn.__name__, boundary)  # also where `pickle` looks for it


def _user_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Returns the traceback of the frames that are the user's, or called by them."""
    entries: list[TracebackType] = []
    is_hidden = True
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if is_library(filename):
            is_hidden = True
        elif not is_standard(filename):
            is_hidden = False
        if not is_hidden:
            entries.append(traceback)
        traceback = traceback.tb_next
    chain: TracebackType | None = None
    for entry in reversed(entries):
        chain = TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chain


def _is_bug(error: BaseException) -> bool:
    if not isinstance(error, _BUGS):
        return False
    innermost, traceback = None, error.__traceback__
    while traceback is not None:
        code, traceback = traceback.tb_frame.f_code, traceback.tb_next
        if code.co_name != "__getattr__":  # which explains a name that its caller looked up
            innermost = code.co_filename
    return innermost is not None and is_own(innermost)
