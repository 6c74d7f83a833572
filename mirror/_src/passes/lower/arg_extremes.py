"""`argmax` and `argmin` on CPUs: two reductions that XLA vectorizes.

XLA:CPU reduces pairs of value and index one by one, which takes 1.6 to 7 times as long (JAX 0.10.2
and 0.12.0.1, float32). The results are equal.

Delete this module when `tests/passes/test_lower_speed.py` says so.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

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


RULES: Rules = {
    "argmax": _arg_extreme(lax.reduce_max),
    "argmin": _arg_extreme(lax.reduce_min),
}
