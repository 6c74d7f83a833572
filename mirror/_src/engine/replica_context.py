"""`ReplicaContext`, and the per-thread stack of open scopes and replica contexts."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import counted, expected
from mirror._src.base.public_names import set_module
from mirror._src.base.tracebacks import api_boundary
from mirror._src.base.types import REPLICA_AXIS, Array, PyTree
from mirror._src.base.unknown_names import unknown_attribute
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.cross_device_ops import CrossDeviceOps
from mirror._src.engine.in_step import gather, stack
from mirror._src.engine.reduce_op import Reduction, prepare, require_axis, require_op

T = TypeVar("T")


class ReplicaGroup(Protocol):
    """Interface of a strategy that the code below `Strategy` uses."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that run a step."""
        ...

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of the replicas, in replica order."""
        ...

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """The implementation of the collectives."""
        ...


class Part(NamedTuple):
    """The part of a global batch that the replicas of this process compute, apart from the others.

    Collectives and the number of replicas count this process alone.

    Attributes:
        part_id: Index of the part, an int32 of shape `()`.
        first_row: Index of its first row in the batch, an int32 of shape `()`.
        num_parts: Number of the parts, where it is known.
    """

    part_id: Any
    first_row: Any
    num_parts: int = 1


@set_module("mirror")
class ReplicaContext:
    """Identifies the current replica and provides its collectives.

    `mirror.all_reduce` and `mirror.all_gather` call the methods of the current replica's context.
    Inside a step, `mirror.get_replica_context()` returns the context of the replica. It is valid
    until the step ends. Outside every scope, the function returns the context of a single replica,
    whose collectives return their operands, so that the same step also works without a strategy.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> def step():
    ...     context = mirror.get_replica_context()
    ...     mine = context.replica_id_in_sync_group
    ...     key = context.fold_in(jax.random.key(0))  # differs between replicas
    ...     return context.all_reduce("sum", mine), context.all_gather(mine[None])
    >>> strategy.run(step)
    (Array(1, dtype=int32), Array([0, 1], dtype=int32))
    """

    def __init__(
        self, strategy: ReplicaGroup, *, in_step: bool, axis_name: str = REPLICA_AXIS
    ) -> None:
        self._strategy = strategy
        self._in_step = in_step
        self._axis_name = axis_name
        self.captures: Any = None
        self.part: Part | None = None
        self.mask: Any = None
        self.piece: Array | None = None
        self._ended = False

    def __repr__(self) -> str:
        n = self._num_replicas
        state = ", its step has finished" if self._ended else ""
        return f"ReplicaContext({counted(n, 'replica')}{state})"

    def _require_alive(self) -> None:
        if self._ended:
            raise RuntimeError(
                "This ReplicaContext is no longer valid because its step has finished. Call "
                "mirror.get_replica_context() inside every step."
            )
        if self._in_step and (size := jax.lax.axis_size(self._axis_name)) != self._num_replicas:
            raise ValueError(
                f"The axis {self._axis_name!r} of the {counted(self._num_replicas, 'replica')} is "
                f"hidden by an axis of size {size} with this name, such as of jax.vmap. Choose "
                "another one there: jax.vmap(f, axis_name='rows')."
            )

    if not TYPE_CHECKING:  # A type checker would accept any attribute.

        def __getattr__(self, name):
            raise unknown_attribute("replica_context", self, name)

    @property
    def strategy(self) -> ReplicaGroup:
        """The strategy that runs this replica."""
        self._require_alive()
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that run this step."""
        self._require_alive()
        return self._num_replicas

    @property
    def _num_replicas(self) -> int:
        return self._strategy.num_replicas_in_sync if self._in_step else 1

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of all replicas, in replica order."""
        self._require_alive()
        return self._strategy.devices if self._in_step else self._strategy.devices[:1]

    @property
    def replica_id_in_sync_group(self) -> Array:
        """The index of this replica, from 0 to n - 1, as a traced int32 array of shape `()`."""
        self._require_alive()
        return self._index

    @property
    def _index(self) -> Array:
        """The index of this replica in this process."""
        return jax.lax.axis_index(self._axis_name) if self._in_step else jnp.zeros((), jnp.int32)

    def _positions(self, size: int) -> Array:
        """Returns the positions of `size` examples of this replica in the global batch.

        While a piece of the replica's batch is computed, `self.piece` has the positions of its
        examples.
        """
        if self.piece is not None:
            return self.piece if len(self.piece) == size else self.piece[0] + jnp.arange(size)
        before = self._index * size
        first = before if self.part is None else self.part.first_row + before
        return jnp.arange(size) + first

    @api_boundary
    def all_reduce(self, op: Reduction, tree: T) -> T:
        """All-reduces every leaf; all replicas receive the result, which is mirrored.

        All-reduces of small arrays are packed into one collective. Differentiable for `"sum"` and
        `"mean"`.

        Args:
            op: A `ReduceOp` or its name: `"sum"`, `"mean"`, `"min"` or `"max"`.
            tree: Pytree of this replica's arrays and numbers, of any shapes and dtypes.

        Returns:
            A pytree of arrays with the same structure and shapes. Dtypes are preserved, except
            that the mean of integers or booleans is float32, and the sum of booleans and small
            integers is int32 or uint32. Sums of 32 bits wrap, as `jnp.sum` does.

        Raises:
            ValueError: If `op` is a string, but not the name of a reduction.
            TypeError: If `op` is neither a string nor a `ReduceOp`, or if a leaf is not an array
                or cannot be reduced by `op`.
            RuntimeError: If the step has ended.
        """
        self._require_alive()
        op = require_op("mirror.all_reduce", op, tree)
        leaves, treedef = jax.tree.flatten(tree)
        ops = self._strategy.cross_device_ops
        reduced = ops.all_reduce(op, leaves) if self._in_step else [prepare(op, x) for x in leaves]
        return cast(T, jax.tree.unflatten(treedef, reduced))

    @api_boundary
    def all_gather(self, tree: T, axis: int = 0) -> T:
        """Concatenates the replicas' leaves along `axis`; all replicas receive the result.

        Differentiable.

        Args:
            tree: Pytree of this replica's arrays, each with at least one dimension.
            axis: Axis to concatenate along, in replica order. A negative axis counts from the end.

        Returns:
            A pytree of mirrored arrays with the same structure and dtypes. The length along `axis`
            is the sum of the lengths on all replicas.

        Raises:
            ValueError: If a leaf does not have the axis.
            TypeError: If `axis` is not an int.
            RuntimeError: If the step has ended.
        """
        self._require_alive()
        require_axis("mirror.all_gather", tree, axis)
        if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
            fix = "Pass the axis to concatenate along: mirror.all_gather(x, axis=0)."
            raise TypeError(expected("axis", axis, "an int", fix))

        def join(leaf: Array) -> Array:
            leaf = jnp.asarray(leaf)
            if not -leaf.ndim <= axis < leaf.ndim:
                raise ValueError(
                    f"all_gather along axis {axis} requires arrays that have this axis, got shape "
                    f"{leaf.shape}. Add an axis to scalars first: x[None]."
                )
            return gather(leaf, axis) if self._in_step else leaf

        return cast(T, jax.tree.map(join, tree))

    @api_boundary
    def fold_in(self, key: Array) -> Array:
        """Returns a PRNG key that differs between replicas, derived from a mirrored one.

        Args:
            key: A PRNG key of shape `()`, the same on all replicas.

        Raises:
            RuntimeError: If the step has ended.
        """
        self._require_alive()
        first = 0 if self.part is None else self.part.part_id * self._strategy.num_replicas_in_sync
        return jax.random.fold_in(key, first + self._index)

    @api_boundary
    def shared(self, tree: PyTree) -> PyTree:
        """Returns `tree` unchanged, but averages its gradients over the replicas.

        The gradient of an all-reduced loss differs between replicas, because it flows back to the
        replica's own examples only. A line search, as in `optax.lbfgs`, needs the gradient over
        all examples in the middle of its loop, where an all-reduce cannot be inserted.

        Args:
            tree: Pytree of mirrored arrays, such as the parameters. The gradients of
                floating-point leaves are averaged in one collective; other leaves are unaffected.

        Returns:
            A pytree of arrays with the same structure, shapes and dtypes.

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
        leaves, treedef = jax.tree.flatten(tree)
        arrays = list(map(jnp.asarray, leaves))
        inexact = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]

        @jax.custom_vjp
        def identity(values: list[Array]) -> list[Array]:
            return values

        def backward(_: None, grads: list[Array]) -> tuple[list[Array]]:
            return (self.all_reduce("mean", grads),)

        identity.defvjp(lambda values: (values, None), backward)
        for i, value in zip(inexact, identity([arrays[i] for i in inexact]), strict=True):
            arrays[i] = value
        return jax.tree.unflatten(treedef, arrays)


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


def current_replica() -> ReplicaContext | None:
    """Returns the context of the current replica, or `None` outside every replica."""
    frame = current_frame()
    return None if frame is None else frame.replica


def current_task() -> Any:
    """Returns the asyncio task that runs in this thread, or None."""
    asyncio = sys.modules.get("asyncio")
    try:
        return None if asyncio is None else asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


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
    stack.frames.append(Frame(strategy, context))
    try:
        yield context
    finally:
        stack.frames.pop()
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
