"""Collectives on the host: computes each replica's result from the operands of all replicas."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mirror._src.engine.cross_device_ops import CrossDeviceOps
from mirror._src.engine.on_host import aligned
from mirror._src.engine.reduce_op import ReduceOp
from mirror._src.jaxprs.primitives import op_of
from mirror._src.passes.staging.ir import Collective

Read = Callable[[int], np.ndarray]


def run_on_host(
    collective: Collective, read: Read, num_replicas: int, ops: CrossDeviceOps
) -> list[Any]:
    """Returns each replica's result. Replicas with equal results share one array.

    Args:
        collective: The collective to run.
        read: Waits for the operand of a replica and returns it. Called once per replica.
        num_replicas: Number of replicas.
        ops: Implements the reductions.

    Raises:
        ValueError: If `ops` returned an array of the wrong shape or dtype.
        RuntimeError: If `ops` raised an error.
        LostValueError: If the operand of a replica cannot be read.
    """
    groups = collective.params.get("axis_index_groups") or [range(num_replicas)]
    results: list[Any] = [None] * num_replicas
    for group in groups:
        outputs = _run_in_group(collective, read, list(group), ops)
        for replica, output in zip(group, outputs, strict=True):
            results[replica] = output
    return results


def _run_in_group(
    collective: Collective, read: Read, group: list[int], ops: CrossDeviceOps
) -> list[Any]:
    params, n = collective.params, len(group)
    match collective.primitive:
        case "psum" | "pmax" | "pmin":
            return [_reduce(collective, read, group, ops)] * n
        case "reduce_scatter":
            total = np.asarray(_reduce(collective, read, group, ops))
            axis = params["scatter_dimension"]
            slices = np.split(total, n, axis)
            return slices if params["tiled"] else [part.squeeze(axis) for part in slices]
        case "all_gather":
            return [_gather(params, read, group)] * n
        case "all_to_all":
            return _transpose(params, [read(replica) for replica in group])
        case "ppermute":
            return _permute(params["perm"], read, group)
        case _:  # pbroadcast
            return [read(params["source"])] * n


def _reduce(collective: Collective, read: Read, group: list[int], ops: CrossDeviceOps) -> Any:
    op = ReduceOp(op_of(collective.primitive))
    aval = collective.operand.aval
    total = ops._carry_out(op, map(read, group), aval.shape, aval.dtype, collective.description)
    if op in (ReduceOp.MIN, ReduceOp.MAX) and jnp.issubdtype(aval.dtype, jnp.floating):
        total = np.asarray(total)
        # 0.0 instead of -0.0, as in the other executors.
        return np.where(total == 0, np.zeros((), total.dtype), total)
    return total


def _gather(params: dict[str, Any], read: Read, group: list[int]) -> np.ndarray:
    """Joins or stacks the operands in one buffer. Writes each operand as it arrives."""
    first, axis = read(group[0]), params["all_gather_dimension"]
    shape, size = list(first.shape), 1
    if params["tiled"]:
        size = shape[axis]
        shape[axis] *= len(group)
    else:
        shape.insert(axis, len(group))
    whole = aligned(tuple(shape), first.dtype)
    for i, replica in enumerate(group):
        value = first if i == 0 else read(replica)
        place = (slice(None),) * axis + (slice(i * size, (i + 1) * size),)
        whole[place] = value if params["tiled"] else np.expand_dims(value, axis)
    return whole


def _transpose(params: dict[str, Any], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    # `tiled` does not matter: JAX adds and removes the axes of the untiled form outside the
    # primitive.
    split, joined, n = params["split_axis"], params["concat_axis"], len(values)
    slices = [np.split(value, n, split) for value in values]
    return [np.concatenate([parts[i] for parts in slices], joined) for i in range(n)]


def _permute(perm: Any, read: Read, group: list[int]) -> list[np.ndarray]:
    """Sends operands along a permutation. A replica that receives nothing gets zeros."""
    source = {target: origin for origin, target in perm}
    values = {replica: read(replica) for replica in group}
    zeros = np.zeros_like(next(iter(values.values())))
    return [values[source[replica]] if replica in source else zeros for replica in group]
