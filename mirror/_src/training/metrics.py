"""Metrics by their names in Keras: one value per example, computed from logits."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp

from mirror._src.base.errors import expected, nearest
from mirror._src.base.naming import name_of, parameter_names, require_parameters, signature_of
from mirror._src.base.types import Array
from mirror._src.training.losses import ALIASES, LOSSES, Kind, ValueFunction, per_example

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
            f"The metric {metric!r} is not a mean over examples. Compute it from all predictions: "
            "trainer.predict(data)."
        )
    return (
        f"Unknown metric {metric!r}.{nearest(metric, _NAMES)} Pass one of "
        f"{', '.join(map(repr, _NAMES))}, or a function (outputs, labels) -> per-example values."
    )
