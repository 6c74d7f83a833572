"""Whose line it is: the user's own code told apart from the libraries', for messages."""

import functools
import linecache
import os
import sys
import sysconfig
from types import FrameType

import chex
import flax
import jax
import optax


def is_users(filename: str) -> bool:
    """Whether a file is neither ours, nor JAX's and its kin's, nor the standard library's."""
    if filename.startswith("<frozen "):
        return False
    standard, *packages = _foreign_directories()
    if filename.startswith(tuple(packages)):
        return False
    # Site packages lie under the standard library, so only its own files count as foreign.
    return not filename.startswith(standard) or "site-packages" in filename


def line_of_user() -> str:
    """The line that the user's code has come to, as `train.py:12: x = jnp.zeros(3)`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    where = place(frame.f_code.co_filename, frame.f_lineno)
    return f"{where}: {text}" if text else where


def place(filename: str, line: int | None) -> str:
    """`train.py:12`; in a notebook, whose cells are files without names, `Cell In[3], line 12`."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    cell = None if shell is None else shell.compile.format_code_name(filename)
    return " ".join(cell) + f", line {line}" if cell else f"{os.path.basename(filename)}:{line}"


@functools.cache
def _foreign_directories() -> tuple[str, ...]:
    """The standard library's directory, then those of the packages."""
    modules = [sys.modules["mirror"], jax, flax, optax, chex]
    packages = [os.path.dirname(module.__file__) + os.sep for module in modules if module.__file__]
    return (sysconfig.get_paths()["stdlib"] + os.sep, *packages)
