"""Error classes of mirror, and helpers that format messages.

All other errors are builtin exceptions. A message says what happened, with the names and values
received, why, and how to fix it.
"""

import difflib
import re
import threading
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self, final

import jax
import numpy as np

from mirror._src.base.public_names import set_module

_MOST_NAMES = 12
_MOST_CHARACTERS = 60
_TYPED = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, jax.core.ShapedArray)


@set_module("mirror")
class ReplicaDivergenceError(ValueError):
    """Raised when a value that must be mirrored differs between replicas, or would differ.

    By `strategy.run` and all that runs steps, before the step runs: for state that the step would
    leave different on the replicas, as without an all-reduce, for an `ensure_mirrored` that cannot
    be proved, and for a collective that only some replicas would reach. By
    `strategy.check_mirrored`, if the copies on the devices differ. With several processes, if they
    pass different values or read different batches.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> strategy.run(mirror.ensure_mirrored, (mirror.PerReplica([1.0, 2.0]),))
    Traceback (most recent call last):
        ...
    mirror.ReplicaDivergenceError: ...
    """


@set_module("mirror")
class VerifyError(ValueError):
    """Raised by `strategy.verify` when n replicas and one device compute different results.

    The replicas agree with each other, but not with one device on the whole batch. Also raised by
    `trainer.verify`, and by nothing that trains.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> def step(batch):  # "sum" instead of "mean"
    ...     return mirror.all_reduce("sum", batch.mean())
    >>> strategy.verify(step, (mirror.PerReplica([[1.0], [3.0]]),))
    Traceback (most recent call last):
        ...
    mirror.VerifyError: 2 replicas and one device on the whole batch differ ...
    """


@set_module("mirror")
class ProgramMismatchError(RuntimeError):
    """Raised on every process when the processes are about to run different programs.

    Only with several processes, also if one of them does not arrive in time. The message names the
    first inputs and operations that differ, with their lines. Nothing has run.

    >>> issubclass(mirror.ProgramMismatchError, RuntimeError)
    True
    """


@set_module("mirror")
class InvalidDeviceError(RuntimeError, ValueError):
    """Raised when a device does not exist; the message lists the available devices.

    A `RuntimeError`, as in TensorFlow, and a `ValueError`, because it concerns an argument.

    >>> mirror.device("/cpu:99")
    Traceback (most recent call last):
        ...
    mirror.InvalidDeviceError: Unknown device /device:CPU:99. Available devices: ...
    """


def describe(leaf: Any) -> str:
    """Returns `float32[3,4]` for an array, `'text' (str)` for any other value."""
    if isinstance(leaf, _TYPED):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    text = _written(leaf)
    # An nnx module's repr fills a page, and Python's own has an address instead of a value.
    if "\n" in text or type(leaf).__repr__ is object.__repr__:
        return type(leaf).__name__
    return f"{_shortened(text)} ({type(leaf).__name__})"


def _written(value: Any) -> str:
    """Returns the representation of a value, with types in place of the numbers of arrays."""
    if isinstance(value, _TYPED):
        return describe(value)
    if type(value) is dict:
        return "{" + ", ".join(f"{key!r}: {_written(item)}" for key, item in value.items()) + "}"
    if type(value) is list:
        return "[" + ", ".join(map(_written, value)) + "]"
    if type(value) is tuple:
        return "(" + ", ".join(map(_written, value)) + (",)" if len(value) == 1 else ")")
    return repr(value)


def _shortened(text: str) -> str:
    """Returns at most 60 characters: the text, or as many of its elements as fit and `...`."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    text = text[: _MOST_CHARACTERS - 3]
    end = text.rfind(", ")
    return f"{text if end < 0 else text[: end + 2]}..."


def no_values(value: object) -> str:
    """Returns the hint about a value that has a shape only, or "" for any other value."""
    if not isinstance(value, jax.ShapeDtypeStruct):
        return ""
    return (
        "It has a shape, but no values: a mirror.ps.ServerTable has them on the servers only "
        "(strategy.read_rows), and a model from nnx.eval_shape has none."
    )


def expected(name: str, value: object, what: str, fix: str = "") -> str:
    """Returns the message for an argument of the wrong type or value.

    >>> expected("fn", 3, "callable", "Pass the step function: strategy.run(step, args).")
    '`fn` must be callable, got 3 (int). Pass the step function: strategy.run(step, args).'
    """
    return f"`{name}` must be {what}, got {describe(value)}. {fix}".rstrip()


def require_callable(name: str, value: Any, fix: str) -> None:
    """Rejects an argument that is not callable, by a `TypeError`."""
    if not callable(value):
        raise TypeError(expected(name, value, "callable", fix))


def require_bool(name: str, value: Any) -> None:
    """Rejects an argument that is not a bool, by a `TypeError`."""
    if not isinstance(value, bool):
        raise TypeError(expected(name, value, "True or False"))


def require_int(
    name: str, value: Any, least: int = 1, fix: str = "", most: int | None = None
) -> None:
    """Rejects an argument that is not an integer of at least `least`, and at most `most`.

    Raises:
        ValueError: If the value is less than `least`, or more than `most`.
        TypeError: If the value is not an int, or is a bool.
    """
    wanted = {0: "a non-negative integer", 1: "a positive integer"}
    what = wanted.get(least, f"an integer >= {least}")
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(expected(name, value, what, fix))
    if value < least:
        raise ValueError(f"`{name}` must be {what}, got {value}. {fix}".rstrip())
    if most is not None and value > most:
        raise ValueError(f"`{name}` must be at most {most}, got {value}.")


def require_secs(name: str, value: Any, example: float = 60) -> float:
    """Returns a number of seconds that threads and JAX can wait for.

    Raises:
        ValueError: If the value is not positive, not finite, or longer than threads can wait.
        TypeError: If the value is not an int or a float, or is a bool.
    """
    what, fix = "a positive number of seconds", f"For example, {name}={example:g}."
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(expected(name, value, what, fix))
    if not 0 < value < threading.TIMEOUT_MAX:
        raise ValueError(expected(name, value, what, fix))
    return float(value)


def bytes_in_words(count: float) -> str:
    """Returns a size with its unit: `1.5 KiB` for 1536."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def counted(number: int, noun: str) -> str:
    """Returns a number and a noun: `1 replica`, `2 replicas`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listing(names: Iterable[str]) -> str:
    """Returns an indented line for each of the first 12 names, and the number of the others."""
    names = list(names)
    num_omitted = len(names) - _MOST_NAMES
    lines = [f"  {name}" for name in names[:_MOST_NAMES]]
    return "\n".join([*lines, f"  ... and {num_omitted} more"] if num_omitted > 0 else lines)


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Returns the most similar of the names, regardless of case, `_`, `-` and spaces, or None."""
    by_letters = {_letters(each): each for each in names}
    found = difflib.get_close_matches(_letters(name), by_letters, n=1, cutoff=0.75)
    return by_letters[found[0]] if found else None


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` if one of the names is similar, or else `""`."""
    found = nearest_name(name, names)
    return f" Did you mean {found!r}?" if found is not None else ""


def _letters(name: str) -> str:
    return re.sub("[-_ ]", "", name.lower())


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


@final
class Closing:
    """Context manager that calls functions at its end, in reverse order, and keeps the first error.

    With `contextlib.ExitStack`, an error of a function would replace the error that ended the
    block, which is the one to fix; here, it becomes a note of the first. An interrupt or a
    `SystemExit` still takes precedence, because it ends the program.
    """

    def __init__(self) -> None:
        self._functions: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = []

    def add(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """Adds a function to call at the end.

        Args:
            name: What it does, for the note: "on_fit_end of Report".
            function: The function.
            args: Its arguments.
        """
        self._functions.append((name, function, args))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        first = error
        while self._functions:
            name, function, args = self._functions.pop()
            try:
                function(*args)
            except BaseException as later:
                is_first = first is None or isinstance(first, GeneratorExit)
                ends = isinstance(first, Exception) and not isinstance(later, Exception)
                if is_first or ends:
                    first = later
                elif first is not None and first is not later:
                    first.add_note(_note(name, later))
        if first is not None and first is not error:
            raise first


def closing(name: str, function: Callable[..., Any]) -> Closing:
    """Returns a `Closing` with one function."""
    only = Closing()
    only.add(name, function)
    return only


def _note(name: str, error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"Afterwards, {name} raised {type(error).__name__}: {error}{place}"
