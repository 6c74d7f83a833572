"""The name of the replica axis in the program that is being traced or run."""

import contextlib
import threading
from collections.abc import Iterator

from mirror._src.base.types import REPLICA_AXIS


class _CurrentAxis(threading.local):
    name = REPLICA_AXIS


_current = _CurrentAxis()


def axis_name() -> str:
    """Returns the replica axis of the strategy whose program this thread traces or runs."""
    return _current.name


@contextlib.contextmanager
def named_axis(name: str) -> Iterator[None]:
    """Context manager that sets the name of the replica axis in this thread."""
    before, _current.name = _current.name, name
    try:
        yield
    finally:
        _current.name = before
