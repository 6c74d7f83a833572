"""`all_reduce` and `all_gather`: collectives of the replica that runs the current step."""

from typing import TypeVar

import jax

from mirror._src.engine.per_replica import is_per_replica
from mirror._src.engine.reduce_op import Reduction
from mirror._src.engine.replica_context import ReplicaContext, current_frame
from mirror._src.strategy.mirrored import get_replica_context

T = TypeVar("T")


def all_reduce(op: Reduction, tree: T) -> T:
    """All-reduces every leaf in a step; all replicas receive the result, which is mirrored.

    All-reduces of small arrays are packed into one collective. Differentiable for `"sum"` and
    `"mean"`. Outside every scope, the caller is a lone replica, so that a step also works when it
    is called directly: the leaves are returned.

    Args:
        op: A `ReduceOp` or its name: `"sum"`, `"mean"`, `"min"` or `"max"`.
        tree: Pytree of this replica's arrays and numbers, of any shapes and dtypes.

    Returns:
        A pytree of arrays with the same structure and shapes. Dtypes are preserved, except that
        the mean of integers or booleans is float32, and the sum of booleans and small integers is
        int32 or uint32. Sums of 32 bits wrap, as `jnp.sum` does.

    Raises:
        ValueError: If `op` is a string, but not the name of a reduction.
        TypeError: If `op` is neither a string nor a `ReduceOp`, or if a leaf is not an array or
            cannot be reduced by `op`.
        RuntimeError: If called inside `strategy.scope()`, but outside a step; with a `PerReplica`,
            which only exists outside steps; or in a function that `jax.pmap` or `jax.shard_map`
            maps.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> def step(x):
    ...     return mirror.all_reduce("mean", x)
    >>> strategy.run(step, (mirror.PerReplica([2.0, 4.0]),))
    Array(3., dtype=float32)
    """
    return _context("all_reduce", tree, 'strategy.reduce("sum", x)').all_reduce(op, tree)


def all_gather(tree: T, axis: int = 0) -> T:
    """Concatenates the replicas' leaves along `axis` in a step; all replicas receive the result.

    Differentiable. Outside every scope, the caller is a lone replica: the leaves are returned.

    Args:
        tree: Pytree of this replica's arrays, each with at least one dimension.
        axis: Axis to concatenate along, in replica order. A negative axis counts from the end.

    Returns:
        A pytree of mirrored arrays with the same structure and dtypes. The length along `axis` is
        the sum of the lengths on all replicas.

    Raises:
        ValueError: If a leaf does not have the axis.
        TypeError: If `axis` is not an int.
        RuntimeError: As for `all_reduce`.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> def step(x):
    ...     return mirror.all_gather(x)
    >>> strategy.run(step, (mirror.PerReplica([jnp.array([1, 2]), jnp.array([3, 4])]),))
    Array([1, 2, 3, 4], dtype=int32)
    """
    return _context("all_gather", tree, "strategy.gather(x, axis=0)").all_gather(tree, axis)


def _context(name: str, tree: object, outside: str) -> ReplicaContext:
    """Returns the context of the current replica.

    Args:
        name: Name of the public function.
        tree: Its operand.
        outside: Call that does the same outside a step.

    Raises:
        RuntimeError: If the caller is not in a replica.
    """
    frame = current_frame()
    if frame is not None and frame.replica is not None:
        return frame.replica
    what = f"mirror.{name} was called outside a step"
    instead = f"Outside a step, call {outside}."
    if frame is not None:
        raise RuntimeError(
            f"{what}, inside the scope of {frame.strategy}, where no replica is current. Call it "
            f"in the function that you pass to strategy.run. {instead}"
        )
    if any(map(is_per_replica, jax.tree.leaves(tree, is_leaf=is_per_replica))):
        raise RuntimeError(
            f"{what}, with a PerReplica, which has the values of all replicas. {instead}"
        )
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise RuntimeError(
            f"{what}, in a function that jax.pmap or jax.shard_map maps, where mirror has no "
            "replicas. Pass the function to strategy.run instead, or call JAX's collectives: "
            'jax.lax.pmean(x, "batch").'
        )
    return get_replica_context()
