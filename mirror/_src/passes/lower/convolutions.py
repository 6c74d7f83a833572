"""Convolutions on CPUs for which XLA has no fast kernel: products, and sums of slices.

XLA:CPU has a fast kernel (Eigen's) for dense convolutions of one or two dimensions; it computes
groups and most other kernel gradients in scalar loops (JAX 0.10.2 and 0.12.0.1, float32). The
comments in `_form_of` give the ratio of the times. Sums are rounded in another order: results
differ by at most 1e-6 of the largest one.

Delete a form when `tests/passes/test_lower_speed.py` says so.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from mirror._src.passes.evaluate import Rule, Rules, bind_with

_MOST_TERMS = 125  # each is a few operations
_MOST_GROUPS = 64
_FLOATS = ("float32", "bfloat16", "float16")


class _Convolution:
    """A convolution of `x` (N, *S, C) and `w` (*K, I, O) to (N, *P, O), in any layout."""

    def __init__(self, eqn: JaxprEqn, params: dict[str, Any], avals: Sequence[Any]) -> None:
        self.eqn, self.params, self.avals = eqn, params, avals
        x, w, y = avals
        self.lhs, self.rhs, self.out = params["dimension_numbers"]
        self.batch, self.channels = (x.shape[i] for i in self.lhs[:2])
        self.features, self.inner, *self.kernel = (w.shape[i] for i in self.rhs)
        self.places = [y.shape[i] for i in self.out[2:]]
        self.groups: int = params["feature_group_count"]
        self.batch_groups: int = params["batch_group_count"]
        self.strides: Sequence[int] = params["window_strides"]
        self.steps: Sequence[int] = params["rhs_dilation"]
        ends = zip(params["padding"], params["lhs_dilation"], strict=True)
        self.ends = [(0, 0, 0), *((low, high, d - 1) for (low, high), d in ends), (0, 0, 0)]

    def x(self, x: Any) -> Any:
        """Returns the left operand as (N, *S, C)."""
        n, c, *s = self.lhs
        return _move(x, (n, *s, c))

    def w(self, w: Any) -> Any:
        """Returns the kernel as (*K, I, O)."""
        o, i, *k = self.rhs
        return _move(w, (*k, i, o))

    def result(self, y: Any) -> Any:
        """Returns the result (N, *P, O) in its layout."""
        n, o, *p = self.out
        return _move(y, np.argsort((n, *p, o)).tolist())

    def padded(self, x: Any) -> Any:
        """Returns an array (N, *S, C) with its padding."""
        return lax.pad(x, np.zeros((), x.dtype), self.ends) if any(map(any, self.ends)) else x

    def at_kernel(self, x: Any) -> Iterator[Any]:
        """Yields, for each position of the kernel, what it is multiplied by: (N, *P, C)."""
        for place in np.ndindex(*self.kernel):
            yield _part(x, place, self.steps, self.strides, self.places)

    def at_place(self, x: Any) -> Iterator[Any]:
        """Yields, for each position of the result, what the kernel is multiplied by: (N, *K, C)."""
        for place in np.ndindex(*self.places):
            yield _part(x, place, self.strides, self.steps, self.kernel)

    def product(self, left: Any, right: Any, axes: Any) -> Any:
        """Returns `tensordot(left, right, axes)`."""
        precision, dtype = self.params["precision"], self.params["preferred_element_type"]
        numbers = (axes, ((), ()))
        return lax.dot_general(left, right, numbers, precision, preferred_element_type=dtype)


def _move(x: Any, order: Sequence[int]) -> Any:
    return x if list(order) == list(range(x.ndim)) else lax.transpose(x, order)


def _part(
    x: Any, place: Sequence[int], steps: Sequence[int], strides: Sequence[int], sizes: Sequence[int]
) -> Any:
    start = [i * d for i, d in zip(place, steps, strict=True)]
    stop = [a + s * (n - 1) + 1 for a, s, n in zip(start, strides, sizes, strict=True)]
    return lax.slice(x, [0, *start, 0], [x.shape[0], *stop, x.shape[-1]], [1, *strides, 1])


def _sum(terms: Iterator[Any]) -> Any:
    total = next(terms)
    for term in terms:
        total = total + term
    return total


def _per_channel(conv: _Convolution, x: Any, w: Any) -> Any:
    """Each feature depends on one channel: products and sums, without a contraction."""
    shape, multiples = (conv.batch, *conv.places, conv.features), conv.features // conv.groups
    kernels = lax.reshape(conv.w(w), (math.prod(conv.kernel), conv.groups, multiples))
    pairs = zip(conv.at_kernel(conv.padded(conv.x(x))), kernels, strict=True)
    return conv.result(_sum(lax.reshape(part[..., None] * each, shape) for part, each in pairs))


def _per_channel_kernel(conv: _Convolution, x: Any, w: Any) -> Any:
    """Gradient of such a kernel: sums over the examples and positions."""
    (n, c, *s), (o, i, *k) = conv.lhs, conv.rhs
    x, w = conv.padded(_move(x, (c, *s, n))), _move(w, (i, *k, o))  # examples first
    axes = tuple(range(len(k) + 1))
    sums = [lax.reduce_sum(part * w, axes) for part in conv.at_place(x)]
    return conv.result(lax.reshape(jnp.stack(sums), (1, *conv.places, conv.features)))


def _per_group(conv: _Convolution, x: Any, w: Any) -> Any:
    """One convolution per group."""
    count = conv.groups * conv.batch_groups
    split, last = conv.lhs[1 if conv.groups > 1 else 0], conv.out[1]
    params = {**conv.params, "feature_group_count": 1, "batch_group_count": 1}
    xs, ws = jnp.split(x, count, split), jnp.split(w, count, conv.rhs[0])
    shape = list(conv.avals[2].shape)
    shape[last] //= count
    one = _Convolution(conv.eqn, params, [xs[0], ws[0], conv.avals[2].update(shape=tuple(shape))])
    form = _form_of(one) or _unchanged
    return lax.concatenate([form(one, *pair) for pair in zip(xs, ws, strict=True)], last)


def _gathered(conv: _Convolution, x: Any, w: Any) -> Any:
    """One product of the patches of `x`. They are small if there are few channels."""
    last = len(conv.kernel) + 1
    patches = lax.concatenate(list(conv.at_kernel(conv.padded(conv.x(x)))), last)
    kernel = lax.reshape(conv.w(w), (patches.shape[last], conv.features))
    return conv.result(conv.product(patches, kernel, ((last,), (0,))))


def _scattered(conv: _Convolution, x: Any, w: Any) -> Any:
    """Products of every position with the whole kernel, then sums. Small for few features."""
    rank, x, w = len(conv.kernel), conv.x(x), conv.w(w)
    w = _move(lax.reshape(w, (math.prod(conv.kernel), *w.shape[rank:])), (1, 0, 2))
    products = conv.product(x, w, ((rank + 1,), (0,)))
    whole = (lax.index_in_dim(products, i, rank + 1, keepdims=False) for i in range(w.shape[1]))
    places = np.ndindex(*conv.kernel)
    return conv.result(
        _sum(
            _part(conv.padded(each), place, conv.steps, conv.strides, conv.places)
            for each, place in zip(whole, places, strict=True)
        )
    )


def _per_place(conv: _Convolution, x: Any, w: Any) -> Any:
    """One product per position of the result, which also contracts the kernel's positions."""
    space = tuple(range(len(conv.kernel) + 1))
    axes = (tuple(i + 1 for i in space), space)
    kernel = conv.w(w)
    parts = [conv.product(part, kernel, axes) for part in conv.at_place(conv.padded(conv.x(x)))]
    return conv.result(lax.reshape(jnp.stack(parts, 1), (conv.batch, *conv.places, conv.features)))


def _channels_last(conv: _Convolution, x: Any, w: Any) -> Any:
    """XLA's convolution, in the layout of its fast kernel."""
    last = len(conv.kernel) + 1
    numbers = lax.ConvDimensionNumbers(*_last_of(last))
    params = {**conv.params, "dimension_numbers": numbers}
    (y,) = bind_with(conv.eqn, [conv.x(x), conv.w(w)], params)
    return conv.result(y)


def _last_of(last: int) -> tuple[tuple[int, ...], ...]:
    """Returns the positions of batch, channels and space in the layout with the channels last."""
    around = (0, last, *range(1, last))
    return around, (last, last - 1, *range(last - 1)), around


def _unchanged(conv: _Convolution, x: Any, w: Any) -> Any:
    return bind_with(conv.eqn, [x, w], conv.params)[0]


_Form: TypeAlias = Callable[[_Convolution, Any, Any], Any]


def _form_of(conv: _Convolution) -> _Form | None:
    """Returns how to compute a convolution faster than XLA; `None` if it is fast enough."""
    if not all(aval.dtype in _FLOATS and aval.size for aval in conv.avals):
        return None
    if not all(aval.dtype == jnp.float32 for aval in conv.avals):
        return _layout_of(conv) if conv.groups == 1 else None
    kernel, places, rank = math.prod(conv.kernel), math.prod(conv.places), len(conv.kernel)
    is_gradient = kernel > places  # of a kernel: it slides the gradient of the result
    if conv.batch_groups > 1:  # the gradient of a kernel with groups: 50 to 490 times
        if conv.batch == conv.batch_groups == conv.features:
            # In one dimension, 3 to 8 times. In two, XLA is as fast, and the padded inputs would
            # double the memory of a MobileNet.
            is_sum = rank == 1 and places <= _MOST_TERMS
            return _per_channel_kernel if is_sum else _layout_of(conv)
        return _per_group if conv.batch_groups <= _MOST_GROUPS else None
    if conv.groups > 1 and is_gradient and conv.inner > 1:  # the same under `jax.vmap`
        return _per_group if conv.groups <= _MOST_GROUPS else None
    if conv.inner == 1 and kernel <= _MOST_TERMS and (conv.groups > 1 or not is_gradient):
        return _per_channel  # groups: 20 to 200 times; one input channel: 1.2 to 35 times
    if conv.groups == 1 and is_gradient and places <= _MOST_TERMS:
        is_pointwise, is_transposed = places == 1, max(conv.params["lhs_dilation"]) > 1
        if is_pointwise or is_transposed or rank > 2:  # 1.6 to 2.7, 4 to 5, 1.9 to 4.4 times
            return _per_place
    if conv.groups == 1 and rank > 2:  # 1.8 to 27 times
        if is_gradient or kernel > _MOST_TERMS:
            return None
        return _gathered if conv.channels <= conv.features else _scattered
    return _layout_of(conv)


def _layout_of(conv: _Convolution) -> _Form | None:
    """Returns how to compute it in a faster layout; `None` if XLA changes the layout itself.

    XLA does so outside loops and branches only: inside, 7 to 90 times with channels as groups, 34
    to 47 times otherwise.
    """
    rank = len(conv.kernel)
    is_last = (conv.lhs, conv.rhs, conv.out) == _last_of(rank + 1)
    # With padding of both signs, XLA's kernel reads outside the input (JAX 0.10.2, not 0.12.0.1).
    is_cut = any(low < 0 or high < 0 for low, high, _ in conv.ends)
    return None if is_last or is_cut or rank > 2 else _channels_last


def _convolution(eqn: JaxprEqn) -> Rule | None:
    conv = _Convolution(eqn, eqn.params, [atom.aval for atom in (*eqn.invars, *eqn.outvars)])
    form = _form_of(conv)
    return None if form is None else lambda _, arguments: [form(conv, *arguments)]


RULES: Rules = {"conv_general_dilated": _convolution}
