"""Evaluation of a staged program on a device that computes its replicas together, by `jax.vmap`.

The gradient of a weight is a product that contracts the batch axis. Under `jax.vmap` over k
replicas it becomes k products, and the all-reduce becomes a sum over them:

    dw = einsum("kbi,kbo->kio", x, dy)    # k copies of the gradient
    total = dw.sum(0)

The sum equals one product that contracts replicas and batch together, which is what one device
computes for the whole batch: `einsum("kbi,kbo->io", x, dy)`. XLA does not merge the sum into the
contraction (JAX 0.10.2 and 0.12.0.1): it stores k copies of every gradient. Delete `_PRODUCTS` when
it does: then `assert holds_copies(plain, w, x)` fails in tests/passes/test_vectorized.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from mirror._src.base.types import Array
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.jaxprs.collective_eqns import positive_zero, reduce_locally
from mirror._src.passes.collective_rules import Reduction, sum_of_parts
from mirror._src.passes.evaluate import Rule, Rules, at_line_of, bind_with
from mirror._src.passes.lower.table import lowered
from mirror._src.passes.program import Atom, Value, values_of
from mirror._src.passes.staging.ir import Collective, Computation
from mirror._src.passes.staging.on_device import OfReplica, OnDevice, Values
from mirror._src.passes.staging.schedule import drop_unused

CALLED_SEQUENTIALLY: Rules = {
    "pure_callback": lambda eqn: None if eqn.params["vmap_method"] else _call_sequentially
}
"""Each replica calls its function separately, as with one replica per device."""


def _call_sequentially(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    return bind_with(eqn, arguments, {**eqn.params, "vmap_method": "sequential"})


def vectorized(fn: Callable[..., Any], rules: Rules) -> Callable[..., Any]:
    """Returns a function that uses `jax.vmap`, whose operations are replaced afterwards."""

    def run(*leaves: Any) -> Any:
        try:
            return lowered(lowered(fn, _POOLING), rules)(*leaves)
        except Exception as error:
            # JAX raises `Exception` itself for a callback in a loop of each replica's own rounds.
            if type(error) is not Exception and not isinstance(error, _OF_VMAP):
                raise
            raise NotImplementedError(
                "This step cannot run with several replicas per device, which relies on "
                f"jax.vmap: {str(error).rstrip('.')}. Use one replica per device, or rewrite "
                "the operation."
            ) from error

    return run


_OF_VMAP = (NotImplementedError, AssertionError, NameError, ValueError)
_SIZES = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
_TRIVIAL: dict[str, Any] = {**dict.fromkeys(_SIZES, 1), "padding": (0, 0)}


def _pooling(eqn: JaxprEqn) -> Rule | None:
    """Returns a rule if images are pooled: windows span one replica and one example."""
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    windows = {name: eqn.params[name][:2] for name in _TRIVIAL if name in eqn.params}
    are_trivial = all(tuple(two) == (_TRIVIAL[name],) * 2 for name, two in windows.items())
    return _pool if are_trivial and len({aval.shape[:2] for aval in avals}) == 1 else None


def _pool(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    """Pools the examples of all replicas as one batch: XLA is slower with the extra axis."""
    params = {k: v[1:] if k in _TRIVIAL else v for k, v in eqn.params.items()}
    k, b, *_ = arguments[0].shape
    batches = [x.reshape(k * b, *x.shape[2:]) for x in arguments]
    return [pooled.reshape(k, b, *pooled.shape[1:]) for pooled in bind_with(eqn, batches, params)]


_POOLING: Rules = dict.fromkeys(
    ("reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_scatter_add"),
    _pooling,
)


class Vectorized(OnDevice):
    """Computes the replicas of a device together.

    Args:
        replicas: Devices of the replicas.
        arrays: As for `OnDevice`.
        reduction: Reduces the replicas' operands in place of XLA, unless it is None.
    """

    def __init__(
        self, replicas: ReplicaDevices, arrays: Mapping[int, Any], reduction: Reduction | None
    ) -> None:
        super().__init__(replicas, arrays)
        self._reduction = reduction

    def each(self, one: OfReplica, rows: Mapping[Value, Any], kept: Sequence[Any]) -> list[Any]:
        """See `OnDevice.each`."""
        del kept
        ids = self._first + jnp.arange(self._per_device, dtype=jnp.int32)
        run = lambda i, mine: one(dict(zip(rows, mine, strict=True)).__getitem__, i)  # noqa: E731
        return jax.vmap(run)(ids, list(rows.values()))

    def computed(
        self, steps: list[Computation], values: Values, needed: set[Value], sums: list[Collective]
    ) -> list[Any]:
        """See `OnDevice.computed`."""
        makers: dict[Atom, Computation] = {}
        if self._reduction is None:
            makers = {step.outputs[0]: step for step in steps if len(step.outputs) == 1}
        totals = [self._sum(step.operand, values, makers) for step in sums]
        wanted = {*needed, *(value for sources, _ in totals for value in values_of(sources))}
        kept = [step for step in drop_unused(steps, [*wanted]) if isinstance(step, Computation)]
        made = [value for step in kept for value in step.outputs if value in wanted]
        one, rows = self.function(kept, values, made)
        values.rows.update(zip(made, self.each(one, rows, []), strict=True))
        if self._reduction is not None:
            operands = [self.gather(self.rows_of(step.operand, values)) for step in sums]
            return [self.reduced(*pair) for pair in zip(sums, operands, strict=True)]
        results = [total() for _, total in totals]
        return list(map(self._over_devices, sums, results))

    def _sum(
        self, atom: Atom, values: Values, makers: Mapping[Atom, Computation]
    ) -> tuple[Sequence[Atom], Callable[[], Array]]:
        """Returns the values that a sum over the replicas of this device reads, and the sum."""
        maker = makers.get(atom)
        if maker is not None and maker.moves:
            parts = [self._sum(each, values, makers) for each in maker.inputs]
            sources = [value for sources, _ in parts for value in sources]
            return sources, lambda: maker.run(*(total() for _, total in parts))[0]
        merged = None
        if maker is not None and maker.eqn is not None:
            merged = _PRODUCTS.get(maker.eqn.primitive.name, lambda _: None)(maker.eqn)
        if maker is not None and merged is not None and not any(map(values.is_once, maker.inputs)):
            factors = maker.inputs
            return factors, lambda: merged(*(self.rows_of(each, values) for each in factors))
        return [atom], lambda: reduce_locally("psum", self.rows_of(atom, values), (0,))

    def _over_devices(self, step: Collective, total: Array) -> Array:
        if self._num_devices == 1:
            return total
        if len(step.lines) == 1:
            return sum_of_parts(lambda x: jax.lax.psum(x, self._axis), total)
        barrier = jax.lax.optimization_barrier  # as in `evaluate`, around a pack
        return barrier(jax.lax.psum(barrier(total), self._axis))

    def reduced(self, step: Collective, rows: Array, primitive: str = "psum") -> Array:
        """See `OnDevice.reduced`."""
        if self._reduction is None:
            return super().reduced(step, rows, primitive)
        if rows.dtype == jnp.bool_:
            return self.reduced(step, rows.astype(jnp.uint8), primitive).astype(jnp.bool_)
        result = self._reduction(primitive, rows, step.description)
        return result if primitive == "psum" else positive_zero(result)

    def extreme(self, step: Collective, rows: Array) -> Array:
        """See `OnDevice.extreme`."""
        if self._reduction is None:
            return super().extreme(step, rows)
        return self.reduced(step, self.gather(rows), step.primitive)


def _dot_general(eqn: JaxprEqn) -> Callable[..., Array]:
    """Contracts the replicas, too: `einsum("kbi,kbo->io", x, dy)`."""
    contracted, batch = (
        [[axis + 1 for axis in axes] for axes in pair] for pair in eqn.params["dimension_numbers"]
    )
    numbers = tuple((0, *axes) for axes in contracted), tuple(map(tuple, batch))
    return lambda *rows: _bound(eqn, rows, {"dimension_numbers": numbers})


def _convolution(eqn: JaxprEqn) -> Callable[..., Array] | None:
    """Joins the input features of all replicas: a convolution is a sum over input features."""
    lhs, rhs, _ = eqn.params["dimension_numbers"]
    if eqn.params["feature_group_count"] > 1:  # which would join features of other groups
        return None
    return lambda x, w: _bound(eqn, (_joined(x, lhs[1]), _joined(w, rhs[1])), {})


def _joined(rows: Array, axis: int) -> Array:
    """Joins the rows along an axis."""
    count, *shape = rows.shape
    shape[axis] *= count
    return jnp.moveaxis(rows, 0, axis).reshape(shape)


def _bound(eqn: JaxprEqn, rows: Sequence[Array], params: dict[str, Any]) -> Array:
    with at_line_of(eqn):
        return bind_with(eqn, rows, {**eqn.params, **params})[0]


_PRODUCTS: dict[str, Callable[[JaxprEqn], Callable[..., Array] | None]] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
}
