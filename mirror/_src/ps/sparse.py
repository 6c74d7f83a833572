"""Sparse tables: variables of which workers pull and push only the rows that a batch touches."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.errors import (
    counted,
    expected,
    listing,
    nearest,
    require_callable,
    require_int,
)
from mirror._src.base.public_names import set_module
from mirror._src.base.types import Array
from mirror._src.ps.placement import Leaf, Placement

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
        flat = _require_ids(table, numbers, placement.leaves[table].shape[0])
        unique = np.unique(flat).astype(np.int32)
        for server, part in placement.holders[table]:
            first, last = np.searchsorted(unique, [part.start, part.stop])
            servers[server][table] = unique[first:last]
    return servers


def _require_ids(table: str, ids: Any, size: int) -> np.ndarray:
    flat = np.asarray(ids).reshape(-1)
    if flat.size and flat.dtype.kind not in "iu":
        raise TypeError(f"The ids of table {table!r} must be integers, got {flat.dtype}.")
    flat = flat.astype(np.int64)
    wrong = flat[(flat < 0) | (flat >= size)]
    if wrong.size:
        raise ValueError(
            f"Id {wrong[0]} is out of range for table {table!r}, which has {size} rows. Ids are "
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


class KeptRows(NamedTuple):
    """Snapshots of the tables of a model.

    Attributes:
        owner: What trains the model.
        where: For each table, the servers that hold its rows.
        references: For each server, a reference to its snapshot.
    """

    owner: object
    where: Any
    references: list[Any]


class ServerRows(jax.ShapeDtypeStruct):
    """Value of a `ServerTable`, which copies of the variable share.

    Attributes:
        first_rows: Returns its first rows.
        kept: Its last snapshot, once it has been trained: a list, because JAX's class is immutable.
    """

    first_rows: Callable[[int, int], Any]
    kept: list[KeptRows]


@set_module("mirror.ps")
class ServerTable(nnx.Variable[Any]):
    """A variable of a model whose rows are on the parameter servers only.

    So it can be larger than the memory of the main program, which knows only shape and dtype.
    Workers see it as an `nnx.Param`. Name it in the argument `sparse` of
    `mirror.ps.ParameterServerStrategy`, whose `read_rows` returns rows after training. Snapshots of
    it stay on the machines of the servers. The main program cannot evaluate such a model, and
    checkpoints cannot contain it.

    Args:
        shape: Its shape, rows first.
        first_rows: Function of the numbers `start` and `stop` that returns the first values of
            these rows. Each server calls it once, for its rows.
        dtype: Its dtype.

    Raises:
        ValueError: If `shape` has no rows.
        TypeError: If `shape` is not a tuple of integers, or `first_rows` is not callable.

    >>> mirror.ps.ServerTable((1000, 4), lambda start, stop: np.zeros((stop - start, 4))).shape
    (1000, 4)
    """

    def __init__(
        self,
        shape: Sequence[int],
        first_rows: Callable[[int, int], Any],
        dtype: Any = np.float32,
    ) -> None:
        if not isinstance(shape, Sequence) or not shape:
            raise TypeError(
                expected("shape", shape, "a tuple of integers", "For example (1000, 4).")
            )
        for size in shape:
            require_int("shape", size, fix="For example (1000, 4).")
        fix = "For example lambda start, stop: np.zeros((stop - start, 4))."
        require_callable("first_rows", first_rows, fix)
        rows = ServerRows(tuple(shape), np.dtype(dtype))
        rows.first_rows, rows.kept = first_rows, []
        super().__init__(rows)


_EXAMPLE = "For example sparse={'embed.embedding': lambda batch: batch['ids']}."
_MOST_ROWS = int(np.iinfo(np.int32).max)


@final
class SparseTables:
    """The argument `sparse` of a strategy.

    Args:
        sparse: For each variable, the function that returns the ids of a batch.

    Raises:
        TypeError: If `sparse` is not a dict of functions.
    """

    def __init__(self, sparse: Mapping[str, Callable[..., Any]] | None) -> None:
        if not isinstance(sparse, Mapping | None):
            raise TypeError(expected("sparse", sparse, "a dict or None", _EXAMPLE))
        self.functions = dict(sparse or {})
        for name, function in self.functions.items():
            if not isinstance(name, str):
                raise TypeError(expected("sparse", name, "a dict by names of variables", _EXAMPLE))
            require_callable(f"sparse[{name!r}]", function, _EXAMPLE)

    def require_in(self, leaves: Iterable[Leaf], on_servers: Collection[str] = ()) -> None:
        """Checks that a model has the tables, and those that are on servers only are among them.

        Raises:
            ValueError: If a name does not belong to a trained variable with rows, or a table is
                not named.
        """
        for name in on_servers:
            if name not in self.functions:
                raise ValueError(
                    f"{name!r} is a mirror.ps.ServerTable, which `sparse` must name. For example "
                    f"sparse={{{name!r}: lambda batch: batch['ids']}}."
                )
        by_name = {leaf.name: leaf for leaf in leaves}
        trained = [name for name, leaf in by_name.items() if leaf.kind == "trained"]
        for name in self.functions:
            if name not in by_name:
                raise ValueError(
                    f"`sparse` names {name!r}, which must be a trained variable of the model."
                    f"{nearest(name, trained)} They are:\n{listing(trained)}"
                )
            leaf = by_name[name]
            text = f"`sparse` names {name!r}, {leaf.dtype}{[*leaf.shape]}, "
            if leaf.kind != "trained":
                raise ValueError(
                    f"{text}which the optimizer does not train (`wrt`). Omit it from `sparse`."
                )
            if not leaf.shape or not 0 < leaf.shape[0] <= _MOST_ROWS:
                raise ValueError(
                    f"{text}which must be an array of 1 to {_MOST_ROWS} rows. Omit it from "
                    "`sparse`."
                )


ServerIds = list[dict[str, np.ndarray]]


@final
class TableRows:
    """The rows of tables that a part of a step touches.

    Args:
        functions: For each table, the function that returns the ids of a batch.
        placement: Where the rows of the tables are.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], placement: Placement) -> None:
        self._functions, self._placement = functions, placement
        self.names = tuple(functions)

    def ids(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ServerIds:
        """Returns for each server the different ids of each table, in ascending order.

        Args:
            args: The batch, as the user's functions receive it.
            kwargs: Its keyword arguments.

        Raises:
            ValueError: If an id is out of range.
            TypeError: If the ids are not integers.
        """
        found = {}
        for name, function in self._functions.items():
            try:
                found[name] = np.asarray(function(*args, **kwargs))
            except Exception as error:
                error.add_note(f"It was raised in sparse[{name!r}], which returns ids of a batch.")
                raise
        return split_ids(self._placement, found)

    def padded_ids(self, ids: ServerIds) -> dict[str, np.ndarray]:
        """Returns the ids of all servers, padded to the length with which a step is compiled."""
        sizes = {name: self._placement.leaves[name].shape[0] for name in self.names}
        joined = self._placement.join(ids)
        return {name: padded(each, sizes[name]) for name, each in joined.items()}

    def padded_rows(
        self, padded_ids: Mapping[str, np.ndarray], rows: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Returns rows for padded ids. Rows of the padding are zeros, as all are without `rows`."""
        result = {}
        for name, ids in padded_ids.items():
            leaf = self._placement.leaves[name]
            result[name] = np.zeros((len(ids), *leaf.shape[1:]), np.dtype(leaf.dtype))
            if name in rows:
                result[name][: len(rows[name])] = rows[name]
        return result

    def filled(self, name: str, ids: Array, rows: Array) -> Array:
        """Returns a table whose rows are NaN, except the given ones; inside `jax.jit`."""
        leaf = self._placement.leaves[name]
        return put(jnp.full(leaf.shape, jnp.nan, leaf.dtype), ids, rows)

    def pushed(self, ids: ServerIds, gradients: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
        """Returns for each server the ids and gradients of its rows."""
        result: list[dict[str, Any]] = [{} for _ in ids]
        for name in self.names:
            start = 0
            for server, _ in self._placement.holders[name]:
                own = ids[server][name]
                result[server][name] = (own, gradients[name][start : start + len(own)])
                start += len(own)
        return result

    def require_inside(self, outside: Mapping[str, Any]) -> None:
        """Rejects a step whose gradient has rows that were not pulled.

        Args:
            outside: For each table, how many rows of its gradient are not 0 and were not pulled,
                and the first of them.

        Raises:
            ValueError: If there are any.
        """
        for name, (count, first) in outside.items():
            if count:
                size = self._placement.leaves[name].shape[0]
                raise ValueError(
                    f"The gradient of table {name!r} is nonzero or NaN in "
                    f"{counted(int(count), 'row')} that sparse[{name!r}] does not name; the first "
                    f"is row {first} of {size}. A step reads NaN from such rows, and their "
                    "gradients cannot be applied. Return the ids of all rows that the step reads "
                    "or penalizes, or omit the table from `sparse`."
                )
