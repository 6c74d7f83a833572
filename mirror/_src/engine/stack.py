"""The per-thread stack of open scopes and replicas, whose frames `scopes` defines."""

import threading
from typing import Any

from mirror._src.base.types import REPLICA_AXIS


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Any] = []


stack = _Stack()


def current_axis() -> str:
    """Returns the name of the replica axis in the step that this thread traces."""
    replica = stack.frames[-1].replica if stack.frames else None
    return REPLICA_AXIS if replica is None else replica._axis_name
