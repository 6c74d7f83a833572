"""`Weighted` and `Metric`: per-example losses and metrics that are not plain means."""

from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import describe, expected
from mirror._src.base.naming import name_of
from mirror._src.base.public_names import set_module

_REAL = (jnp.floating, jnp.integer, jnp.bool_)
_FIX = "For example: mirror.Metric(metrax.AUCROC, predictions=scores, labels=batch['label'])."


@set_module("mirror")
@final
@dataclass(frozen=True, eq=False)
class Weighted:
    """Per-example losses or metrics with weights to divide by, such as numbers of tokens.

    A `Trainer`'s `loss_fn` may return a `Weighted` instead of plain losses `(B,)` or of any metric.
    The result is the sum of `values` divided by the sum of `weights`, each over all examples of all
    replicas: of an epoch in `History`, of the data in `evaluate`. The gradient is the gradient of
    this quotient, also if the weights depend on the parameters; `jax.lax.stop_gradient(weights)`
    makes them constants. `values` are not multiplied by `weights`: for a language model, they are
    sums over the tokens of each example, and the weights are numbers of tokens.

        def loss_fn(model, batch):
            logits = model(batch["inputs"])  # (B, T, vocabulary)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            mask = batch["targets"] != PAD
            correct = mask & (logits.argmax(-1) == batch["targets"])
            tokens = mask.sum(-1)
            loss = mirror.Weighted((losses * mask).sum(-1), tokens)
            return loss, {"accuracy": mirror.Weighted(correct.sum(-1), tokens)}

    Padding counts neither in the values nor in the weights. If the weights add up to 0, the result
    is NaN, and the gradient of a training step on such a batch is 0. The `Trainer`'s
    `sample_weight` and `class_weight` multiply the values of the loss but, as in Keras, not its
    weights; `penalty` is added to the quotient. A `Weighted` is a pytree, which `jax.jit` and
    `jax.vmap` can return.

    Args:
        values: Sums of the examples, of shape `(B,)`; floats for a loss.
        weights: Non-negative weights of the examples, of shape `(B,)`.

    Raises:
        TypeError: If `values` or `weights` are not real numbers.
        ValueError: If NumPy weights are negative or NaN; traced weights are not checked.

    >>> def loss_fn(model, batch):
    ...     losses = (model(batch["x"])[..., 0] - batch["y"]) ** 2  # (B, T)
    ...     return mirror.Weighted((losses * batch["mask"]).sum(-1), batch["mask"].sum(-1))
    >>> ones, mask = np.ones((3, 4), "float32"), np.arange(4) < [[4], [1], [2]]
    >>> with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
    ...     trainer = mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn)
    >>> data = [{"x": np.zeros((3, 4, 2), "float32"), "y": ones, "mask": mask}]
    >>> trainer.evaluate(data)  # 7 errors of 1, over 7 tokens
    {'loss': 1.0}
    """

    values: Any
    weights: Any

    def __post_init__(self) -> None:
        _require_real("values", self.values)
        _require_real("weights", self.weights)
        on_host = isinstance(self.weights, np.ndarray | np.generic | int | float)
        if on_host and not np.all(np.asarray(self.weights) >= 0):
            raise ValueError(
                f"`weights` must be non-negative, got {np.min(self.weights)}. To exclude an "
                "example, set its value and its weight to 0."
            )


def _require_real(name: str, value: Any) -> None:
    if isinstance(value, int | float):
        return
    dtype = getattr(value, "dtype", None)
    if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in _REAL):
        fix = "Pass mirror.Weighted(values, weights) with one number per example in both."
        raise TypeError(expected(name, value, "an array of real numbers", fix))


def _flatten_weighted(weighted: Weighted) -> tuple[list[tuple[Any, Any]], None]:
    names = ("values", "weights")
    return [(jax.tree_util.GetAttrKey(name), getattr(weighted, name)) for name in names], None


def _unflatten_weighted(_: None, children: Any) -> Weighted:
    """Rebuilds a `Weighted` without validation: JAX also unflattens with placeholders."""
    weighted = object.__new__(Weighted)
    for name, child in zip(("values", "weights"), children, strict=True):
        object.__setattr__(weighted, name, child)
    return weighted


jax.tree_util.register_pytree_with_keys(Weighted, _flatten_weighted, _unflatten_weighted)


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


def _flatten_metric(metric: Metric) -> tuple[tuple[dict[str, Any]], Any]:
    return (metric.inputs,), metric.metric


def _unflatten_metric(metric: Any, children: Any) -> Metric:
    """Rebuilds a `Metric` without validation: JAX also unflattens with placeholders."""
    rebuilt = object.__new__(Metric)
    rebuilt.metric, (rebuilt.inputs,) = metric, children
    return rebuilt


jax.tree_util.register_pytree_node(Metric, _flatten_metric, _unflatten_metric)
