"""Losses and metrics by their names in Keras, computed from logits, one value per example."""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import optax

from mirror._src.base.errors import describe, nearest
from mirror._src.base.types import Array

LossName: TypeAlias = Literal[
    "sparse_categorical_crossentropy",
    "categorical_crossentropy",
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "mean_squared_error",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_logarithmic_error",
    "huber",
    "log_cosh",
    "cosine_similarity",
    "mse",
    "mae",
    "mape",
    "msle",
    "bce",
]
Kind: TypeAlias = Literal["classes", "one-hot", "binary", "values"]
ValueFunction: TypeAlias = Callable[[Array, Array], Array]

ALIASES = {
    "mse": "mean_squared_error",
    "mae": "mean_absolute_error",
    "mape": "mean_absolute_percentage_error",
    "msle": "mean_squared_logarithmic_error",
    "bce": "binary_crossentropy",
}
_EPSILON = 1e-7  # of Keras


class Loss(NamedTuple):
    """A loss in the table.

    Attributes:
        fn: Function of outputs and labels whose first axis is the batch axis.
        kind: The kind of labels: classes, one-hot rows, zeros and ones, or values.
        line: How to write the loss in a function, for messages.
    """

    fn: ValueFunction
    kind: Kind
    line: str


def _percentage(outputs: Array, labels: Array) -> Array:
    return 100 * jnp.abs((labels - outputs) / jnp.maximum(jnp.abs(labels), _EPSILON))


def _squared_logarithm(outputs: Array, labels: Array) -> Array:
    logs = [jnp.log1p(jnp.maximum(x, _EPSILON)) for x in (outputs, labels)]
    return jnp.square(logs[0] - logs[1])


def _negative_cosine(outputs: Array, labels: Array) -> Array:
    return -optax.cosine_similarity(outputs, labels, epsilon=1e-12)


_SPARSE = "optax.softmax_cross_entropy_with_integer_labels"
LOSSES: dict[str, Loss] = {
    "sparse_categorical_crossentropy": Loss(
        optax.softmax_cross_entropy_with_integer_labels, "classes", f"{_SPARSE}(logits, labels)"
    ),
    "categorical_crossentropy": Loss(
        optax.softmax_cross_entropy, "one-hot", "optax.softmax_cross_entropy(logits, labels)"
    ),
    "binary_crossentropy": Loss(
        optax.sigmoid_binary_cross_entropy,
        "binary",
        "optax.sigmoid_binary_cross_entropy(logits[:, 0], labels)",
    ),
    "binary_focal_crossentropy": Loss(
        optax.losses.sigmoid_focal_loss,
        "binary",
        "optax.losses.sigmoid_focal_loss(logits[:, 0], labels)",
    ),
    "mean_squared_error": Loss(
        optax.squared_error, "values", "optax.squared_error(outputs, labels).mean(-1)"
    ),
    "mean_absolute_error": Loss(
        lambda outputs, labels: jnp.abs(outputs - labels),
        "values",
        "jnp.abs(outputs - labels).mean(-1)",
    ),
    "mean_absolute_percentage_error": Loss(
        _percentage, "values", "100 * jnp.abs(1 - outputs / labels).mean(-1)"
    ),
    "mean_squared_logarithmic_error": Loss(
        _squared_logarithm,
        "values",
        "optax.squared_error(jnp.log1p(outputs), jnp.log1p(labels)).mean(-1)",
    ),
    "huber": Loss(optax.huber_loss, "values", "optax.huber_loss(outputs, labels).mean(-1)"),
    "log_cosh": Loss(optax.log_cosh, "values", "optax.log_cosh(outputs, labels).mean(-1)"),
    "cosine_similarity": Loss(
        _negative_cosine, "values", "-optax.cosine_similarity(outputs, labels)"
    ),
}
OF_FUNCTIONS: dict[Callable[..., Array], str] = {
    optax.softmax_cross_entropy_with_integer_labels: "sparse_categorical_crossentropy",
    optax.softmax_cross_entropy: "categorical_crossentropy",
    optax.sigmoid_binary_cross_entropy: "binary_crossentropy",
    optax.losses.sigmoid_focal_loss: "binary_focal_crossentropy",
    optax.squared_error: "mean_squared_error",
    optax.huber_loss: "huber",
    optax.log_cosh: "log_cosh",
}
"""Functions of optax that may be passed instead of the name."""


def aligned(name: str, kind: Kind, outputs: Array, labels: Array) -> tuple[Array, Array]:
    """Returns outputs and labels in the shapes in which they are compared.

    As in Keras, a last axis of length 1 that only one of them has is removed. Nothing else is
    broadcast.

    Raises:
        ValueError: If the shapes do not match.
        TypeError: If the outputs are not floats, or labels of classes are not integers.
    """
    if not jnp.issubdtype(outputs.dtype, jnp.floating):
        raise TypeError(
            f"The outputs of the model must be floats for {name!r}, got {describe(outputs)}."
        )
    outputs = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
    if kind == "classes":
        return outputs, _classes(name, outputs, labels)
    if kind != "one-hot":
        if outputs.ndim == labels.ndim + 1 and outputs.shape[-1] == 1:
            outputs = outputs[..., 0]
        elif labels.ndim == outputs.ndim + 1 and labels.shape[-1] == 1:
            labels = labels[..., 0]
    if outputs.shape != labels.shape or (kind == "one-hot" and outputs.ndim < 2):
        raise ValueError(
            f"The outputs of the model and the labels must have the same shape for {name!r}, got "
            f"{describe(outputs)} and {describe(labels)}. {_fix(kind, outputs, labels)}"
        )
    return outputs, labels.astype(outputs.dtype)


def _classes(name: str, outputs: Array, labels: Array) -> Array:
    """Returns integer labels with the shape of the outputs without their last axis."""
    if labels.ndim == outputs.ndim and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if outputs.ndim < 2 or labels.shape != outputs.shape[:-1]:
        fix = "Pass one class per example."
        if labels.shape == outputs.shape and outputs.ndim > 1:
            fix = "For one-hot labels, use 'categorical_crossentropy'."
        elif outputs.ndim < 2:
            fix = "For one logit per example, use 'binary_crossentropy'."
        raise ValueError(
            f"Labels for {name!r} must be classes of shape {outputs.shape[:-1]}, since the outputs "
            f"of the model are {describe(outputs)}, got {describe(labels)}. {fix}"
        )
    if outputs.shape[-1] == 1:
        raise ValueError(
            f"The model returns one logit per example, {describe(outputs)}, with which every label "
            f"is class 0 for {name!r}. Return one logit per class, or use 'binary_crossentropy'."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"Labels for {name!r} must be integers, got {describe(labels)}. Convert them: "
            "labels.astype('int32')."
        )
    return labels


def _fix(kind: Kind, outputs: Array, labels: Array) -> str:
    if kind == "one-hot" and labels.ndim < max(outputs.ndim, 2):
        return "For integer classes, use 'sparse_categorical_crossentropy'."
    if kind == "one-hot" and labels.shape[-1] == 1:
        return "For integer classes, use 'sparse_categorical_crossentropy'."
    if kind == "binary" and outputs.ndim == 2 and labels.ndim == 1:
        return (
            "Return one logit per example, or use 'sparse_categorical_crossentropy' with one logit "
            "per class."
        )
    return "They are not broadcast, because that would train on the wrong pairs."


def per_example(values: Array) -> Array:
    """Returns the means over all axes but the batch axis."""
    return values.mean(axis=tuple(range(1, values.ndim))) if values.ndim > 1 else values


def logits_of(kind: Kind, probabilities: Array) -> Array:
    """Returns logits whose softmax or sigmoid are these probabilities, clipped as in Keras."""
    if kind != "binary":
        probabilities = probabilities / probabilities.sum(-1, keepdims=True)
    clipped = jnp.clip(probabilities, _EPSILON, 1 - _EPSILON)
    return jnp.log(clipped) - (jnp.log1p(-clipped) if kind == "binary" else 0)


def require_loss(name: str) -> Loss:
    """Returns a loss by its name.

    Raises:
        ValueError: If the name is unknown.
    """
    names = [*LOSSES, *ALIASES]
    if name not in names:
        raise ValueError(
            f"Unknown loss {name!r}.{nearest(name, names)} Pass one of "
            f"{', '.join(map(repr, names))}, or a function (model, batch) -> per-example losses."
        )
    return LOSSES[ALIASES.get(name, name)]
