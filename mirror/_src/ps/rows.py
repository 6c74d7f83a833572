"""Rows of tables: variables of which a step reads and writes only the rows that it touches."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.types import Array
from mirror._src.ps.placement import Placement

_LEAST_BUCKET = 8


def split_ids(placement: Placement, ids: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Returns for each server the rows of each table that it holds among `ids`.

    Args:
        placement: Where the rows of the tables are.
        ids: For each table, numbers of rows in any shape and order, possibly repeated.

    Returns:
        For each server, the different numbers in ascending order, int32, numbered as in the whole
        table.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If the numbers are not integers.
    """
    servers: list[dict[str, np.ndarray]] = [{} for _ in placement.servers]
    for table, numbers in ids.items():
        size = placement.leaves[table].shape[0]
        flat = _require_ids(table, numbers, 0, size, f"{size} rows")
        unique = np.unique(flat).astype(np.int32)
        for server, part in placement.holders[table]:
            first, last = np.searchsorted(unique, [part.start, part.stop])
            servers[server][table] = unique[first:last]
    return servers


def join_rows(
    placement: Placement, table: str, parts: Sequence[Mapping[str, np.ndarray]]
) -> np.ndarray:
    """Returns what the servers hold of a table's rows, in the order of `np.unique` of the ids."""
    found = [parts[server][table] for server, _ in placement.holders[table]]
    return found[0] if len(found) == 1 else np.concatenate(found)


def local_ids(table: str, ids: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Returns ids numbered from the first row of a slice, int32.

    Raises:
        ValueError: If an id is not in the slice.
        TypeError: If the ids are not integers.
    """
    there = f"rows {start} to {stop - 1} on this server"
    return (_require_ids(table, ids, start, stop, there) - start).astype(np.int32)


def _require_ids(table: str, ids: Any, start: int, stop: int, there: str) -> np.ndarray:
    flat = np.asarray(ids).reshape(-1)
    if flat.size and flat.dtype.kind not in "iu":
        raise TypeError(f"The ids of table {table!r} must be integers, got {flat.dtype}.")
    flat = flat.astype(np.int64)
    wrong = flat[(flat < start) | (flat >= stop)]
    if wrong.size:
        raise ValueError(
            f"Id {wrong[0]} is out of range for table {table!r}, which has {there}. Ids are "
            "numbers of rows from 0."
        )
    return flat


def bucket(count: int) -> int:
    """Returns the next power of two, at least 8: with how many rows a program is compiled."""
    return max(_LEAST_BUCKET, 1 << (count - 1).bit_length())


def padded(ids: np.ndarray, size: int) -> np.ndarray:
    """Returns ids followed by `size`, which is out of range, to the length of their bucket."""
    return np.concatenate([ids, np.full(bucket(len(ids)) - len(ids), size, np.int32)])


def summed(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], row: tuple[int, ...], dtype: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the different ids of several parts, and for each the sum of its gradients.

    Args:
        parts: Ids and gradients of each part. Gradients are added in this order.
        row: Shape of a row.
        dtype: Dtype of the gradients.
    """
    if not parts:
        return np.zeros(0, np.int32), np.zeros((0, *row), dtype)
    ids = np.concatenate([ids for ids, _ in parts])
    unique, places = np.unique(ids, return_inverse=True)
    total = np.zeros((len(unique), *row), dtype)
    np.add.at(total, places.reshape(-1), np.concatenate([gradients for _, gradients in parts]))
    return unique.astype(np.int32), total


def take(values: Array, ids: Array) -> Array:
    """Returns rows; the last row for an id that is out of range."""
    return jnp.take(values, ids, axis=0, mode="clip")


def put(values: Array, ids: Array, rows: Array) -> Array:
    """Returns values with other rows; ids that are out of range are left out."""
    return values.at[ids].set(rows, mode="drop")


take_jit = jax.jit(take)
