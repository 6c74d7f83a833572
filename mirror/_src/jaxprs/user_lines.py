"""The line in the user's code where an operation of a program was written."""

import traceback
from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from mirror._src.base.source_lines import is_users, place

_NO_LINE = "an unknown line"


def user_line(eqn: JaxprEqn) -> str:
    """Returns the line of the user's code that an operation comes from: `train.py:42 in step`."""
    frames = eqn.source_info.traceback
    if frames is None:
        return _NO_LINE
    for frame in reversed(traceback.extract_tb(frames.as_python_traceback())):
        if is_users(frame.filename):
            return f"{place(frame.filename, frame.lineno)} in {frame.name}"
    return _NO_LINE


def line_within(eqn: JaxprEqn, around: Sequence[JaxprEqn]) -> str:
    """Returns the user's line of an operation or, if it has none, of the innermost call around it.

    JAX traces its own functions once and records only the first caller.
    """
    for outer in reversed(around):
        if user_line(eqn) != _NO_LINE:
            break
        eqn = outer
    return user_line(eqn)


def is_within_file(eqn: JaxprEqn, suffixes: tuple[str, ...]) -> bool:
    """Whether an operation was called, directly or not, in a file whose path ends like this."""
    frames = eqn.source_info.traceback
    if frames is None:
        return False
    found = traceback.extract_tb(frames.as_python_traceback())
    return any(frame.filename.replace("\\", "/").endswith(suffixes) for frame in found)
