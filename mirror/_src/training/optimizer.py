"""The optimizer of a `Trainer`: passed by the user, or created from an optax transformation."""

from typing import Any

import optax
from flax import nnx

from mirror._src.training.mistakes import require_transformation
from mirror._src.utils.errors import describe, expected


def make_optimizer(
    model: nnx.Module, tx: optax.GradientTransformation | nnx.Optimizer[Any], wrt: Any
) -> nnx.Optimizer[Any]:
    """Returns the `nnx.Optimizer` of a model.

    Raises:
        TypeError: If `tx` is neither an optax transformation nor an `nnx.Optimizer`, or it is an
            `nnx.ModelAndOptimizer`.
        ValueError: If `wrt` is passed together with an `nnx.Optimizer`.
    """
    if isinstance(tx, nnx.ModelAndOptimizer):
        fix = "Pass optax.adam(1e-3), or nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)."
        raise TypeError(expected("tx", tx, "an optimizer without the model", fix))
    if isinstance(tx, nnx.Optimizer):
        if wrt is not None:
            raise ValueError(
                f"`wrt` ({describe(wrt)}) cannot be combined with an nnx.Optimizer, which already "
                f"has wrt={describe(tx.wrt)}. Omit wrt."
            )
        return tx
    require_transformation(tx)
    return nnx.Optimizer(model, tx, wrt=nnx.Param if wrt is None else wrt)
