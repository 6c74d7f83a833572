"""The optimizer of a `Trainer`: the user's own, or one that is made of an optax transformation."""

from typing import Any

import optax
from flax import nnx

from mirror._src.utils.errors import describe


def make_optimizer(
    model: nnx.Module, tx: optax.GradientTransformation | nnx.Optimizer[Any], wrt: Any
) -> nnx.Optimizer[Any]:
    """Returns the `nnx.Optimizer` of a model.

    Raises:
        TypeError: `tx` is no optax transformation and no `nnx.Optimizer`.
        ValueError: an `nnx.Optimizer` together with `wrt`.
    """
    if isinstance(tx, nnx.Optimizer):
        if wrt is not None:
            raise ValueError(
                f"wrt={describe(wrt)} was passed with an nnx.Optimizer, which has its own: "
                f"{describe(tx.wrt)}. Leave wrt out."
            )
        return tx
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"tx={describe(tx)} is no optax transformation and no nnx.Optimizer. Pass one: "
            "optax.adam(1e-3)."
        )
    return nnx.Optimizer(model, tx, wrt=nnx.Param if wrt is None else wrt)
