"""The optimizer of a `Trainer`: passed by the user, or created from an optax transformation."""

import inspect
from collections.abc import Callable
from typing import Any

import optax
from flax import nnx

from mirror._src.base.errors import describe, expected
from mirror._src.base.types import Array, PyTree
from mirror._src.training.mistakes import require_transformation


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


def update(
    optimizer: nnx.Optimizer[Any], model: nnx.Module, gradients: PyTree, loss: Array
) -> None:
    """Makes an update. A transformation that accepts `value` receives the loss.

    Raises:
        Exception: What the transformation raises, with a note on what it receives.
    """
    value = _value_for(optimizer, loss)
    try:
        optimizer.update(model, gradients, **value)
    except Exception as error:
        error.add_note(
            "The update of the optimizer has raised this. mirror.Trainer passes the gradients, the "
            "parameters and, as `value`, the loss. For an optimizer that needs more, such as a "
            "line search, write the step and call strategy.run(step, args)."
        )
        raise


def _value_for(optimizer: nnx.Optimizer[Any], loss: Array) -> dict[str, Array]:
    """Returns the loss as the argument `value` of an optimizer's update, if it accepts one.

    Optax passes it to transformations that need it, such as `optax.contrib.reduce_on_plateau`.
    """
    tx = getattr(optimizer, "tx", None)  # a parameter server has the transformation
    if not isinstance(tx, optax.GradientTransformationExtraArgs):
        return {}
    is_accepted = _accepts_value(optimizer.update) and _accepts_value(tx.update)
    return {"value": loss} if is_accepted else {}


def _accepts_value(update: Callable[..., Any]) -> bool:
    parameters = inspect.signature(update).parameters
    has_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return has_more or "value" in parameters
