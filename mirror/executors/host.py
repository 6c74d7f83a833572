"""Exchanges carried out on the host: what each replica gets of what all of them bring."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mirror._errors import describe
from mirror.cross_device_ops import CrossDeviceOps, ReduceOp, aligned
from mirror.program.stages import REDUCTIONS, Exchange

Rows = Callable[[int], np.ndarray]  # a replica's own array, which is waited for


def carry_out(exchange: Exchange, row: Rows, num_replicas: int, ops: CrossDeviceOps) -> list[Any]:
    """What each replica gets; one and the same array where all get the same.

    Args:
        exchange: what is to be done.
        row: gives a replica's operand, once.
        num_replicas: how many replicas there are.
        ops: carries the reductions out.

    Raises:
        ValueError: `ops` returned something of another shape or dtype.
        RuntimeError: `ops` raised, or a replica's operand is lost.
    """
    groups = exchange.params.get("axis_index_groups") or [range(num_replicas)]
    results: list[Any] = [None] * num_replicas
    for group in groups:
        found = _in_group(exchange, row, list(group), ops)
        for replica, result in zip(group, found, strict=True):
            results[replica] = result
    return results


def _in_group(exchange: Exchange, row: Rows, group: list[int], ops: CrossDeviceOps) -> list[Any]:
    params, n = exchange.params, len(group)
    match exchange.kind:
        case "psum" | "pmax" | "pmin":
            return [_reduced(exchange, row, group, ops)] * n
        case "reduce_scatter":
            total = np.asarray(_reduced(exchange, row, group, ops, kind="psum"))
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
    exchange: Exchange, row: Rows, group: list[int], ops: CrossDeviceOps, kind: str = ""
) -> Any:
    op = ReduceOp(REDUCTIONS[kind or exchange.kind])
    aval = exchange.operand.aval
    lost: list[BaseException] = []

    def values() -> Iterator[np.ndarray]:
        for replica in group:
            try:
                value = row(replica)
            except BaseException as error:
                lost.append(error)
                raise
            yield value

    who = f"{type(ops).__name__}.reduce_implementation"
    try:
        result = ops.reduce_implementation(op, values())
    except Exception as error:
        if error in lost:
            raise
        raise RuntimeError(
            f"{who} raised {type(error).__name__} in the {exchange.in_words}, for "
            f"{op.value!r} of {describe(aval)} of {len(group)} replicas: {error}"
        ) from error
    return _checked(result, aval, who, exchange)


def _checked(result: Any, aval: Any, who: str, exchange: Exchange) -> Any:
    wanted = np.dtype(aval.dtype)
    if not isinstance(result, jax.Array):
        result = np.asarray(result)
    fits = result.dtype == wanted or np.can_cast(result.dtype, wanted, "same_kind")
    if result.shape != aval.shape or not fits:
        raise ValueError(
            f"{who} returned {describe(result)} in the {exchange.in_words}. Each replica brought "
            f"{describe(aval)}: return an array of that shape and dtype."
        )
    return result if result.dtype == wanted else result.astype(wanted)


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
    split, joined, n = params["split_axis"], params["concat_axis"], len(rows)
    cuts = [np.split(row, n, split) for row in rows]
    if params["tiled"]:
        return [np.concatenate([cut[i] for cut in cuts], joined) for i in range(n)]
    return [np.stack([cut[i].squeeze(split) for cut in cuts], joined) for i in range(n)]


def _permuted(perm: Any, row: Rows, group: list[int]) -> list[np.ndarray]:
    """Who is sent nothing gets zeros."""
    source = {target: origin for origin, target in perm}
    found: dict[int, np.ndarray] = {}
    for replica in group:
        found[replica] = row(replica)
    nothing = np.zeros_like(next(iter(found.values())))
    return [found[source[replica]] if replica in source else nothing for replica in group]


def lost(replica: int, exchange: Exchange, error: BaseException) -> str:
    """The message for an operand that cannot be read."""
    return (
        f"Replica {replica}'s value for the {exchange.in_words} is lost: {error}. The step has "
        "not changed anything; look at what that replica computes, or at its device."
    )
