"""The per-thread stack of open scopes and replica contexts."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.replica_context import ReplicaContext, ReplicaGroup
from mirror._src.engine.stack import stack


class Frame(NamedTuple):
    """Entry of a thread's stack: an open scope of a strategy, or a replica that runs a step.

    Attributes:
        strategy: The strategy.
        replica: Context of the replica; `None` for a scope.
        devices: Devices that the scope creates arrays on; `None` for a replica.
        shown_as: What `mirror.get_strategy()` returns, if not the strategy: in the scope of a
            `ParameterServerStrategy`, whose arrays are created by a local strategy.
        task: The asyncio task that opened the scope, or None.
    """

    strategy: ReplicaGroup
    replica: ReplicaContext | None = None
    devices: ReplicaDevices | None = None
    shown_as: Any = None
    task: Any = None


def current_frame() -> Frame | None:
    """Returns the top of this thread's stack, or `None` outside every scope and replica."""
    frames = stack.frames
    return frames[-1] if frames else None


def current_task() -> Any:
    """Returns the asyncio task that runs in this thread, or None."""
    asyncio = sys.modules.get("asyncio")
    try:
        return None if asyncio is None else asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


def push_frame(frame: Frame) -> None:
    """Pushes a scope or a replica onto this thread's stack."""
    stack.frames.append(frame)


def pop_frame() -> None:
    """Pops the top of this thread's stack."""
    stack.frames.pop()


@contextlib.contextmanager
def replica(
    strategy: ReplicaGroup, axis_name: str, captures: Any = None
) -> Iterator[ReplicaContext]:
    """Context manager that enters a replica of `strategy`, whose context is valid inside.

    Args:
        strategy: The strategy.
        axis_name: Name of the replica axis.
        captures: Stand-ins for the variables that the step uses without receiving them as
            arguments.
    """
    context = ReplicaContext(strategy, in_step=True, axis_name=axis_name)
    context.captures = captures
    push_frame(Frame(strategy, context))
    try:
        yield context
    finally:
        pop_frame()
        context._ended = True


def has_strategy() -> bool:
    """Whether the caller is in a strategy's scope or in a step that a strategy runs.

    >>> with mirror.OneDeviceStrategy("/cpu:0").scope():
    ...     inside = has_strategy()
    >>> inside, has_strategy()
    (True, False)
    """
    return current_frame() is not None


def in_cross_replica_context() -> bool:
    """Whether the caller is in a strategy's scope, outside a step.

    >>> strategy = mirror.OneDeviceStrategy("/cpu:0")
    >>> with strategy.scope():
    ...     in_cross_replica_context(), int(strategy.run(lambda: 1 * in_cross_replica_context()))
    (True, 0)
    """
    frame = current_frame()
    return frame is not None and frame.replica is None


def require_cross_replica(strategy: ReplicaGroup, method: str, instead: str) -> None:
    """Rejects a call from inside a replica or from another strategy's scope.

    Args:
        strategy: The strategy that was called.
        method: Name of the method.
        instead: Sentence that tells the user what to do inside a replica.

    Raises:
        RuntimeError: If the caller is in a replica or in the scope of another strategy.
    """
    frame = current_frame()
    if frame is None or (frame.strategy is strategy and frame.replica is None):
        return
    if frame.replica is not None:
        raise RuntimeError(
            f"strategy.{method} was called inside a replica, in a step run by {frame.strategy}. "
            f"{instead}"
        )
    inside = f"{strategy}.{method} was called inside the scope of another strategy, "
    if frame.task is not None and frame.task is not current_task():
        raise RuntimeError(
            f"{inside}{frame.strategy}, which another asyncio task has opened. A scope belongs to "
            "the thread: close it before you await, or run each task's strategy in its own thread, "
            "await asyncio.to_thread(train)."
        )
    raise RuntimeError(
        f"{inside}{frame.strategy}. Exit that scope first, or use the same strategy for both."
    )
