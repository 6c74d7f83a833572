"""`Closing`: closes several things after an error, without hiding the error."""

import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, final


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
