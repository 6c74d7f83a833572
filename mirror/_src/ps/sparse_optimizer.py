"""Finds how an optimizer treats the rows of a table that a step does not touch.

Of a table, a server hands the optimizer the touched rows alone. Three cases:

- It is exact, for example SGD and Adagrad: a row without a gradient would not change.
- It is *lazy*, for example Adam and momentum: such a row would change, because its momentum decays
  or its weight does. Here it waits until it is touched again: another, usual algorithm.
- It is refused: the update of a touched row would depend on the other rows, for example on the norm
  of the whole table, or come in a later step, which might not touch it.
"""

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
import optax

from mirror._src.ps.optimizer_tree import nest, owner, row_owner
from mirror._src.ps.placement import Leaf, place
from mirror._src.ps.trial import (
    differ,
    random_gradients,
    random_values,
    reduced,
    run_trial,
    structs,
)

_FIX = "Leave it out of `sparse`, or use optax.adagrad or optax.sgd for it."


def require_sparse(
    tx: optax.GradientTransformation, trained: Mapping[str, Any], tables: Collection[str]
) -> None:
    """Rejects an optimizer that needs more than the touched rows of a table.

    Args:
        tx: The optimizer.
        trained: Shape and dtype of each trained leaf, whole.
        tables: Leaves whose touched rows alone are updated.

    Raises:
        ValueError: If it does; the message names the tables.
    """
    # optax does not export the class of the latter's state.
    accumulating = (optax.MultiStepsState, type(jax.eval_shape(optax.apply_every().init, {})))
    state = jax.eval_shape(tx.init, nest(structs(trained)))
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, accumulating))
    if any(isinstance(node, accumulating) for node in nodes):
        raise ValueError(
            f"`tx` accumulates gradients over several steps, but updates of the table"
            f"{_list(tables)} reach only the rows that a step touches. {_FIX}"
        )
    small, touched = _small(trained), {}
    for name in tables:
        touched[name] = np.arange(0, small[name].shape[0], 2)
    gradients = random_gradients(small)
    for each in gradients:
        for name in tables:
            each[name][1::2] = 0
    values = random_values(small, 0)
    steps = run_trial(tx, values, gradients)
    sparse_steps = run_trial(tx, _rows(values, touched), [_rows(g, touched) for g in gradients])
    found = set()
    for (updates, state), (some, some_state) in zip(steps, sparse_steps, strict=True):
        found |= {n for n, u in _rows(updates, touched).items() if differ(some[n], u)}
        for path, leaf in some_state.items():
            table = row_owner(path, state[path].shape, small)
            wanted = state[path] if table is None else _rows({table: state[path]}, touched)[table]
            if differ(leaf, wanted):
                found.add(owner(path, small) or "")
    if found:
        raise ValueError(
            f"`tx` computes the update of a row of the table{_list(found & {*tables} or tables)} "
            f"from its other rows too, which a sparse update does not read. {_FIX}"
        )


def lazy_tables(
    tx: optax.GradientTransformation, trained: Mapping[str, Any], tables: Collection[str]
) -> frozenset[str]:
    """Returns the tables of which a row would change in steps that do not touch it.

    The optimizer is tried with zero gradients for a row, after others.

    Args:
        tx: The optimizer.
        trained: Shape and dtype of each trained leaf, whole.
        tables: Leaves whose touched rows alone are updated.
    """
    if not tables:
        return frozenset()
    small = _small(trained)
    gradients = random_gradients(small)
    for each in gradients[1:]:
        for name in tables:
            each[name][0] = 0
    steps = run_trial(tx, random_values(small, 0), gradients)
    found = set()
    for (_, before), (updates, after) in itertools.pairwise(steps):
        found |= {name for name in tables if np.any(updates[name][:1])}
        for path, leaf in after.items():
            table = row_owner(path, leaf.shape, small)
            if table in tables and not np.array_equal(leaf[:1], before[path][:1], equal_nan=True):
                found.add(str(table))
    return frozenset(found)


def _small(trained: Mapping[str, Any]) -> dict[str, Leaf]:
    leaves = [Leaf(n, s.shape, str(s.dtype), "trained") for n, s in structs(trained).items()]
    return reduced(trained, place(leaves, 1, None)).leaves


def _rows(values: Mapping[str, Any], touched: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: x[touched[name]] if name in touched else x for name, x in values.items()}


def _list(tables: Collection[str]) -> str:
    return f"{'s' if len(tables) > 1 else ''} {', '.join(map(repr, sorted(tables)))}"
