"""The error classes a caller may want to catch, and how a leaf is worded in a message.

Everything else is raised as a builtin exception. Every message says what happened, with the values
received; what is required; and the line that fixes it.
"""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from mirror._src.utils.modules import set_module

_MOST_NAMES = 12
_TYPED = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, jax.core.ShapedArray)


@set_module("mirror")
class ReplicaDivergenceError(ValueError):
    """Replicas would drift apart: a value that must be mirrored differs between them.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> strategy.run(mirror.ensure_mirrored, (mirror.PerReplica([1.0, 2.0]),))
    Traceback (most recent call last):
        ...
    mirror.ReplicaDivergenceError: ...
    """


@set_module("mirror")
class ReplicaMismatchError(ValueError):
    """`strategy.verify` found that n replicas compute something else than one device does.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> def step(batch):  # a sum, where a mean is meant
    ...     return mirror.get_replica_context().all_reduce("sum", batch.mean())
    >>> strategy.verify(step, (mirror.PerReplica([[1.0], [3.0]]),))
    Traceback (most recent call last):
        ...
    mirror.ReplicaMismatchError: 2 replicas and one device on the whole batch differ ...
    """


@set_module("mirror")
class InvalidDeviceError(RuntimeError):
    """There is no such device; the message lists the devices there are.

    >>> mirror.device("/cpu:99")
    Traceback (most recent call last):
        ...
    mirror.InvalidDeviceError: There is no device /device:CPU:99. The devices are ...
    """


def describe(leaf: Any) -> str:
    """Words a leaf for a message: `float32[3,4]` for an array, `'text' (str)` for anything else."""
    if isinstance(leaf, _TYPED):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    text = repr(leaf)
    if "\n" in text:  # a module, say, whose text is a page
        return type(leaf).__name__
    return f"{text:.60} ({type(leaf).__name__})"


def expected(name: str, value: object, what: str, fix: str = "") -> str:
    """Returns the message for an argument of the wrong type or value.

    >>> expected("fn", 3, "callable", "Pass the step function: strategy.run(step, args).")
    '`fn` must be callable, got 3 (int). Pass the step function: strategy.run(step, args).'
    """
    return f"`{name}` must be {what}, got {describe(value)}. {fix}".rstrip()


def require_int(name: str, value: Any, least: int = 1, fix: str = "") -> None:
    """Rejects an argument that is not an integer of at least `least`.

    Raises:
        ValueError: If it is less than `least`.
        TypeError: If it is not an int, or is a bool.
    """
    wanted = {0: "a non-negative integer", 1: "a positive integer"}
    what = wanted.get(least, f"an integer >= {least}")
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(expected(name, value, what, fix))
    if value < least:
        raise ValueError(f"`{name}` must be {what}, got {value}. {fix}".rstrip())


def bytes_in_words(count: float) -> str:
    """`1536` is `1.5 KiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def counted(number: int, noun: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listing(names: Iterable[str]) -> str:
    """An indented line for each name, at most 12, and a count of the rest."""
    names = list(names)
    rest = len(names) - _MOST_NAMES
    lines = [f"  {name}" for name in names[:_MOST_NAMES]]
    return "\n".join([*lines, f"  ... and {rest} more"] if rest > 0 else lines)
