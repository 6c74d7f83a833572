"""Rewrites sums over the replicas of a device, so that gradients are not computed per replica.

The gradient of a weight is a product that contracts the batch axis. Under `jax.vmap` over k
replicas it becomes k products, and the all-reduce becomes a sum over them:

    dw = einsum("kbi,kbo->kio", x, dy)    # k copies of the gradient
    total = dw.sum(0)

The sum equals one product that contracts replicas and batch together, which is what one device
computes for the whole batch: `einsum("kbi,kbo->io", x, dy)`. XLA does not merge the sum into the
contraction (JAX 0.10.2 and 0.12.0.1): it stores k copies of every gradient. So the sum is moved
into the operation that computes its operand. Each rule below has a worked example, in which k is
the number of replicas and `sum` is over the axis k.

Delete this module when XLA merges the contraction: then `assert holds_copies(plain, w, x)` fails in
tests/passes/test_vmap_sums.py. Measure pooling before you delete `_pool_as_one_batch`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from mirror._src.base.types import Array
from mirror._src.jaxprs.equations import called
from mirror._src.passes.callbacks import CallbackGuard
from mirror._src.passes.evaluate import Lowering, at_line_of

_INLINED = ("jit", "closed_call")
_BARRIER = "optimization_barrier"


def evaluate(
    program: ClosedJaxpr,
    inputs: Sequence[Any],
    guard: CallbackGuard | None = None,
    pack_bytes: int = 0,
) -> list[Any]:
    """Evaluates a program with its sums over replicas rewritten. XLA removes what is then unused.

    Args:
        program: A program that was traced through `jax.vmap`, with the replicas as first axis.
        inputs: Its inputs.
        guard: Stores exceptions of host callbacks.
        pack_bytes: As for `Lowering`, for all-reduces across devices.
    """
    return _Sums(guard, pack_bytes).call(program, inputs)


class _Sums(Lowering):
    """Evaluation that records the operation that computed each value."""

    def __init__(self, guard: CallbackGuard | None, pack_bytes: int) -> None:
        super().__init__({}, guard.rules() if guard else {}, pack_bytes)
        self.made_by: dict[int, tuple[JaxprEqn, list[Any]]] = {}
        self._alive: list[Any] = []  # an `id` is unique only while its value is alive

    def apply(self, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        """See `Evaluation.apply`."""
        program = called(eqn) if eqn.primitive.name in _INLINED else None
        if program is not None:
            return self.call(program, arguments)
        if _is_sum_over_replicas(eqn):
            with at_line_of(eqn):
                return [self._sum(argument) for argument in arguments]
        if _is_pooling(eqn, arguments):
            with at_line_of(eqn), eqn.ctx.manager:
                outputs = [_pool_as_one_batch(eqn, arguments)]
        else:
            outputs = super().apply(eqn, arguments)
        if eqn.primitive.name == _BARRIER:
            for output, argument in zip(outputs, arguments, strict=True):
                self._record(output, eqn, [argument])
        elif len(outputs) == 1:
            self._record(outputs[0], eqn, arguments)
        return outputs

    def _record(self, value: Any, eqn: JaxprEqn, arguments: list[Any]) -> None:
        self.made_by[id(value)] = eqn, arguments
        self._alive.append(value)

    def _sum(self, value: Any) -> Any:
        total = self.merged_sum(value)
        return jax.lax.reduce_sum(value, (0,)) if total is None else total

    def merged_sum(self, value: Any) -> Any:
        """Returns the sum of a value if it can be merged into a product; otherwise `None`."""
        eqn, arguments = self.made_by.get(id(value), (None, []))
        if eqn is None:
            return None
        rule = _RULES.get(eqn.primitive.name)
        return None if rule is None else rule(self, eqn, arguments)


def _is_sum_over_replicas(eqn: JaxprEqn) -> bool:
    """Whether this is what `jax.vmap` makes of a `psum` over its axis: a `psum` over axis 0."""
    return (
        eqn.primitive.name == "psum"
        and tuple(eqn.params["axes"]) == (0,)
        and eqn.params.get("axis_index_groups") is None
    )


_POOLING = (
    "reduce_window_max",
    "reduce_window_min",
    "reduce_window_sum",
    "select_and_scatter_add",
)
_TRIVIAL_WINDOW = {
    "window_dimensions": 1,
    "window_strides": 1,
    "padding": (0, 0),
    "base_dilation": 1,
    "window_dilation": 1,
}


def _is_pooling(eqn: JaxprEqn, arguments: list[Any]) -> bool:
    """Whether an operation pools images: its windows span one replica and one example."""
    if eqn.primitive.name not in _POOLING:
        return False
    windows = {name: eqn.params[name][:2] for name in _TRIVIAL_WINDOW if name in eqn.params}
    same_batch = len({argument.shape[:2] for argument in arguments}) == 1
    return same_batch and all(
        tuple(value) == (_TRIVIAL_WINDOW[name],) * 2 for name, value in windows.items()
    )


def _pool_as_one_batch(eqn: JaxprEqn, arguments: list[Any]) -> Any:
    """Pools the examples of all replicas as one batch. XLA is slower with the extra axis.

    Images `(k, b, h, w, c)` are pooled as `(k * b, h, w, c)`.
    """
    params = {k: v[1:] if k in _TRIVIAL_WINDOW else v for k, v in eqn.params.items()}
    outer = arguments[0].shape[:2]
    pooled = eqn.primitive.bind(
        *[x.reshape(outer[0] * outer[1], *x.shape[2:]) for x in arguments], **params
    )
    return pooled.reshape(*outer, *pooled.shape[1:])


def _dot_general(_: _Sums, eqn: JaxprEqn, arguments: list[Any]) -> Array | None:
    """Contracts the replicas, which are the first batch axis of the product.

    `sum(einsum("kbi,kbo->kio", x, dy))` becomes `einsum("kbi,kbo->io", x, dy)`.
    """
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    if not left_batch:
        return None
    numbers = (
        ((left_batch[0], *left), (right_batch[0], *right)),
        (tuple(left_batch[1:]), tuple(right_batch[1:])),
    )
    return eqn.primitive.bind(*arguments, **{**eqn.params, "dimension_numbers": numbers})


def _transpose(run: _Sums, eqn: JaxprEqn, arguments: list[Any]) -> Array | None:
    """Sums first, then transposes.

    For `dw` of shape `(k, i, o)`, `sum(transpose(dw, (0, 2, 1)))` becomes
    `transpose(sum(dw), (1, 0))`. If the axis k is not the first one before the transpose, `dw` may
    be a kernel gradient, see `_kernel_gradient`.
    """
    axis, *others = eqn.params["permutation"]
    if axis == 0:
        total = run.merged_sum(arguments[0])
    else:
        split, operands = run.made_by.get(id(arguments[0]), (None, []))
        total = _kernel_gradient(run, split, operands, axis) if split and operands else None
    return None if total is None else jax.lax.transpose(total, [p - (p > axis) for p in others])


def _reshape(run: _Sums, eqn: JaxprEqn, arguments: list[Any]) -> Array | None:
    """Sums first, then reshapes.

    For `dw` of shape `(k, i, o)`, `sum(reshape(dw, (k, i * o)))` becomes
    `reshape(sum(dw), (i * o,))`. A reshape that splits off the axis k may belong to a kernel
    gradient, see `_kernel_gradient`.
    """
    sizes = eqn.params["new_sizes"]
    if eqn.params["dimensions"] is not None or sizes[:1] != jnp.shape(arguments[0])[:1]:
        return _kernel_gradient(run, eqn, arguments, 0)
    total = run.merged_sum(arguments[0])
    return None if total is None else total.reshape(sizes[1:])


def _kernel_gradient(run: _Sums, split: JaxprEqn, operands: list[Any], axis: int) -> Array | None:
    """Merges the feature groups of a convolution whose output is then split by group, and summed.

    `jax.vmap` turns k convolutions into one with `feature_group_count=k`. Its output has k * f
    features, which `split` reshapes to the axes `(k, f)` at position `axis`. Group j computes
    `conv(x[j], w[j])` from c input features. The sum over j is one convolution without groups, of
    all k * c input features: `conv(concatenate(x), concatenate(w))`. So a kernel with c input and
    k * f output features is rearranged to k * c input and f output features. For example, with
    k = 4, c = 3 and f = 6, a kernel `(3, 3, 3, 24)` in HWIO layout becomes `(3, 3, 12, 6)`.
    """
    product, factors = run.made_by.get(id(operands[0]), (None, []))
    if split.primitive.name != "reshape" or product is None:
        return None
    if product.primitive.name != "conv_general_dilated":
        return None
    numbers = product.params["dimension_numbers"]
    sizes, before = split.params["new_sizes"], jnp.shape(operands[0])
    if len(sizes) != len(before) + 1 or axis >= len(before):
        return None
    count, features = sizes[axis : axis + 2]
    if (
        product.params["feature_group_count"] != count
        or product.params["batch_group_count"] != 1
        or split.params["dimensions"] is not None
        or numbers.out_spec[1] != axis
        or tuple(sizes) != (*before[:axis], count, features, *before[axis + 1 :])
    ):
        return None
    out_features, in_features = numbers.rhs_spec[:2]
    kernel = factors[1]
    shape = list(kernel.shape)
    shape[out_features : out_features + 1] = [count, features]
    kernel = kernel.reshape(shape)
    target = in_features + (in_features > out_features)
    # The input features of group 0 come first, then group 1, as in the left operand.
    order = [i for i in range(kernel.ndim) if i != out_features]
    order.insert(order.index(target), out_features)
    kernel = jax.lax.transpose(kernel, order)
    merged = list(factors[1].shape)
    merged[out_features] = features
    merged[in_features] *= count
    return product.primitive.bind(
        factors[0], kernel.reshape(merged), **{**product.params, "feature_group_count": 1}
    )


def _barrier(run: _Sums, _: JaxprEqn, arguments: list[Any]) -> Array | None:
    """Drops the barrier: `sum(optimization_barrier(dw))` becomes `sum(dw)`.

    The barrier keeps XLA from fusing small arrays with their packing. Products are not packed.
    """
    return run.merged_sum(arguments[0])


def _concatenate(run: _Sums, eqn: JaxprEqn, arguments: list[Any]) -> Array | None:
    """Sums the parts of a packed buffer separately.

    For `a` of shape `(k, m)` and `b` of shape `(k, n)`, `sum(concatenate([a, b], 1))` becomes
    `concatenate([sum(a), sum(b)], 0)`.
    """
    dimension = eqn.params["dimension"]
    merged = list(map(run.merged_sum, arguments))
    if not dimension or all(total is None for total in merged):
        return None
    sums = [
        jax.lax.reduce_sum(argument, (0,)) if total is None else total
        for total, argument in zip(merged, arguments, strict=True)
    ]
    return jax.lax.concatenate(sums, dimension - 1)


_RULES: dict[str, Callable[[_Sums, JaxprEqn, list[Any]], Array | None]] = {
    "dot_general": _dot_general,
    "transpose": _transpose,
    "reshape": _reshape,
    "concatenate": _concatenate,
    _BARRIER: _barrier,
}
