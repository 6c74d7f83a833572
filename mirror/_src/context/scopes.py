"""The stack of strategy scopes and replica contexts of each thread."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from mirror._src.context.gathers import UnequalGathers
from mirror._src.context.replica_context import ReplicaContext, ReplicaGroup


class Frame(NamedTuple):
    """One entry of a thread's stack: a strategy's scope, or a replica of its `run`."""

    strategy: ReplicaGroup
    replica: ReplicaContext | None


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_stack = _Stack()


def current_frame() -> Frame | None:
    """Where this thread stands; `None` outside any scope."""
    frames = _stack.frames
    return frames[-1] if frames else None


def push_frame(frame: Frame) -> None:
    """Enters a scope or a replica."""
    _stack.frames.append(frame)


def pop_frame() -> None:
    """Leaves what was entered last."""
    _stack.frames.pop()


@contextlib.contextmanager
def replica(
    strategy: ReplicaGroup, gathers: UnequalGathers | None, captures: Any
) -> Iterator[ReplicaContext]:
    """Stands in a replica of `strategy.run` while inside; its context ends with it.

    Args:
        strategy: whose replica.
        gathers: the lengths that replicas of different shapes bring; `None`: all have one.
        captures: what stands for the variables that are no arguments of the step.
    """
    context = ReplicaContext(strategy, in_step=True, gathers=gathers)
    context.captures = captures
    push_frame(Frame(strategy, context))
    try:
        yield context
    finally:
        pop_frame()
        context._ended = True


def has_strategy() -> bool:
    """Whether the caller stands in a strategy's scope or in one of its replicas.

    >>> with mirror.OneDeviceStrategy("/cpu:0").scope():
    ...     inside = has_strategy()
    >>> inside, has_strategy()
    (True, False)
    """
    return current_frame() is not None


def in_cross_replica_context() -> bool:
    """Whether the caller stands inside `scope()`, outside `run`.

    >>> strategy = mirror.OneDeviceStrategy("/cpu:0")
    >>> with strategy.scope():
    ...     in_cross_replica_context(), int(strategy.run(lambda: 1 * in_cross_replica_context()))
    (True, 0)
    """
    frame = current_frame()
    return frame is not None and frame.replica is None


def require_cross_replica(strategy: ReplicaGroup, method: str, instead: str) -> None:
    """Refuses a call from inside a replica or from another strategy's scope.

    Raises:
        RuntimeError: the caller stands in one of those.
    """
    frame = current_frame()
    if frame is None or (frame.strategy is strategy and frame.replica is None):
        return
    if frame.replica is not None:
        raise RuntimeError(
            f"strategy.{method} was called inside a replica, in the function that {frame.strategy} "
            f"runs. {instead}"
        )
    raise RuntimeError(
        f"{strategy}.{method} was called inside the scope of another strategy, {frame.strategy}. "
        "Leave that scope first, or use the one strategy for both."
    )
