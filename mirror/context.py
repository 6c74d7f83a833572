"""Where the caller stands: the stack of scopes of each thread, and the replica context."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from mirror._types import Array, PyTree
from mirror.cross_device_ops import ReduceOp, gather, prepare
from mirror.devices.replicas import ReplicaDevices
from mirror.program.axis import axis_name


class LengthsUnknown(BaseException):
    """An all-gather was met whose lengths on the other replicas are not known yet.

    No `Exception`: the user's function must not catch it.
    """

    def __init__(self, shape: tuple[int, ...], axis: int) -> None:
        super().__init__(shape, axis)
        self.shape = shape
        self.axis = axis


class Gathers:
    """The lengths that replicas of different shapes bring to each all-gather of a step.

    A step is traced for each set of shapes by itself. At an all-gather, a trace must know what the
    other replicas bring; so it stops there, `LengthsUnknown`, until all have said it.
    """

    def __init__(self) -> None:
        self.known: list[tuple[int, ...]] = []
        self._met = 0

    def restart(self) -> None:
        """A trace begins."""
        self._met = 0

    def lengths(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        """Each replica's length at the next all-gather, along its axis."""
        if self._met == len(self.known):
            raise LengthsUnknown(shape, axis)
        self._met += 1
        return self.known[self._met - 1]


class ReplicaGroup(Protocol):
    """What a context needs of its strategy."""

    _replicas: ReplicaDevices

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas run a step."""
        ...

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of the replicas."""
        ...

    def _all_reduce(self, op: ReduceOp, leaves: list[Any]) -> list[Array]: ...


class Frame(NamedTuple):
    """One entry of a thread's stack: a strategy's scope, or a replica of its `run`."""

    strategy: ReplicaGroup
    replica: "ReplicaContext | None"


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
    strategy: ReplicaGroup, gathers: Gathers | None, captures: Any
) -> Iterator["ReplicaContext"]:
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


class ReplicaContext:
    """What a replica knows of itself and how it talks to the others.

    `mirror.get_replica_context()` gives it inside a function that `strategy.run` runs. Outside
    every scope it gives that of a lone replica, whose exchanges change nothing: a step works on
    one device as it stands. A context ends with its step.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> def step():
    ...     context = mirror.get_replica_context()
    ...     mine = context.replica_id_in_sync_group
    ...     key = context.fold_in(jax.random.key(0))  # another one on each replica
    ...     return context.all_reduce("sum", mine), context.all_gather(mine[None])
    >>> strategy.run(step)
    (Array(1, dtype=int32), Array([0, 1], dtype=int32))
    """

    def __init__(
        self, strategy: ReplicaGroup, *, in_step: bool, gathers: Gathers | None = None
    ) -> None:
        self._strategy = strategy
        self._in_step = in_step
        self._gathers = gathers
        self.captures: Any = None
        self._ended = False

    def _require_alive(self) -> None:
        if self._ended:
            raise RuntimeError(
                "This ReplicaContext belongs to a step that has ended. Call "
                "mirror.get_replica_context() inside the step, each time."
            )

    @property
    def strategy(self) -> ReplicaGroup:
        """The strategy whose replica this is."""
        self._require_alive()
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas run this step."""
        self._require_alive()
        return self._strategy.num_replicas_in_sync if self._in_step else 1

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of all replicas, in replica order."""
        self._require_alive()
        return self._strategy.devices if self._in_step else self._strategy.devices[:1]

    @property
    def lengths_may_differ(self) -> bool:
        """Whether the replicas' arrays differ in shape in this step."""
        return self._gathers is not None

    @property
    def replica_id_in_sync_group(self) -> Array:
        """This replica's number, 0 to n - 1: a traced int32 scalar, per-replica."""
        self._require_alive()
        return jax.lax.axis_index(axis_name()) if self._in_step else jnp.zeros((), jnp.int32)

    def all_reduce(self, op: ReduceOp | str, tree: PyTree) -> PyTree:
        """Reduces every leaf over the replicas; all get the result, which is mirrored.

        Small arrays travel in one buffer, with other small all-reduces of the step. Differentiable
        for `"sum"` and `"mean"`.

        Args:
            op: `"sum"`, `"mean"`, `"min"`, `"max"`, or a `ReduceOp`.
            tree: arrays or numbers of any shapes and dtypes; each replica's own.

        Returns:
            The same tree. Dtypes stay, but the mean of integers or booleans is float32 and the sum
            of booleans is int32.

        Raises:
            ValueError: an unknown `op`.
            TypeError: `op` is no name and no `ReduceOp`, or a leaf is no array.
            RuntimeError: the step has ended.
        """
        self._require_alive()
        op = ReduceOp.canonicalize(op)
        treedef: Any
        leaves, treedef = jax.tree.flatten(tree)
        if self._in_step:
            reduced = self._strategy._all_reduce(op, leaves)
        else:
            reduced = [prepare(op, leaf) for leaf in leaves]
        return treedef.unflatten(reduced)

    def all_gather(self, tree: PyTree, axis: int = 0) -> PyTree:
        """Joins the replicas' leaves along `axis`, in replica order; all get the result.

        Differentiable. The replicas' leaves may differ in length along `axis` where their inputs
        do.

        Args:
            tree: arrays, at least one-dimensional.
            axis: the axis to join along; negative counts from the end.

        Raises:
            ValueError: a leaf has no such axis.
            RuntimeError: the step has ended.
        """
        self._require_alive()

        def join(leaf: Array) -> Array:
            leaf = jnp.asarray(leaf)
            if not -leaf.ndim <= axis < leaf.ndim:
                raise ValueError(
                    f"all_gather along axis {axis} of an array of shape {leaf.shape}: there is no "
                    "such axis. Give scalars one first, x[None]."
                )
            if not self._in_step:
                return leaf
            if self._gathers is None:
                return gather(leaf, axis)
            return gather(leaf, axis, self._gathers.lengths(leaf.shape, axis % leaf.ndim))

        return jax.tree.map(join, tree)

    def fold_in(self, key: Array) -> Array:
        """A PRNG key that differs on each replica, made of one that is the same on all."""
        return jax.random.fold_in(key, self.replica_id_in_sync_group)

    def shared(self, tree: PyTree) -> PyTree:
        """Returns its tree, whose gradients are averaged over the replicas.

        The gradient of an all-reduced loss is each replica's own: what comes back through an
        all-reduce reaches only the replica's own examples. A search along the gradient needs the
        whole one inside, where no all-reduce can be written, as in `optax.lbfgs`.

        Args:
            tree: Arrays, the same on all replicas: parameters. Gradients of floats are averaged,
                in one collective; other leaves pass through.

        Raises:
            RuntimeError: If the step has ended.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> def step(w, x):
        ...     context = mirror.get_replica_context()
        ...     loss = lambda w: context.all_reduce("mean", context.shared(w) * x)
        ...     return jax.grad(loss)(w)
        >>> strategy.run(step, (1.0, mirror.PerReplica([2.0, 4.0])))
        Array(3., dtype=float32)
        """
        self._require_alive()
        treedef: Any
        leaves, treedef = jax.tree.flatten(tree)
        arrays = list(map(jnp.asarray, leaves))
        places = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]

        @jax.custom_vjp
        def identity(values: list[Array]) -> list[Array]:
            return values

        def backward(_: None, grads: list[Array]) -> tuple[list[Array]]:
            return (self.all_reduce("mean", grads),)

        identity.defvjp(lambda values: (values, None), backward)
        for i, value in zip(places, identity([arrays[i] for i in places]), strict=True):
            arrays[i] = value
        return treedef.unflatten(arrays)
