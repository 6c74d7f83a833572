"""`Metric`: per-example arrays from which a metric that is not a mean is computed."""

from typing import Any, final

import jax

from mirror._src.base.errors import describe, expected
from mirror._src.base.modules import set_module
from mirror._src.base.naming import name_of

_FIX = "For example: mirror.Metric(metrax.AUCROC, predictions=scores, labels=batch['label'])."


@set_module("mirror")
@final
class Metric:
    """A metric that is not a mean over examples, such as AUC, F1 or perplexity.

    A `Trainer`'s `loss_fn` may return a `Metric` among its metrics, and so may a function in
    `metrics=`. The arrays of the real examples, without padding, are copied to the host, and the
    object of another library computes the metric from all of them: of the data in `evaluate`, of
    the validation data in `fit`. Training steps do not compute it.

        def loss_fn(model, batch):
            logits = model(batch["x"])[:, 0]
            losses = optax.sigmoid_binary_cross_entropy(logits, batch["label"])
            scores, labels = nnx.sigmoid(logits), batch["label"]
            auc = mirror.Metric(metrax.AUCROC, predictions=scores, labels=labels)
            return losses, {"auc": auc}

    Args:
        metric: A class of clu or metrax, or any other with `from_model_output(**inputs)`, of whose
            results `merge` and `compute` are called. A metric with `update(**inputs)` and
            `compute`: a class, or an object that was created outside the loss function, such as
            `nnx.metrics.Accuracy()`, which is copied and reset. Or a function of the inputs whose
            results have `merge` and `compute`. Results without `merge`, such as numbers of
            scikit-learn's functions or metrax's `FBetaScore`, are computed once from the examples
            of all batches, which the memory of the host must hold.
        inputs: Arrays of shape `(B, ...)` by the names of its arguments.

    Raises:
        TypeError: If `metric` is not callable and has no `update`.
        ValueError: If there are no inputs.

    >>> accuracy = nnx.metrics.Accuracy()
    >>> def metric(outputs, labels):
    ...     return mirror.Metric(accuracy, logits=outputs, labels=labels)
    >>> with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
    ...     model, loss = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "sparse_categorical_crossentropy"
    ...     trainer = mirror.Trainer(model, optax.sgd(0.1), loss, metrics={"accuracy": metric})
    >>> sorted(trainer.evaluate((np.ones((5, 2)), np.ones(5, "int32")), batch_size=2))
    ['accuracy', 'loss']
    """

    def __init__(self, metric: Any, /, **inputs: Any) -> None:
        if not (callable(metric) or hasattr(metric, "update")):
            what = "a metric with from_model_output or update, or a function"
            raise TypeError(expected("metric", metric, what, _FIX))
        if not inputs:
            raise ValueError(f"mirror.Metric({name_of(metric)}) has no inputs. {_FIX}")
        self.metric, self.inputs = metric, inputs

    def __repr__(self) -> str:
        inputs = "".join(f", {name}={describe(x)}" for name, x in self.inputs.items())
        return f"Metric({self.metric!r}{inputs})"


def _flatten(metric: Metric) -> tuple[tuple[dict[str, Any]], Any]:
    return (metric.inputs,), metric.metric


def _unflatten(metric: Any, children: Any) -> Metric:
    """Rebuilds a `Metric` without validation: JAX also unflattens with placeholders."""
    rebuilt = object.__new__(Metric)
    rebuilt.metric, (rebuilt.inputs,) = metric, children
    return rebuilt


jax.tree_util.register_pytree_node(Metric, _flatten, _unflatten)
