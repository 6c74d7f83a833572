"""Sums over the rows of a vmapped program, taken where the rows are computed.

A gradient of a replica's batch is a product that contracts the batch. Under `jax.vmap` there is one
such product for each row, written out and then summed up: k copies of every gradient. But the sum
of the products is one product that contracts rows and batch together, as one device does it with
the whole batch. XLA does not see that (JAX 0.10.2, 0.12.0.1), so it is rewritten here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from mirror._src.executors.callbacks import CallbackGuard
from mirror._src.program.evaluate import Lowering, at_line_of
from mirror._src.program.jaxprs import called
from mirror._src.utils.types import Array

_INLINED = ("jit", "closed_call")
_BARRIER = "optimization_barrier"


def evaluate(
    program: ClosedJaxpr,
    inputs: Sequence[Any],
    guard: CallbackGuard | None = None,
    pack_bytes: int = 0,
) -> list[Any]:
    """Evaluates a program with its sums over rows rewritten; XLA omits what is then unused.

    Args:
        program: A program of the rows of a `jax.vmap`.
        inputs: Its inputs.
        guard: Keeps what its host callbacks raise.
        pack_bytes: As of `Lowering`, for all-reduces among devices.
    """
    return _Sums(guard, pack_bytes).call(program, inputs)


class _Sums(Lowering):
    """One evaluation, which remembers the operation that made each value."""

    def __init__(self, guard: CallbackGuard | None, pack_bytes: int) -> None:
        super().__init__({}, guard.rules if guard else {}, pack_bytes)
        self.made_by: dict[int, tuple[JaxprEqn, list[Any]]] = {}
        self._kept: list[Any] = []  # an id is one value's only while the value lives

    def apply(self, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        """See `Evaluation.apply`."""
        program = called(eqn) if eqn.primitive.name in _INLINED else None
        if program is not None:
            return self.call(program, arguments)
        if _sums_rows(eqn):
            with at_line_of(eqn):
                return [self._sum(argument) for argument in arguments]
        if _slides_over_rows(eqn, arguments):
            with at_line_of(eqn), eqn.ctx.manager:  # what the user's contexts around it said
                outputs = [_windows(eqn, arguments)]
        else:
            outputs = super().apply(eqn, arguments)
        if eqn.primitive.name == _BARRIER:
            for output, argument in zip(outputs, arguments, strict=True):
                self._remember(output, eqn, [argument])
        elif len(outputs) == 1:
            self._remember(outputs[0], eqn, arguments)
        return outputs

    def _remember(self, value: Any, eqn: JaxprEqn, arguments: list[Any]) -> None:
        self.made_by[id(value)] = eqn, arguments
        self._kept.append(value)

    def _sum(self, value: Any) -> Any:
        pushed = self.pushed(value)
        return jax.lax.reduce_sum(value, (0,)) if pushed is None else pushed

    def pushed(self, value: Any) -> Any:
        """The sum over rows of a value that is made by a product; `None` where it is not."""
        eqn, arguments = self.made_by.get(id(value), (None, []))
        if eqn is None:
            return None
        rule = _RULES.get(eqn.primitive.name)
        return None if rule is None else rule(self, eqn, arguments)


def _sums_rows(eqn: JaxprEqn) -> bool:
    """What `psum` over the axis of a `jax.vmap` becomes: one over the first axis."""
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
_OF_WINDOWS = {
    "window_dimensions": 1,
    "window_strides": 1,
    "padding": (0, 0),
    "base_dilation": 1,
    "window_dilation": 1,
}


def _slides_over_rows(eqn: JaxprEqn, arguments: list[Any]) -> bool:
    """Whether it pools images: windows that are one row and one example wide."""
    if eqn.primitive.name not in _POOLING:
        return False
    found = {name: eqn.params[name][:2] for name in _OF_WINDOWS if name in eqn.params}
    alike = len({argument.shape[:2] for argument in arguments}) == 1
    return alike and all(tuple(v) == (_OF_WINDOWS[name],) * 2 for name, v in found.items())


def _windows(eqn: JaxprEqn, arguments: list[Any]) -> Any:
    """Pools the examples of all rows as one batch: XLA is slower with one axis more."""
    params = {k: v[1:] if k in _OF_WINDOWS else v for k, v in eqn.params.items()}
    outer = arguments[0].shape[:2]
    pooled = eqn.primitive.bind(
        *[x.reshape(outer[0] * outer[1], *x.shape[2:]) for x in arguments], **params
    )
    return pooled.reshape(*outer, *pooled.shape[1:])


def _dot_general(_: _Sums, eqn: JaxprEqn, arguments: list[Any]) -> Array | None:
    """Rows are the first of the axes that a product goes along; now it contracts them too."""
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    if not left_batch:
        return None
    numbers = (
        ((left_batch[0], *left), (right_batch[0], *right)),
        (tuple(left_batch[1:]), tuple(right_batch[1:])),
    )
    return eqn.primitive.bind(*arguments, **{**eqn.params, "dimension_numbers": numbers})


def _transpose(run: _Sums, eqn: JaxprEqn, arguments: list[Any]) -> Array | None:
    rows, *others = eqn.params["permutation"]
    if rows == 0:
        inner = run.pushed(arguments[0])
    else:
        split, operands = run.made_by.get(id(arguments[0]), (None, []))
        inner = _kernel_gradient(run, split, operands, rows) if split and operands else None
    return None if inner is None else jax.lax.transpose(inner, [p - (p > rows) for p in others])


def _reshape(run: _Sums, eqn: JaxprEqn, arguments: list[Any]) -> Array | None:
    sizes = eqn.params["new_sizes"]
    if eqn.params["dimensions"] is not None or sizes[:1] != jnp.shape(arguments[0])[:1]:
        return _kernel_gradient(run, eqn, arguments, 0)
    inner = run.pushed(arguments[0])
    return None if inner is None else inner.reshape(sizes[1:])


def _kernel_gradient(run: _Sums, split: JaxprEqn, operands: list[Any], rows: int) -> Array | None:
    """A convolution with a group of features for each row, which are then split off as an axis.

    The sum over that axis is one convolution, over the features of all groups.
    """
    product, factors = run.made_by.get(id(operands[0]), (None, []))
    if split.primitive.name != "reshape" or product is None:
        return None
    if product.primitive.name != "conv_general_dilated":
        return None
    numbers = product.params["dimension_numbers"]
    sizes, before = split.params["new_sizes"], jnp.shape(operands[0])
    if len(sizes) != len(before) + 1 or rows >= len(before):
        return None
    count, features = sizes[rows : rows + 2]
    if (
        product.params["feature_group_count"] != count
        or product.params["batch_group_count"] != 1
        or split.params["dimensions"] is not None
        or numbers.out_spec[1] != rows
        or tuple(sizes) != (*before[:rows], count, features, *before[rows + 1 :])
    ):
        return None
    out_features, in_features = numbers.rhs_spec[:2]
    kernel = factors[1]
    shape = list(kernel.shape)
    shape[out_features : out_features + 1] = [count, features]
    kernel = kernel.reshape(shape)
    target = in_features + (in_features > out_features)
    # The features of a group lie together, those of the first group first.
    order = [axis for axis in range(kernel.ndim) if axis != out_features]
    order.insert(order.index(target), out_features)
    kernel = jax.lax.transpose(kernel, order)
    merged = list(factors[1].shape)
    merged[out_features] = features
    merged[in_features] *= count
    return product.primitive.bind(
        factors[0], kernel.reshape(merged), **{**product.params, "feature_group_count": 1}
    )


def _barrier(run: _Sums, _: JaxprEqn, arguments: list[Any]) -> Array | None:
    """It keeps XLA from fusing what is packed into one buffer; there is no packing of products."""
    return run.pushed(arguments[0])


def _concatenate(run: _Sums, eqn: JaxprEqn, arguments: list[Any]) -> Array | None:
    """Small arrays that are reduced in one buffer: each is summed where it is computed."""
    dimension = eqn.params["dimension"]
    inner = [run.pushed(argument) for argument in arguments]
    if not dimension or all(each is None for each in inner):
        return None
    sums = [
        jax.lax.reduce_sum(argument, (0,)) if each is None else each
        for each, argument in zip(inner, arguments, strict=True)
    ]
    return jax.lax.concatenate(sums, dimension - 1)


_RULES: dict[str, Callable[[_Sums, JaxprEqn, list[Any]], Array | None]] = {
    "dot_general": _dot_general,
    "transpose": _transpose,
    "reshape": _reshape,
    "concatenate": _concatenate,
    _BARRIER: _barrier,
}
