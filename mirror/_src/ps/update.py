"""The update of one parameter server: its optimizer on its slices, compiled once per shape."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from mirror._src.base.types import Array, PyTree
from mirror._src.ps.buffers import BufferLayout
from mirror._src.ps.optimizer_tree import flatten, init_structs, nest, row_owner
from mirror._src.ps.placement import Slice
from mirror._src.ps.rows import put, take

Update = Callable[..., tuple[tuple[Array, ...], dict[str, Array], PyTree]]


def update_function(
    tx: optax.GradientTransformation, layout: BufferLayout, tables: Mapping[str, Slice]
) -> Update:
    """Returns the compiled update of the values and the optimizer's state of a server.

    The function takes and returns `values` (buffers), `tables` (by leaf) and `state`. It also takes
    `gradients` (buffers), `ids` (for each table, numbers of its rows here, padded with its number
    of rows), `row_gradients` and `staleness`.

    Of a table and of the optimizer's state for it, the rows `ids` alone are read and written. The
    optimizer sees them as if they were the whole leaf.

    The memory of tables and state is donated. The buffers of values are not, because they are
    handed out as views: it stays at twice the values while an update runs, and no pull copies.
    """
    tx = optax.with_extra_args_support(tx)
    trained = {part.leaf: part for part in (*layout.slices, *tables.values())}
    paths, _ = init_structs(tx, trained)
    owners = [row_owner(path, struct.shape, tables) for path, struct in paths]

    def with_rows(state: PyTree, change: Callable[[Array, str, int], Any]) -> PyTree:
        """Returns the state with its rows of tables changed; `change` gets their table too."""
        leaves, treedef = jax.tree.flatten(state)
        changed = [
            leaf if name is None else change(leaf, name, position)
            for position, (leaf, name) in enumerate(zip(leaves, owners, strict=True))
        ]
        return jax.tree.unflatten(treedef, changed)

    def update(
        values: tuple[Array, ...],
        tables: dict[str, Array],
        state: PyTree,
        gradients: tuple[Array, ...],
        ids: dict[str, Array],
        row_gradients: dict[str, Array],
        staleness: Array,
    ) -> tuple[tuple[Array, ...], dict[str, Array], PyTree]:
        touched = {name: take(table, ids[name]) for name, table in tables.items()}
        params = nest({**layout.unpack(values), **touched})
        updates, new_state = tx.update(
            nest({**layout.unpack(gradients), **row_gradients}),
            with_rows(state, lambda leaf, name, _: take(leaf, ids[name])),
            params,
            staleness=staleness,
        )
        new = flatten(optax.apply_updates(params, updates), [*trained])
        old_leaves = jax.tree.leaves(state)
        return (
            layout.pack(new),
            {name: put(table, ids[name], new[name]) for name, table in tables.items()},
            with_rows(new_state, lambda leaf, name, at: put(old_leaves[at], ids[name], leaf)),
        )

    return jax.jit(update, donate_argnums=(1, 2))
