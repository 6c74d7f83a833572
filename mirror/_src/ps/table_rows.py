"""`TableRows`: the rows of tables that a part of a step touches, on a worker."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import counted
from mirror._src.base.types import Array
from mirror._src.ps.placement import Placement
from mirror._src.ps.rows import join_rows, padded, put, split_ids

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

    def joined(self, parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Returns the ids, or the rows, of all servers, in the order of the ids."""
        return {name: join_rows(self._placement, name, parts) for name in self.names}

    def padded_ids(self, ids: ServerIds) -> dict[str, np.ndarray]:
        """Returns the ids of all servers, padded to the length with which a step is compiled."""
        sizes = {name: self._placement.leaves[name].shape[0] for name in self.names}
        return {name: padded(each, sizes[name]) for name, each in self.joined(ids).items()}

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
