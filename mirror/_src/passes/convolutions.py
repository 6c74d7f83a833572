"""Convolutions on CPUs for which XLA has no fast kernel: sums of slices, products, smaller ones.

XLA:CPU has a fast kernel (Eigen's) for dense convolutions of one or two dimensions; it computes
groups, three dimensions and some kernel gradients in scalar loops (JAX 0.10.2 and 0.12.0.1,
float32). The comments in `_form_of` give the ratio of the times. Sums are rounded in another order:
results differ by at most 1e-6 of the largest one.

Delete a form when `tests/passes/test_lower_speed.py` says so.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import JaxprEqn

from mirror._src.passes.evaluate import Rule, Rules, bind

_MOST_TERMS = 125  # each is a few operations
_MOST_GROUPS = 64
_MOST_FEATURES = 16  # of one input channel: from 32, XLA is as fast, or faster
_PER_DIMENSION = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
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
        return _pad(x, self.ends)

    def examples_first(self, x: Any, w: Any) -> tuple[Any, Any]:
        """Returns (C, *S, N) with its padding and (I, *K, O), which a kernel's gradient has."""
        (n, c, *s), (o, i, *k) = self.lhs, self.rhs
        return self.padded(_move(x, (c, *s, n))), _move(w, (i, *k, o))


def _pad(x: Any, ends: Sequence[tuple[int, int, int]]) -> Any:
    """Returns an array (N, *S, C) with padding in space."""
    zero = np.zeros((), x.dtype)
    *others, (low, high, inner), _ = ends
    if inner or not any(map(any, ends)):
        return lax.pad(x, zero, ends) if inner else x
    # LLVM unrolls a short loop over channels, which takes up to a tenth of a second.
    flat, c = lax.collapse(x, x.ndim - 2), x.shape[-1]
    flat = lax.pad(flat, zero, [*others, (low * c, high * c, 0)])
    return lax.reshape(flat, (*flat.shape[:-1], flat.shape[-1] // c, c))


def _move(x: Any, order: Sequence[int]) -> Any:
    return x if list(order) == list(range(x.ndim)) else lax.transpose(x, order)


def _part(
    x: Any, place: Sequence[int], steps: Sequence[int], strides: Sequence[int], sizes: Sequence[int]
) -> Any:
    start = [i * d for i, d in zip(place, steps, strict=True)]
    stop = [a + s * (n - 1) + 1 for a, s, n in zip(start, strides, sizes, strict=True)]
    return lax.slice(x, [0, *start, 0], [x.shape[0], *stop, x.shape[-1]], [1, *strides, 1])


def _per_channel(conv: _Convolution, x: Any, w: Any) -> Any:
    """Each feature depends on one channel: products and sums, without a contraction."""
    repeats = conv.features // conv.groups if conv.groups > 1 else 1

    def sums(x: Any, w: Any) -> Any:
        x = conv.padded(x if repeats == 1 else jnp.repeat(x, repeats, x.ndim - 1))
        ones = [1] * math.prod(conv.kernel)
        kernels = lax.split(lax.reshape(w, (len(ones), *[1] * len(conv.kernel), w.shape[-1])), ones)
        sizes = conv.steps, conv.strides, conv.places
        parts = (_part(x, place, *sizes) for place in np.ndindex(*conv.kernel))
        return functools.reduce(lax.add, map(lax.mul, parts, kernels))

    # Otherwise, XLA computes the sums again in each operation that reads them.
    with set_xla_metadata(inlineable="false"):
        return conv.result(jax.jit(sums)(conv.x(x), conv.w(w)))


def _per_channel_kernel(conv: _Convolution, x: Any, w: Any) -> Any:
    """Gradient of such a kernel: sums over positions, then examples, of one product after another.

    All products at once would take as much memory as the image for each position of the kernel.
    """
    x, w = conv.examples_first(x, w)
    starts = np.array([*np.ndindex(*conv.places)]) * conv.strides
    reach = [s * (n - 1) + 1 for n, s in zip(conv.kernel, conv.steps, strict=True)]
    shape = w.shape[0], math.prod(conv.kernel), conv.features

    def sums(start: Any) -> Any:
        part = lax.dynamic_slice(x, [0, *start, 0], [shape[0], *reach, conv.features])
        part = lax.slice(part, [0] * x.ndim, part.shape, [1, *conv.steps, 1])
        product = lax.collapse(part, x.ndim - 2) * lax.collapse(w, x.ndim - 2)
        return lax.reduce_sum(lax.reshape(product, shape), (1,))

    total = lax.reduce_sum(lax.map(sums, starts), (1,))
    return conv.result(lax.reshape(total, (1, *conv.places, conv.features)))


def _each(conv: _Convolution, changes: Any, pairs: Any, shape: tuple[int, ...]) -> list[Any]:
    """Computes convolutions with other parameters, of operands with the channels last."""
    numbers, y = _last_of(len(shape) - 1), conv.avals[2].update(shape=shape)
    params = {**conv.params, "dimension_numbers": numbers, **changes}
    convs = ((_Convolution(conv.eqn, params, [x, w, y]), x, w) for x, w in pairs)
    return [(_form_of(each) or _unchanged)(each, x, w) for each, x, w in convs]


def _per_group(conv: _Convolution, x: Any, w: Any) -> Any:
    """One convolution per group."""
    count, last = conv.groups * conv.batch_groups, len(conv.kernel) + 1
    xs = jnp.split(conv.x(x), count, last if conv.groups > 1 else 0)
    pairs = zip(xs, jnp.split(conv.w(w), count, last), strict=True)
    changes = {"feature_group_count": 1, "batch_group_count": 1}
    shape = (conv.batch // conv.batch_groups, *conv.places, conv.features // count)
    return conv.result(lax.concatenate(_each(conv, changes, pairs, shape), last))


def _in_planes(conv: _Convolution, x: Any, w: Any) -> Any:
    """Convolutions without the first dimension of space."""
    rank, x, w = len(conv.kernel), conv.x(x), conv.w(w)
    x = _pad(x, [(0, 0, 0), conv.ends[1], *[(0, 0, 0)] * rank])
    (depth, *_), (places, *rest) = conv.kernel, conv.places
    stride, step = conv.strides[0], conv.steps[0]
    changes = {name: conv.params[name][1:] for name in _PER_DIMENSION}

    def planes(start: int, step: int, count: int) -> Any:
        return lax.slice_in_dim(x, start, start + step * (count - 1) + 1, step, 1)

    if depth > places:  # a kernel's gradient: planes as channels
        parts = (jnp.moveaxis(planes(i * stride, step, depth), 1, -2) for i in range(places))
        w = lax.collapse(jnp.moveaxis(w, 0, -3), rank - 1, rank + 1)
        pairs = ((lax.collapse(part, rank, rank + 2), w) for part in parts)
        shape = conv.batch, *rest, conv.features
        return conv.result(jnp.stack(_each(conv, changes, pairs, shape), 1))
    parts = (planes(i * step, stride, places) for i in range(depth))  # planes as examples
    pairs = ((lax.collapse(part, 0, 2), each) for part, each in zip(parts, w, strict=True))
    shape = conv.batch * places, *rest, conv.features
    total = functools.reduce(lax.add, _each(conv, changes, pairs, shape))
    return conv.result(lax.reshape(total, (conv.batch, *conv.places, conv.features)))


def _per_place(conv: _Convolution, x: Any, w: Any) -> Any:
    """One product per position of the result, which also contracts the kernel's positions."""
    x, w = conv.examples_first(x, w)
    kernel = lax.reshape(w, (w.size // conv.features, conv.features))
    precision, dtype = conv.params["precision"], conv.params["preferred_element_type"]

    def product(place: Sequence[int]) -> Any:
        part = _part(x, place, conv.strides, conv.steps, conv.kernel)
        part = lax.reshape(part, (kernel.shape[0], conv.batch))
        numbers = (((0,), (0,)), ((), ()))
        return lax.dot_general(part, kernel, numbers, precision, preferred_element_type=dtype)

    products = [*map(product, np.ndindex(*conv.places))]
    shape = (conv.batch, *conv.places, conv.features)
    return conv.result(lax.reshape(jnp.stack(products, 1), shape))


def _channels_last(conv: _Convolution, x: Any, w: Any) -> Any:
    """XLA's convolution, in the layout of its fast kernel."""
    params = {**conv.params, "dimension_numbers": _last_of(len(conv.kernel) + 1)}
    return conv.result(bind(conv.eqn, [conv.x(x), conv.w(w)], **params)[0])


def _last_of(last: int) -> lax.ConvDimensionNumbers:
    """Returns the positions of batch, channels and space in the layout with the channels last."""
    around = (0, last, *range(1, last))
    return lax.ConvDimensionNumbers(around, (last, last - 1, *range(last - 1)), around)


def _unchanged(conv: _Convolution, x: Any, w: Any) -> Any:
    return bind(conv.eqn, [x, w], **conv.params)[0]


_Form: TypeAlias = Callable[[_Convolution, Any, Any], Any]


def _form_of(conv: _Convolution) -> _Form | None:
    """Returns how to compute a convolution faster than XLA; `None` if it is fast enough."""
    if not all(aval.dtype in _FLOATS and aval.size for aval in conv.avals):
        return None
    if any(low < 0 < high for low, high, _ in conv.ends):
        return None  # XLA's fast kernel reads outside the input (JAX 0.10.2, not 0.12.0.1)
    if not all(aval.dtype == jnp.float32 for aval in conv.avals):
        return _layout_of(conv) if conv.groups == 1 else None
    kernel, places, rank = math.prod(conv.kernel), math.prod(conv.places), len(conv.kernel)
    is_gradient = kernel > places  # of a kernel: it slides the gradient of the result
    if conv.batch_groups > 1:  # the gradient of a kernel with groups: 50 to 490 times
        if conv.batch == conv.batch_groups == conv.features:
            return _per_channel_kernel  # XLA multiplies all channels with each other. 2 to 9 times
        return _per_group if conv.batch_groups <= _MOST_GROUPS else None
    if conv.groups > 1 and is_gradient and conv.inner > 1:  # the same under `jax.vmap`
        return _per_group if conv.groups <= _MOST_GROUPS else None
    if conv.groups == 1 and rank > 2:  # 1.6 to 58 times
        return _in_planes if min(conv.kernel[0], conv.places[0]) <= _MOST_TERMS else None
    is_narrow = conv.features <= _MOST_FEATURES and not is_gradient
    if conv.inner == 1 and kernel <= _MOST_TERMS and (conv.groups > 1 or is_narrow):
        return _per_channel  # groups: 20 to 200 times; one input channel: 2 to 35 times
    is_special = places == 1 or max(conv.params["lhs_dilation"], default=1) > 1
    if conv.groups == 1 and is_gradient and is_special and places <= _MOST_TERMS:
        return _per_place  # of 1x1 and of transposed convolutions: 1.6 to 2.7, 4 to 5 times
    return _layout_of(conv)


def _layout_of(conv: _Convolution) -> _Form | None:
    """Returns how to compute it in a faster layout; `None` if XLA changes the layout itself.

    XLA does so outside loops and branches only: inside, 7 to 90 times with channels as groups, 34
    to 47 times otherwise.
    """
    rank = len(conv.kernel)
    is_last = conv.params["dimension_numbers"] == _last_of(rank + 1)
    return None if is_last or rank > 2 else _channels_last


def _convolution(eqn: JaxprEqn) -> Rule | None:
    conv = _Convolution(eqn, eqn.params, [atom.aval for atom in (*eqn.invars, *eqn.outvars)])
    form = _form_of(conv)
    return None if form is None else lambda _, arguments: [form(conv, *arguments)]


RULES: Rules = {"conv_general_dilated": _convolution}
