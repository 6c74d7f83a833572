"""`ReplicaContext`: identifies the current replica and provides its collectives."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from mirror._src.collectives.in_step import gather
from mirror._src.collectives.reduce_op import ReduceOp, prepare
from mirror._src.context.gathers import UnequalGathers
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.program.axis import axis_name
from mirror._src.utils.modules import set_module
from mirror._src.utils.types import Array, PyTree


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


@set_module("mirror")
class ReplicaContext:
    """What a replica knows of itself and how it communications to the others.

    `mirror.get_replica_context()` gives it inside a function that `strategy.run` runs. Outside
    every scope it gives that of a lone replica, whose collectives change nothing: a step works on
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
        self, strategy: ReplicaGroup, *, in_step: bool, gathers: UnequalGathers | None = None
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
