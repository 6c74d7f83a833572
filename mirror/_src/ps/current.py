"""The scheduled function that this process runs, if it is a worker."""

from collections.abc import Callable
from typing import Any, NamedTuple


class RunningFunction(NamedTuple):
    """A scheduled function that runs on this worker.

    Attributes:
        iterators: The iterators of the worker over per-worker datasets, by number.
        load: Fetches an exported object.
    """

    iterators: dict[int, Any]
    load: Callable[[Any], Any]


_running: RunningFunction | None = None


def running_function() -> RunningFunction | None:
    """Returns the function that this process runs as a worker; None elsewhere."""
    return _running


def set_running(function: RunningFunction | None) -> None:
    """Sets what `running_function` returns."""
    global _running
    _running = function
