"""Losses and metrics by their names in Keras, computed from logits, one value per example."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import optax

from mirror._src.base.errors import describe, expected, nearest
from mirror._src.base.naming import name_of, parameter_names, require_parameters, signature_of
from mirror._src.base.types import Array, widened

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


def _absolute(outputs: Array, labels: Array) -> Array:
    return jnp.abs(outputs - labels)


def _percentage(outputs: Array, labels: Array) -> Array:
    return 100 * jnp.abs((labels - outputs) / jnp.maximum(jnp.abs(labels), _EPSILON))


def _squared_logarithm(outputs: Array, labels: Array) -> Array:
    logs = [jnp.log1p(jnp.maximum(x, _EPSILON)) for x in (outputs, labels)]
    return jnp.square(logs[0] - logs[1])


def _negative_cosine(outputs: Array, labels: Array) -> Array:
    return -optax.cosine_similarity(outputs, labels, epsilon=1e-12)


_ARGUMENTS: dict[Kind, str] = {
    "classes": "(logits, labels)",
    "one-hot": "(logits, labels)",
    "binary": "(logits[:, 0], labels)",
    "values": "(outputs, labels).mean(-1)",
}


def _of_optax(name: str, kind: Kind) -> Loss:
    return Loss(operator.attrgetter(name)(optax), kind, f"optax.{name}{_ARGUMENTS[kind]}")


LOSSES: dict[str, Loss] = {
    "sparse_categorical_crossentropy": _of_optax(
        "softmax_cross_entropy_with_integer_labels", "classes"
    ),
    "categorical_crossentropy": _of_optax("softmax_cross_entropy", "one-hot"),
    "binary_crossentropy": _of_optax("sigmoid_binary_cross_entropy", "binary"),
    "binary_focal_crossentropy": _of_optax("losses.sigmoid_focal_loss", "binary"),
    "mean_squared_error": _of_optax("squared_error", "values"),
    "mean_absolute_error": Loss(_absolute, "values", "jnp.abs(outputs - labels).mean(-1)"),
    "mean_absolute_percentage_error": Loss(
        _percentage, "values", "100 * jnp.abs(1 - outputs / labels).mean(-1)"
    ),
    "mean_squared_logarithmic_error": Loss(
        _squared_logarithm,
        "values",
        "optax.squared_error(jnp.log1p(outputs), jnp.log1p(labels)).mean(-1)",
    ),
    "huber": _of_optax("huber_loss", "values"),
    "log_cosh": _of_optax("log_cosh", "values"),
    "cosine_similarity": Loss(
        _negative_cosine, "values", "-optax.cosine_similarity(outputs, labels)"
    ),
}


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
    outputs = widened(outputs)
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
    if kind == "one-hot" and (labels.ndim < max(outputs.ndim, 2) or labels.shape[-1] == 1):
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


def name_in_table(loss_fn: Any) -> str | None:
    """Returns the name of a loss: the argument itself, or the name of a function of optax."""
    if isinstance(loss_fn, str):
        return loss_fn
    return next((name for name, loss in LOSSES.items() if loss.fn is loss_fn), None)


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


Metric: TypeAlias = str | Callable[[Any, Any], Any]
Metrics: TypeAlias = Sequence[Metric] | Mapping[str, Metric]

_K = 5


def _class_accuracy(outputs: Array, labels: Array) -> Array:
    return outputs.argmax(-1) == labels


def _one_hot_accuracy(outputs: Array, labels: Array) -> Array:
    return outputs.argmax(-1) == labels.argmax(-1)


def _binary_accuracy(outputs: Array, labels: Array) -> Array:
    return (outputs > 0) == labels


def _top_of_classes(outputs: Array, labels: Array) -> Array:
    logit = jnp.take_along_axis(outputs, labels[..., None], axis=-1)
    better = (outputs > logit).sum(-1)
    return (better < _K) & jnp.isfinite(logit[..., 0])


def _top_of_one_hot(outputs: Array, labels: Array) -> Array:
    return _top_of_classes(outputs, labels.argmax(-1))


_ACCURACIES: dict[Kind, ValueFunction] = {
    "classes": _class_accuracy,
    "one-hot": _one_hot_accuracy,
    "binary": _binary_accuracy,
}
_TOP_5: dict[Kind, ValueFunction] = {"classes": _top_of_classes, "one-hot": _top_of_one_hot}
_BY_KIND: dict[str, dict[Kind, ValueFunction]] = {
    "accuracy": _ACCURACIES,
    "acc": _ACCURACIES,
    "top_5_accuracy": _TOP_5,
    "sparse_categorical_accuracy": {"classes": _class_accuracy},
    "categorical_accuracy": {"one-hot": _one_hot_accuracy},
    "binary_accuracy": {"binary": _binary_accuracy},
    "sparse_top_k_categorical_accuracy": {"classes": _top_of_classes},
    "top_k_categorical_accuracy": {"one-hot": _top_of_one_hot},
}
# The loss is minus the similarity, so that one name would be two numbers.
_LOSSES = {name: loss for name, loss in LOSSES.items() if name != "cosine_similarity"}
_NAMES = [*_BY_KIND, *_LOSSES, *ALIASES]
_LABEL_NAMES = frozenset(("y_true", "y", "label", "labels", "target", "targets", "true"))
_OUTPUT_NAMES = frozenset(
    ("y_pred", "logits", "outputs", "output", "pred", "preds", "prediction", "predictions")
)
_NOT_MEANS = {
    *("auc", "precision", "recall", "f1score", "fbetascore", "r2score", "meaniou"),
    *("rootmeansquarederror", "rmse"),
}


def metric_functions(metrics: Any, kind: Kind, loss: str) -> dict[str, ValueFunction]:
    """Returns the functions `(outputs, labels)` of metrics, by their names in the history.

    Args:
        metrics: Names and functions, or a dict of them.
        kind: The kind of labels of the loss.
        loss: Name of the loss, for messages.

    Raises:
        ValueError: If a name is unknown, does not fit the loss, or appears twice.
        TypeError: If a metric is neither a name nor a function.
    """
    if metrics is None:
        return {}
    if isinstance(metrics, str) or callable(metrics):
        metrics = [metrics]
    if not isinstance(metrics, Sequence | Mapping):
        fix = "For example: metrics=['accuracy']."
        raise TypeError(expected("metrics", metrics, "names or functions", fix))
    if isinstance(metrics, Mapping):
        pairs = [(str(name), metric) for name, metric in metrics.items()]
    else:
        pairs = [(m if isinstance(m, str) else _name_of(m), m) for m in metrics]
    names = [name for name, _ in pairs]
    wrong = next((name for name in names if name == "loss" or names.count(name) > 1), None)
    if wrong is not None:
        reason = "is the name of the loss" if wrong == "loss" else "appears twice"
        raise ValueError(
            f"The metric {wrong!r} {reason}. Choose names with a dict: metrics={{'name': metric}}."
        )
    return {name: _function(metric, kind, loss) for name, metric in pairs}


def _name_of(metric: Any) -> str:
    if isinstance(metric, type) or not callable(metric):
        fix = "Pass a name, such as 'accuracy', or a function (outputs, labels) of one replica."
        raise TypeError(expected("metrics", metric, "names or functions", fix))
    return name_of(metric)


def _function(metric: Any, kind: Kind, loss: str) -> ValueFunction:
    if not isinstance(metric, str):
        name = _name_of(metric)
        fix = "Return one value per example: def f(outputs, labels): return abs(outputs - labels)."
        require_parameters(metric, f"The metric {name}", ("outputs", "labels"), fix)
        first, second = [*parameter_names(metric), "", ""][:2]
        if first in _LABEL_NAMES and second in _OUTPUT_NAMES:
            raise TypeError(
                f"The metric {name} takes {signature_of(metric)}, as in Keras, but metrics are "
                f"called with (outputs, labels). Swap the parameters: "
                f"def {name if name.isidentifier() else 'metric'}({second}, {first})."
            )
        return metric
    if metric in _BY_KIND:
        by_kind = _BY_KIND[metric]
        if kind not in by_kind:
            fits = [name for name, kinds in _BY_KIND.items() if kind in kinds]
            instead = fits or ["mean_absolute_error", "mean_squared_error"]
            raise ValueError(
                f"The metric {metric!r} does not fit the loss {loss!r}. Use one of "
                f"{', '.join(map(repr, instead))}, or a function (outputs, labels)."
            )
        return functools.partial(_averaged, by_kind[kind])
    name = ALIASES.get(metric, metric)
    if name not in _LOSSES:
        raise ValueError(_unknown(metric))
    if _LOSSES[name].kind != kind:
        raise ValueError(
            f"The metric {metric!r} does not fit the loss {loss!r}, whose labels are of another "
            "kind. Pass a function (outputs, labels) -> per-example values."
        )
    return functools.partial(_averaged, _LOSSES[name].fn)


def is_named(fn: ValueFunction) -> bool:
    """Whether a metric is one of the table, which is computed from logits."""
    return isinstance(fn, functools.partial) and fn.func is _averaged


def _averaged(fn: ValueFunction, outputs: Array, labels: Array) -> Array:
    return per_example(fn(outputs, labels))


def _unknown(metric: str) -> str:
    if metric.lower().replace("_", "").replace("-", "") in _NOT_MEANS:
        return (
            f"The metric {metric!r} is not a mean over examples. Return a "
            "mirror.Metric from a function (outputs, labels)."
        )
    return (
        f"Unknown metric {metric!r}.{nearest(metric, _NAMES)} Pass one of "
        f"{', '.join(map(repr, _NAMES))}, or a function (outputs, labels) -> per-example values."
    )
