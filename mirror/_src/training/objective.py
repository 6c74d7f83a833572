"""The objective of a `Trainer`: per-example losses and metrics, and their sums."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.utils.errors import describe, expected, require_int
from mirror._src.utils.modules import set_module
from mirror._src.utils.naming import name_of
from mirror._src.utils.types import Array, PyTree

LossFunction: TypeAlias = Callable[[Any, PyTree], Any]
PartOfBatch: TypeAlias = str | int | Callable[[PyTree], Any]

LOSS = "loss"
_RETURN_LOSSES = (
    "Return per-example losses, e.g. optax.softmax_cross_entropy_with_integer_labels(logits, "
    "labels) without .mean(): mirror averages over the examples of all replicas."
)
_RETURN_SUMS = (
    "Return per-example sums, e.g. mirror.Weighted((losses * mask).sum(axis=-1), "
    "mask.sum(axis=-1)): mirror divides by the sum of the weights of all replicas."
)
_REDUCE_AXES = "Reduce the other axes: x.mean(axis=-1), or x[:, 0]."
_SUM_AXES = "Sum over the other axes: x.sum(axis=-1)."


@set_module("mirror")
@final
@dataclass(frozen=True, eq=False)
class Weighted:
    """Per-example losses or metrics with weights to divide by, such as numbers of tokens.

    A `Trainer`'s `loss_fn` may return a `Weighted` instead of plain losses `(B,)` or of any metric.
    The result is the sum of `values` divided by the sum of `weights`, each over all examples of all
    replicas: of an epoch in `History`, of the data in `evaluate`. The gradient is the gradient of
    this quotient; weights are constants. `values` are not multiplied by `weights`: for a language
    model, they are sums over the tokens of each example, and the weights are numbers of tokens.

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
    >>> trainer = mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn)
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


def _flatten(weighted: Weighted) -> tuple[tuple[Any, Any], None]:
    return (weighted.values, weighted.weights), None


def _flatten_with_keys(weighted: Weighted) -> tuple[tuple[tuple[Any, Any], ...], None]:
    keys = map(jax.tree_util.GetAttrKey, ("values", "weights"))
    return tuple(zip(keys, _flatten(weighted)[0], strict=True)), None


def _unflatten(_: None, children: Any) -> Weighted:
    """Rebuilds a `Weighted` without validation: JAX also unflattens with placeholders."""
    weighted = object.__new__(Weighted)
    for name, child in zip(("values", "weights"), children, strict=True):
        object.__setattr__(weighted, name, child)
    return weighted


jax.tree_util.register_pytree_with_keys(Weighted, _flatten_with_keys, _unflatten, _flatten)


class Sums(NamedTuple):
    """Sums over examples, from which means are computed at the end.

    Attributes:
        totals: Sums of the loss and of each metric.
        count: Number of examples, without padding.
        weights: Sums of the weights of the loss and of each metric that is `Weighted`.
    """

    totals: dict[str, Any]
    count: Any
    weights: dict[str, Any] = {}


class _LossOutput(NamedTuple):
    """A loss or metric after validation; `weights` is None if every example counts as 1."""

    values: Array
    weights: Array | None = None


@final
class Objective:
    """The user's loss function with weights and penalty: masked losses of a batch, and their sums.

    Args:
        loss_fn: Function `(model, batch)` that returns losses `(B,)`, or losses and a dict of
            metrics, each `(B,)`. Any of them may be `Weighted`.
        sample_weight: Part of a batch by which the losses are multiplied.
        labels: Part of a batch that contains the classes, integers `(B,)`.
        num_classes: Number of classes: labels are less than this.
        class_weight: Factors of the losses by class; 1 for classes that it omits.
        penalty: Function of the model; its scalar is added to the mean loss, and never weighted.

    Raises:
        TypeError: If `loss_fn` or `penalty` is not callable, or `class_weight` is not a dict.
        ValueError: If `class_weight` is passed without `labels`, `labels` without `num_classes`, or
            `num_classes` is less than 1.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        sample_weight: PartOfBatch | None = None,
        labels: PartOfBatch | None = None,
        num_classes: int | None = None,
        class_weight: Mapping[int, float] | None = None,
        penalty: Callable[[Any], Any] | None = None,
    ) -> None:
        if not callable(loss_fn):
            fix = "Pass a function (model, batch) -> per-example losses."
            raise TypeError(expected("loss_fn", loss_fn, "callable", fix))
        if (labels is None) != (num_classes is None) or (
            class_weight is not None and labels is None
        ):
            raise ValueError(
                f"labels={labels!r}, num_classes={num_classes!r}, class_weight={class_weight!r}: "
                "labels and num_classes must be passed together, and class_weight needs both. For "
                "example labels='label', num_classes=10, class_weight={3: 2.0}."
            )
        if penalty is not None and not callable(penalty):
            fix = "Pass a function of the model that returns a scalar."
            raise TypeError(expected("penalty", penalty, "callable", fix))
        if num_classes is not None:
            require_int("num_classes", num_classes)
        self._loss_fn = loss_fn
        self._penalty = penalty
        self._sample_weight = sample_weight
        self._labels = labels
        self._num_classes = num_classes
        self._by_class = None if class_weight is None else self._table(class_weight)

    def _table(self, class_weight: Mapping[int, float]) -> np.ndarray:
        assert self._num_classes is not None
        if not isinstance(class_weight, Mapping):
            fix = "Pass weights by class, for example class_weight={3: 2.0}."
            raise TypeError(expected("class_weight", class_weight, "a dict", fix))
        table = np.ones(self._num_classes, np.float32)
        for label, weight in class_weight.items():
            if label not in range(self._num_classes):
                raise ValueError(
                    f"The classes of class_weight must be in [0, {self._num_classes - 1}] "
                    f"(num_classes={self._num_classes}), got {label!r}."
                )
            table[label] = weight
        return table

    def __call__(self, model: Any, batch: PyTree, mask: Array) -> tuple[Array, Sums]:
        """Returns the losses of a replica's examples, 0 where the mask is False, and the sums."""
        values, weights = self._values(model, batch, mask.shape[0])
        penalty = self._penalty_of(model)
        if LOSS in weights:  # so that it is added to the quotient
            penalty = penalty * _as_floats(weights[LOSS])
        losses = jnp.where(mask, self._weighted(values.pop(LOSS), batch) + penalty, 0)
        totals = {LOSS: losses.sum(dtype=_wide(losses.dtype)), **_sums(values, mask)}
        return losses, Sums(totals, mask.sum(dtype=jnp.int32), _sums(weights, mask))

    def _values(
        self, model: Any, batch: PyTree, size: int
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Calls the loss function; returns values by name, and the weights of `Weighted` ones."""
        result = self._loss_fn(model, batch)
        is_pair = isinstance(result, tuple) and len(result) == 2
        losses, metrics = result if is_pair else (result, {})
        if not isinstance(metrics, Mapping) or LOSS in metrics:
            raise TypeError(
                f"The metrics of {name_of(self._loss_fn)} must be a dict of per-example values "
                f"without the key {LOSS!r}, got {describe(metrics)}. For example: "
                "return losses, {'accuracy': correct}."
            )
        loss = self._returned("The loss", losses, size)
        if not jnp.issubdtype(loss.values.dtype, jnp.floating):
            raise TypeError(
                f"The losses of {name_of(self._loss_fn)} must be floats to have a gradient, got "
                f"{loss.values.dtype}."
            )
        named = {str(name): self._returned(repr(name), metrics[name], size) for name in metrics}
        returned = {LOSS: loss, **named}
        weights = {name: x.weights for name, x in returned.items() if x.weights is not None}
        return {name: x.values for name, x in returned.items()}, weights

    def _returned(self, what: str, value: Any, size: int) -> _LossOutput:
        what = f"{what} of {name_of(self._loss_fn)}"
        if not isinstance(value, Weighted):
            return _LossOutput(_per_example(what, value, size, _RETURN_LOSSES))
        weight = f"The weight of {what[0].lower()}{what[1:]}"
        weights = _per_example(weight, value.weights, size, _RETURN_SUMS, _SUM_AXES)
        values = _per_example(what, value.values, size, _RETURN_SUMS, _SUM_AXES)
        return _LossOutput(values, jax.lax.stop_gradient(weights))

    def _weighted(self, losses: Array, batch: PyTree) -> Array:
        if self._sample_weight is not None:
            losses = losses * self._part(batch, self._sample_weight, "sample_weight", losses.size)
        if self._by_class is not None:
            labels = self._part(batch, self._labels, "labels", losses.size)
            losses = losses * jnp.asarray(self._by_class)[labels]
        return losses

    def _penalty_of(self, model: Any) -> Any:
        if self._penalty is None:
            return 0
        penalty = self._penalty(model)
        if isinstance(penalty, dict | list | tuple) or jnp.shape(penalty) != ():
            raise ValueError(
                f"The penalty of {name_of(self._penalty)} must be a scalar, got "
                f"{describe(penalty)}. Sum over all parameters."
            )
        return penalty

    def _part(self, batch: PyTree, part: Any, argument: str, size: int) -> Array:
        return _per_example(f"{argument}={part!r}", part_of(batch, part, argument), size)

    @property
    def inspect(self) -> Callable[[int, PyTree], None] | None:
        """A function that validates each batch on the host before it is split, or None."""
        return None if self._labels is None else self._require_classes

    def _require_classes(self, number: int, batch: PyTree) -> None:
        """Checks the labels of a batch.

        Raises:
            ValueError: If they are not integers of shape `(B,)`, or out of range.
        """
        assert self._labels is not None
        assert self._num_classes is not None
        labels = np.asarray(part_of(batch, self._labels, "labels"))
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(
                f"`labels` must be integers, one per example, got {describe(labels)} in batch "
                f"{number}. Convert one-hot rows with x.argmax(-1), and columns with x[:, 0]."
            )
        wrong = np.flatnonzero((labels < 0) | (labels >= self._num_classes))
        if wrong.size:
            raise ValueError(
                f"Labels of batch {number} must be in [0, {self._num_classes - 1}] "
                f"(num_classes={self._num_classes}), but row {wrong[0]} is {labels[wrong[0]]} "
                f"(invalid labels in this batch: {wrong.size}). JAX does not check indices: an "
                "invalid label would silently train the wrong class or produce NaN."
            )


def part_of(batch: PyTree, part: PartOfBatch, argument: str) -> Any:
    """Returns the part of a batch that a key, an index or a function selects.

    Raises:
        ValueError: If the batch has no such part.
    """
    if callable(part):
        return part(batch)
    try:
        return batch[part]
    except (KeyError, IndexError, TypeError) as error:
        parts = list(batch) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ValueError(
            f"{argument}={part!r} does not select a part of the batch, which is {parts}. Pass a "
            "key of the batch, or a function of it."
        ) from error


def _per_example(
    what: str, value: Any, size: int, fix: str = "", reduce: str = _REDUCE_AXES
) -> Array:
    """Returns the value as an array of shape `(size,)`, or raises a `ValueError`."""
    is_array = hasattr(value, "shape") or isinstance(value, int | float)
    shape = np.shape(value) if is_array else None
    if shape == (size,):
        return jnp.asarray(value)
    received = f"an array of shape {shape}" if is_array else describe(value)
    if shape and shape[0] == size:
        fix = reduce
    raise ValueError(
        f"{what} must have shape ({size},), one value per example of the replica's batch, got "
        f"{received}. {fix}".rstrip()
    )


def _sums(values: Mapping[str, Array], mask: Array) -> dict[str, Array]:
    """Sums each value over the examples of a replica."""
    return {
        name: jnp.sum(value, where=mask, dtype=_wide(value.dtype)) for name, value in values.items()
    }


def _as_floats(weights: Array) -> Array:
    return weights.astype(jnp.promote_types(weights.dtype, jnp.float32))


def add(a: PyTree, b: PyTree) -> PyTree:
    """Adds two trees of arrays, leaf by leaf."""
    return jax.tree.map(jnp.add, a, b)


def _wide(dtype: Any) -> Any:
    """Returns the dtype for sums: counts remain exact integers, small floats become float32."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.promote_types(dtype, jnp.float32)
    return jnp.promote_types(dtype, jnp.int32)
