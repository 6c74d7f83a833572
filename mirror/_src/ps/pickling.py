"""Pickles what is scheduled, and explains what cannot be pickled."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import jax
from flax import nnx

from mirror._src.base.errors import describe
from mirror._src.base.naming import name_of
from mirror._src.base.source_lines import users_function
from mirror._src.ps.remote_value import RemoteValue


class Pickler(Protocol):
    """Interface that pickles for the workers."""

    def dumps(self, value: Any) -> Any:
        """Pickles an object."""
        ...

    def is_exported(self, value: Any) -> bool:
        """Whether an object has been pickled before."""
        ...


def pickled_function(pickler: Pickler, value: Any, what: str = "") -> Any:
    """Returns the pickle of a function or of arguments; None of a function that was exported.

    Args:
        pickler: Pickles.
        value: The object.
        what: The object in words; defaults to the name of the function.

    Raises:
        TypeError: If it cannot be pickled; the message names the captured variable.
    """
    if not what and pickler.is_exported(value):
        return None
    try:
        return pickler.dumps(value)
    except Exception as error:
        users = users_function(value)  # a step of `Trainer` has its loss function
        if users is not value and _is_picklable(pickler, users):
            users = value
        value, what = users, what or name_of(users)
        culprit = _culprit(pickler, value) if callable(value) else ""
        raise TypeError(
            f"Cannot send {what} to a worker{culprit}: {type(error).__name__}: {error} Create such "
            "objects inside the function, or pass arrays and plain values."
        ) from error


def require_no_remote_values(tree: Any, fn_name: str) -> None:
    """Rejects arguments that are results of other scheduled functions.

    Raises:
        TypeError: If there is one.
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Pytree))
    if any(isinstance(leaf, RemoteValue) for leaf in leaves):
        raise TypeError(
            f"{fn_name} got a RemoteValue as an argument. Pass its result: value.fetch()."
        )


def _culprit(pickler: Pickler, fn: Callable[..., Any]) -> str:
    """Returns which captured variable of a function cannot be pickled, for the message."""
    try:
        captured = inspect.getclosurevars(inspect.unwrap(fn))
    except (TypeError, ValueError):
        return ""
    for name, value in {**captured.globals, **captured.nonlocals}.items():
        if not _is_picklable(pickler, value):
            return f", because it captures {name!r}, {describe(value)}"
    return ""


def _is_picklable(pickler: Pickler, value: Any) -> bool:
    try:
        pickler.dumps(value)
    except Exception:
        return False
    return True
