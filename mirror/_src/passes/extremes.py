"""Extremes on CPUs: max pooling by slices, `argmax` and `argmin` by two reductions.

XLA:CPU scatters the gradient of max pooling one element at a time, which takes 2.5 to 45 times as
long, and does not vectorize the reduction of a window: 1.6 to 4 times (JAX 0.10.2 and 0.12.0.1,
float32). The results are equal to the last bit, also with ties, NaN, infinities and negative zeros;
only the sign of a NaN may differ, and of a zero in a gradient of zeros. For many shapes of 15 and
more channels, XLA's reduction omits NaN, and may return a zero of the other sign. The derivative in
one direction (`jax.jvp`) takes the first extreme, as the gradient does; for some shapes, XLA walks
windows in another order.

For `argmax` and `argmin`, it reduces pairs of value and index one by one, which takes 1.6 to 7
times as long. The results are equal.

Delete the rules when `tests/passes/test_lower_speed.py` says so.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from mirror._src.jaxprs.primitives import shape_of
from mirror._src.passes.evaluate import Rule, Rules


def _arg_extreme(reduce: Callable[..., Any]) -> Callable[[JaxprEqn], Rule | None]:
    """Returns the rule for `argmax` or `argmin`: the first index of the extreme, or of a NaN.

    The extreme may omit NaN: XLA:CPU does so in large arrays (JAX 0.10.2 and 0.12.0.1).
    """

    def find(eqn: JaxprEqn) -> Rule | None:
        aval: Any = eqn.invars[0].aval
        (axis,), dtype = eqn.params["axes"], eqn.params["index_dtype"]
        fits = 0 < 2 * aval.shape[axis] < jnp.iinfo(dtype).max
        return rule if aval.dtype == jnp.float32 and aval.size and fits else None

    def rule(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        (x,), (axis,), dtype = arguments, eqn.params["axes"], eqn.params["index_dtype"]
        best = lax.expand_dims(reduce(x, (axis,)), (axis,))
        index = lax.broadcasted_iota(dtype, x.shape, axis)
        size = x.shape[axis]
        after = lax.select(x == best, index + size, jnp.full_like(index, 2 * size))
        first = lax.reduce_min(lax.select(x != x, index, after), (axis,))
        return [lax.select(first < size, first, first - size)]

    return find


_MOST_POSITIONS = 27  # of a window: each becomes a few operations. 7x7 is slower than XLA's.
_MOST_IN_LAST = 4  # if the last axis is pooled: there, 3x3 is slower than XLA's.
_SELECTS = {"ge": (lax.ge, -math.inf), "le": (lax.le, math.inf)}


def _pool(combine: Callable[..., Any], identity: float) -> Callable[[JaxprEqn], Rule | None]:
    """Returns the rule for a `reduce_window_*`: combines the elements of all windows in turn."""

    def rule(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        return [functools.reduce(combine, _windows(eqn, arguments[0], identity))]

    return lambda eqn: rule if _is_unrolled(eqn) else None


def _gather(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    """Selects the tangent of each window's first extreme: `jax.jvp` of max pooling.

    As in XLA, the search begins with the identity, whose tangent is zero, and skips the padding,
    which would replace a NaN.
    """
    keeps, identity = _SELECTS[eqn.params["select_prim"].name]
    tangents, x = _windows(eqn, arguments[0], 0), _windows(eqn, arguments[1], identity)
    outside = _windows(eqn, jnp.zeros(arguments[1].shape, bool), True)
    best, result = jnp.full_like(x[0], identity), jnp.zeros_like(tangents[0])
    for part, tangent, skips in zip(x, tangents, outside, strict=True):
        keep = keeps(best, part) | skips
        best, result = lax.select(keep, best, part), lax.select(keep, result, tangent)
    return [result]


def _scatters(eqn: JaxprEqn) -> Rule | None:
    """Returns the rule for `select_and_scatter_add`, the gradient of max pooling."""
    dims = eqn.params["window_dimensions"]
    if not _is_unrolled(eqn) or (dims[-1] > 1 and math.prod(dims) > _MOST_IN_LAST):
        return None
    overlap = dims != eqn.params["window_strides"]
    return _scatter if overlap or _is_narrow(eqn) else _select


def _is_narrow(eqn: JaxprEqn) -> bool:
    """Whether the loops over windows and channels are so short that LLVM unrolls them first.

    Then it does not vectorize `_select`, which takes up to six times as long as `_scatter`.
    """
    return shape_of(eqn.outvars[0])[-1] < 16 and math.prod(eqn.params["window_dimensions"]) <= 8


def _select(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    """Selects, for windows that do not overlap, the value of the window or zero at each position.

    This takes 0.05 to 0.9 of the time of `_scatter` (JAX 0.10.2 and 0.12.0.1).
    """
    keeps, identity = _SELECTS[eqn.params["select_prim"].name]
    values, x = arguments
    dims, padding = eqn.params["window_dimensions"], eqn.params["padding"]
    index = _first(_windows(eqn, x, identity), keeps, np.float32)
    # Each axis becomes two: the windows, and the positions in a window.
    shape = [*itertools.chain.from_iterable(zip(values.shape, dims, strict=True))]
    own: Any = None
    for axis, w in enumerate(dims):
        if w > 1:
            iota = lax.broadcasted_iota(np.float32, shape, 2 * axis + 1)
            own = iota if own is None else lax.add(lax.mul(own, np.float32(w)), iota)
    index, values = (
        lax.broadcast_in_dim(y, shape, range(0, len(shape), 2)) for y in (index, values)
    )
    result = lax.select(lax.eq(index, own), values, lax.full_like(values, 0))
    covered = [n * w for n, w in zip(shape[::2], dims, strict=True)]
    sizes = zip(x.shape, covered, padding, strict=True)
    ends = [(-low, n - m + low, 0) for n, m, (low, _) in sizes]
    return [_padded(lax.reshape(result, covered), 0, ends)]


def _scatter(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    """Adds each value to the first extreme of its window.

    Positions with the same residue modulo the strides are computed together.
    """
    keeps, identity = _SELECTS[eqn.params["select_prim"].name]
    values, x = arguments
    dims, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
    padding = eqn.params["padding"]
    shape = [n + low + high for n, (low, high) in zip(x.shape, padding, strict=True)]
    reach = [-(-w // s) for w, s in zip(dims, strides, strict=True)]  # windows over a position
    blocks = [-(-n // s) for n, s in zip(shape, strides, strict=True)]
    ends = [(r - 1, b - n, 0) for r, b, n in zip(reach, blocks, values.shape, strict=True)]
    index = _padded(_first(_windows(eqn, x, identity), keeps, jnp.int32), -1, ends)
    chosen = [lax.eq(index, np.int32(i)) for i in range(math.prod(dims))]
    values = _padded(values, 0, ends)
    zeros = lax.full(blocks, 0, values.dtype)

    def at(residue: tuple[int, ...]) -> Any:
        total = zeros
        for back in itertools.product(*(range(r)[::-1] for r in reach)):  # in XLA's order
            place = [r + s * j for r, s, j in zip(residue, strides, back, strict=True)]
            if any(p >= w for p, w in zip(place, dims, strict=True)):
                continue
            start = [r - 1 - j for r, j in zip(reach, back, strict=True)]
            stop = [a + b for a, b in zip(start, blocks, strict=True)]
            hit, term = chosen[int(np.ravel_multi_index(place, dims))], values
            if any(start) or stop != [*hit.shape]:
                hit, term = (lax.slice(y, start, stop) for y in (hit, term))
            term = lax.select(hit, term, zeros)
            total = term if total is zeros else lax.add(total, term)
        return total

    def placed(residue: tuple[int, ...]) -> Any:
        lows = [r - low for r, (low, _) in zip(residue, padding, strict=True)]
        sizes = zip(lows, x.shape, blocks, strides, strict=True)
        ends = [(low, n - low - s * (b - 1) - 1, s - 1) for low, n, b, s in sizes]
        return _padded(at(residue), 0, ends)

    return [functools.reduce(lax.add, map(placed, np.ndindex(*strides)))]


def _first(parts: Sequence[Any], keeps: Callable[..., Any], dtype: Any) -> Any:
    """Returns the number of each window's first extreme, as this type.

    As in XLA, positions are compared in order, and a NaN is replaced by the next element.
    """
    best, *others = parts
    index = lax.full(best.shape, 0, dtype)
    for i, part in enumerate(others, 1):
        keep = keeps(best, part)
        best = lax.select(keep, best, part)
        index = lax.select(keep, index, lax.full_like(index, i))
    return index


def _is_unrolled(eqn: JaxprEqn) -> bool:
    """Whether the windows are small, of numbers, and not empty."""
    avals: list[Any] = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    positions = math.prod(eqn.params["window_dimensions"])
    are_numbers = all(aval.dtype == jnp.float32 and aval.size for aval in avals)
    return are_numbers and 1 < positions <= _MOST_POSITIONS


def _padded(x: Any, value: float, ends: Sequence[tuple[int, int, int]]) -> Any:
    return lax.pad(x, np.asarray(value, x.dtype), ends) if any(map(any, ends)) else x


def _windows(eqn: JaxprEqn, x: Any, fill: float) -> list[Any]:
    """Returns, for each position of a window in row-major order, the elements of all windows."""
    params = eqn.params
    dims, strides = params["window_dimensions"], params["window_strides"]
    ones = (1,) * x.ndim
    spread, steps = params.get("base_dilation", ones), params.get("window_dilation", ones)
    ends = zip(params["padding"], spread, strict=True)
    x = _padded(x, fill, [(low, high, d - 1) for (low, high), d in ends])
    sizes = [
        (n - (w - 1) * d - 1) // s + 1
        for n, w, s, d in zip(x.shape, dims, strides, steps, strict=True)
    ]
    parts = []
    for place in np.ndindex(*dims):
        start = [i * d for i, d in zip(place, steps, strict=True)]
        stop = [a + s * (n - 1) + 1 for a, s, n in zip(start, strides, sizes, strict=True)]
        parts.append(lax.slice(x, start, stop, strides))
    return parts


RULES: Rules = {
    "argmax": _arg_extreme(lax.reduce_max),
    "argmin": _arg_extreme(lax.reduce_min),
    "reduce_window_max": _pool(lax.max, -math.inf),
    "reduce_window_min": _pool(lax.min, math.inf),
    "select_and_gather_add": lambda eqn: _gather if _is_unrolled(eqn) else None,
    "select_and_scatter_add": _scatters,
}
