"""`Weighted`: per-example losses or metrics with weights to divide by."""

from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import expected
from mirror._src.base.modules import set_module


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


_REAL = (jnp.floating, jnp.integer, jnp.bool_)


def _flatten(weighted: Weighted) -> tuple[list[tuple[Any, Any]], None]:
    names = ("values", "weights")
    return [(jax.tree_util.GetAttrKey(name), getattr(weighted, name)) for name in names], None


def _unflatten(_: None, children: Any) -> Weighted:
    """Rebuilds a `Weighted` without validation: JAX also unflattens with placeholders."""
    weighted = object.__new__(Weighted)
    for name, child in zip(("values", "weights"), children, strict=True):
        object.__setattr__(weighted, name, child)
    return weighted


jax.tree_util.register_pytree_with_keys(Weighted, _flatten, _unflatten)
