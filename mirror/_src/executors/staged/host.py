"""Collectives carried out on the host: what each replica gets of what all of them bring."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mirror._src.collectives.cross_device_ops import CrossDeviceOps
from mirror._src.collectives.on_host import aligned
from mirror._src.collectives.reduce_op import ReduceOp
from mirror._src.program.staging.ir import REDUCTIONS, Collective

Rows = Callable[[int], np.ndarray]  # a replica's own array, which is waited for


def carry_out(
    collective: Collective, row: Rows, num_replicas: int, ops: CrossDeviceOps
) -> list[Any]:
    """What each replica gets; one and the same array where all get the same.

    Args:
        collective: what is to be done.
        row: gives a replica's operand, once.
        num_replicas: how many replicas there are.
        ops: carries the reductions out.

    Raises:
        ValueError: `ops` returned something of another shape or dtype.
        RuntimeError: `ops` raised.
        LostValueError: a replica's operand cannot be read.
    """
    groups = collective.params.get("axis_index_groups") or [range(num_replicas)]
    results: list[Any] = [None] * num_replicas
    for group in groups:
        found = _in_group(collective, row, list(group), ops)
        for replica, result in zip(group, found, strict=True):
            results[replica] = result
    return results


def _in_group(
    collective: Collective, row: Rows, group: list[int], ops: CrossDeviceOps
) -> list[Any]:
    params, n = collective.params, len(group)
    match collective.kind:
        case "psum" | "pmax" | "pmin":
            return [_reduced(collective, row, group, ops)] * n
        case "reduce_scatter":
            total = np.asarray(_reduced(collective, row, group, ops, kind="psum"))
            axis = params["scatter_dimension"]
            parts = np.split(total, n, axis)
            return parts if params["tiled"] else [part.squeeze(axis) for part in parts]
        case "all_gather":
            return [_gathered(params, row, group)] * n
        case "all_to_all":
            return _transposed(params, [row(replica) for replica in group])
        case "ppermute":
            return _permuted(params["perm"], row, group)
        case _:  # pbroadcast
            return [row(params["source"])] * n


def _reduced(
    collective: Collective, row: Rows, group: list[int], ops: CrossDeviceOps, kind: str = ""
) -> Any:
    op = ReduceOp(REDUCTIONS[kind or collective.kind])
    aval = collective.operand.aval
    found = ops.carry_out(op, map(row, group), aval.shape, aval.dtype, collective.in_words)
    if op in (ReduceOp.MIN, ReduceOp.MAX) and jnp.issubdtype(aval.dtype, jnp.floating):
        found = np.asarray(found)
        return np.where(found == 0, np.zeros((), found.dtype), found)  # as the other executors do
    return found


def _gathered(params: dict[str, Any], row: Rows, group: list[int]) -> np.ndarray:
    """The rows joined, or stacked, in one buffer: each is written as it arrives."""
    first, axis = row(group[0]), params["all_gather_dimension"]
    shape, size = list(first.shape), 1
    if params["tiled"]:
        size = shape[axis]
        shape[axis] *= len(group)
    else:
        shape.insert(axis, len(group))
    whole = aligned(tuple(shape), first.dtype)
    for i, replica in enumerate(group):
        value = first if i == 0 else row(replica)
        place = (slice(None),) * axis + (slice(i * size, (i + 1) * size),)
        whole[place] = value if params["tiled"] else np.expand_dims(value, axis)
    return whole


def _transposed(params: dict[str, Any], rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    # Tiled or not: JAX adds and takes away the axes of the other kind by itself.
    split, joined, n = params["split_axis"], params["concat_axis"], len(rows)
    cuts = [np.split(row, n, split) for row in rows]
    return [np.concatenate([cut[i] for cut in cuts], joined) for i in range(n)]


def _permuted(perm: Any, row: Rows, group: list[int]) -> list[np.ndarray]:
    """Who is sent nothing gets zeros."""
    source = {target: origin for origin, target in perm}
    found: dict[int, np.ndarray] = {}
    for replica in group:
        found[replica] = row(replica)
    nothing = np.zeros_like(next(iter(found.values())))
    return [found[source[replica]] if replica in source else nothing for replica in group]
