"""Tracebacks without internal frames: an error or Ctrl-C in a step shows the user's lines only."""

import contextlib
import functools
import os
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

import jax

from mirror._src.base.signatures import mismatch_message
from mirror._src.base.source_lines import is_library, is_own, is_standard

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
