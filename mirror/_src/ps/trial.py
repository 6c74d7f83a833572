"""Trials of an optimizer, on small leaves in place of large ones."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from mirror._src.ps.optimizer_tree import as_numpy, flatten, nest
from mirror._src.ps.placement import Leaf, Placement, Slice

# optax treats axes of 128 and more differently (`adafactor`).
_MOST = 130
_MOST_ELEMENTS = 1 << 18
_SCALES = (1.0, 1e3, 1e-3, 1.0)
"""Gradients of a trial: small and large, so that clipping and `MultiSteps` show."""


def reduced(trained: Mapping[str, Any], placement: Placement) -> Placement:
    """Returns a placement of the same leaves on the same servers, with axes of at most 130.

    Every slice keeps at most 130 rows, so that a leaf is cut as before.
    """
    columns = {name: _columns(leaf) for name, leaf in trained.items()}
    starts = {}
    leaves = []
    for name, leaf in trained.items():
        start = 0
        for _, part in placement.holders[name]:
            starts[name, part.start] = start
            start += min(part.stop - part.start, _MOST)
        shape = (start, *columns[name]) if leaf.shape else ()
        leaves.append(Leaf(name, shape, str(leaf.dtype), "trained"))

    def small(part: Slice) -> Slice:
        start, rows = starts[part.leaf, part.start], min(part.stop - part.start, _MOST)
        shape = (rows, *columns[part.leaf]) if part.shape else ()
        return part._replace(start=start, stop=start + rows, shape=shape)

    servers = [[small(p) for p in slices if p.leaf in trained] for slices in placement.servers]
    return Placement(servers, leaves, placement.tables)


def _columns(leaf: Any) -> tuple[int, ...]:
    columns = tuple(min(length, _MOST) for length in leaf.shape[1:])
    while np.prod(columns, dtype=np.int64) * _MOST > _MOST_ELEMENTS and max(columns) > 2:
        columns = tuple(max(2, length // 2) if length > 2 else length for length in columns)
    return columns


def structs(leaves: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each leaf."""
    return {n: jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype)) for n, x in leaves.items()}


def random_values(leaves: Mapping[str, Any], seed: int, scale: float = 1.0) -> dict[str, Any]:
    """Returns random leaves; the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    return {
        name: (scale * rng.normal(size=leaf.shape)).astype(np.dtype(leaf.dtype))
        for name, leaf in leaves.items()
    }


def random_gradients(leaves: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns random gradients for a few steps, of different sizes."""
    return [random_values(leaves, seed, scale) for seed, scale in enumerate(_SCALES, 1)]


def differ(one: Any, other: Any) -> bool:
    """Whether two arrays differ by more than rounding, relative to their largest element."""
    if np.shape(one) != np.shape(other):
        return True
    one, other = np.asarray(one), np.asarray(other)
    is_inexact = jax.numpy.issubdtype(one.dtype, jax.numpy.inexact)
    if not is_inexact:
        return not np.array_equal(one, other)
    tolerance = min(0.05, 1000 * float(jax.numpy.finfo(one.dtype).eps))
    one, other = one.astype(np.float64), other.astype(np.float64)
    largest = np.abs(other[np.isfinite(other)]).max(initial=0.0)
    return not np.allclose(one, other, rtol=0, atol=tolerance * largest, equal_nan=True)


Trial = list[tuple[dict[str, np.ndarray], dict[Any, np.ndarray]]]


def run_trial(
    tx: optax.GradientTransformation,
    values: Mapping[str, np.ndarray],
    gradients: Iterable[Mapping[str, np.ndarray]],
) -> Trial:
    """Returns the updates (by leaf) and the state (by path) after each step of an optimizer."""
    with_extra = optax.with_extra_args_support(tx)
    steps = []
    with jax.default_device("cpu"):
        params = nest(values)
        update: Callable[..., Any] = jax.jit(
            lambda gradients, state, params: with_extra.update(
                gradients, state, params, staleness=np.int32(0)
            )
        )
        state = jax.jit(tx.init)(params)
        for each in gradients:
            updates, state = update(nest(each), state, params)
            params = optax.apply_updates(params, updates)
            by_path, _ = jax.tree_util.tree_flatten_with_path(state)
            found = {name: np.asarray(u) for name, u in flatten(updates, [*values]).items()}
            steps.append((found, {path: as_numpy(leaf) for path, leaf in by_path}))
    return steps
