"""What a batch costs: the user's values for each example, and the sums that are made of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.utils.errors import describe, require_int
from mirror._src.utils.modules import set_module
from mirror._src.utils.naming import name_of
from mirror._src.utils.types import Array, PyTree

LossFunction: TypeAlias = Callable[[Any, PyTree], Any]
PartOfBatch: TypeAlias = str | int | Callable[[PyTree], Any]

LOSS = "loss"
_RETURN_ONE = (
    "Return one for each example, e.g. optax.softmax_cross_entropy_with_integer_labels(logits, "
    "labels) without .mean(): mirror takes the mean, over the examples of all replicas."
)
_RETURN_SUMS = (
    "Return one for each example, e.g. mirror.Weighted((losses * mask).sum(axis=-1), "
    "mask.sum(axis=-1)): mirror divides, by the sum of the weights of all replicas."
)
_OF_EXAMPLES = "Reduce the other axes: x.mean(axis=-1), or x[:, 0]."
_OF_TOKENS = "Sum over the other axes: x.sum(axis=-1)."


@set_module("mirror")
@final
@dataclass(frozen=True, eq=False)
class Weighted:
    """Losses or metrics of examples, divided by weights of their own: a mean over tokens, say.

    A `Trainer`'s `loss_fn` may return it in place of plain losses `(B,)`, and in place of any
    metric. The result is the sum of `values` divided by the sum of `weights`, each over all
    examples of all replicas (of an epoch, in `History`; of the data, in `evaluate`), and the
    gradient is of that very number; weights are constants, through which no gradient flows. So the
    values of a language model are sums over the tokens of each example, and the weights are numbers
    of tokens; the values are not multiplied by them.

        def loss_fn(model, batch):
            logits = model(batch["inputs"])  # (B, T, vocabulary)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            mask = batch["targets"] != PAD
            correct = mask & (logits.argmax(-1) == batch["targets"])
            tokens = mask.sum(-1)
            loss = mirror.Weighted((losses * mask).sum(-1), tokens)
            return loss, {"accuracy": mirror.Weighted(correct.sum(-1), tokens)}

    Rows that pad a batch count neither in the values nor in the weights. Where the weights add up
    to 0, the result is NaN; a training step on such a batch has a gradient of 0. The `Trainer`'s
    `sample_weight` and `class_weight` multiply the values of the loss and, as in Keras, not what
    they are divided by; `penalty` is added to the quotient. A `Weighted` is a pytree, which
    `jax.jit` and `jax.vmap` can return.

    Args:
        values: `(B,)`, the sum of each example; floats for a loss.
        weights: `(B,)`, what each example counts for; not negative.

    Raises:
        TypeError: `values` or `weights` that are not real numbers.
        ValueError: NumPy weights that are negative or NaN; traced weights are not checked.

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
                f"`weights` must be at least 0, got {np.min(self.weights)}. Exclude an example by "
                "setting its value and its weight to 0."
            )


def _require_real(name: str, value: Any) -> None:
    if isinstance(value, int | float):
        return
    dtype = getattr(value, "dtype", None)
    if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in _REAL):
        raise TypeError(
            f"`{name}` must be an array of real numbers, got {describe(value)}. Pass "
            "mirror.Weighted(values, weights), both of one number for each example."
        )


_REAL = (jnp.floating, jnp.integer, jnp.bool_)


def _flatten(weighted: Weighted) -> tuple[tuple[Any, Any], None]:
    return (weighted.values, weighted.weights), None


def _flatten_with_keys(weighted: Weighted) -> tuple[tuple[tuple[Any, Any], ...], None]:
    keys = map(jax.tree_util.GetAttrKey, ("values", "weights"))
    return tuple(zip(keys, _flatten(weighted)[0], strict=True)), None


def _unflatten(_: None, children: Any) -> Weighted:
    """Makes a `Weighted` of whatever JAX puts there, which may not be arrays: checks nothing."""
    weighted = object.__new__(Weighted)
    for name, child in zip(("values", "weights"), children, strict=True):
        object.__setattr__(weighted, name, child)
    return weighted


jax.tree_util.register_pytree_with_keys(Weighted, _flatten_with_keys, _unflatten, _flatten)


class Sums(NamedTuple):
    """Sums over examples, of which means are made at the very end.

    Attributes:
        totals: of the loss and of each metric.
        count: how many examples there were, those that only pad left out.
        weights: of the loss and of each metric that is `Weighted`, what its total is divided by.
    """

    totals: dict[str, Any]
    count: Any
    weights: dict[str, Any] = {}


class _LossOutput(NamedTuple):
    """The loss or a metric after validation; `weights` is `None` where each example counts as 1."""

    values: Array
    weights: Array | None = None


@final
class Objective:
    """The user's loss function with its weights: losses of a batch, masked, and their sums.

    Args:
        loss_fn: `(model, batch)` to losses `(B,)`, or those and a dict of metrics, each `(B,)`; any
            of them may be `Weighted`.
        sample_weight: the part of a batch with which each example's loss is multiplied.
        labels: the part of a batch that holds the classes, integers `(B,)`.
        num_classes: how many there are: labels are 0 to this less one.
        class_weight: by class, with which each example's loss is multiplied; 1 where left out.
        penalty: of the model, a scalar that is added to the mean loss, and is not weighted.

    Raises:
        TypeError: `loss_fn` or `penalty` is no function, `class_weight` no dict.
        ValueError: `class_weight` without `labels`, or `labels` without `num_classes`, which is 1
            or more.
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
            raise TypeError(
                f"loss_fn={describe(loss_fn)} is no function. Pass one of (model, batch) that "
                "returns a loss for each example."
            )
        if (labels is None) != (num_classes is None) or (
            class_weight is not None and labels is None
        ):
            raise ValueError(
                f"labels={labels!r}, num_classes={num_classes!r}, class_weight={class_weight!r}: "
                "labels and num_classes go together, and class weights need both. For example "
                "labels='label', num_classes=10, class_weight={3: 2.0}."
            )
        if penalty is not None and not callable(penalty):
            raise TypeError(
                f"penalty={describe(penalty)} is no function. Pass one of the model that returns a "
                "scalar."
            )
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
            raise TypeError(
                f"class_weight={describe(class_weight)} is no dict. Pass weights by class, as in "
                "class_weight={3: 2.0}."
            )
        table = np.ones(self._num_classes, np.float32)
        for label, weight in class_weight.items():
            if label not in range(self._num_classes):
                raise ValueError(
                    f"class_weight has class {label!r}; there are classes 0 to "
                    f"{self._num_classes - 1} (num_classes={self._num_classes})."
                )
            table[label] = weight
        return table

    def __call__(self, model: Any, batch: PyTree, mask: Array) -> tuple[Array, Sums]:
        """The losses of a replica's examples, 0 where the mask is False, and the sums."""
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
        """Calls the loss function: values by name, and the weights of what is `Weighted`."""
        found = self._loss_fn(model, batch)
        losses, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(metrics, Mapping) or LOSS in metrics:
            raise TypeError(
                f"{name_of(self._loss_fn)} returned the metrics {describe(metrics)}. Return a dict "
                f"of values for each example, without {LOSS!r}: losses, {{'accuracy': correct}}."
            )
        loss = self._returned("The loss", losses, size)
        if not jnp.issubdtype(loss.values.dtype, jnp.floating):
            raise TypeError(
                f"{name_of(self._loss_fn)} returned losses of {loss.values.dtype}, which have no "
                "gradient. Return floats."
            )
        named = {str(name): self._returned(repr(name), metrics[name], size) for name in metrics}
        returned = {LOSS: loss, **named}
        weights = {name: x.weights for name, x in returned.items() if x.weights is not None}
        return {name: x.values for name, x in returned.items()}, weights

    def _returned(self, what: str, value: Any, size: int) -> _LossOutput:
        what = f"{what} of {name_of(self._loss_fn)}"
        if not isinstance(value, Weighted):
            return _LossOutput(_per_example(what, value, size, _RETURN_ONE))
        weight = f"The weight of {what[0].lower()}{what[1:]}"
        weights = _per_example(weight, value.weights, size, _RETURN_SUMS, _OF_TOKENS)
        values = _per_example(what, value.values, size, _RETURN_SUMS, _OF_TOKENS)
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
                f"{name_of(self._penalty)} returned {describe(penalty)} for the penalty, which is "
                "a scalar: the sum over all parameters."
            )
        return penalty

    def _part(self, batch: PyTree, part: Any, argument: str, size: int) -> Array:
        return _per_example(f"{argument}={part!r}", part_of(batch, part, argument), size)

    @property
    def inspect(self) -> Callable[[int, PyTree], None] | None:
        """What looks at each batch on the host, before it is cut up; `None`: nothing does."""
        return None if self._labels is None else self._require_classes

    def _require_classes(self, number: int, batch: PyTree) -> None:
        """Refuses labels that are no class, or not integers `(B,)`.

        Raises:
            ValueError: there are such.
        """
        assert self._labels is not None
        assert self._num_classes is not None
        labels = np.asarray(part_of(batch, self._labels, "labels"))
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(
                f"The labels of batch {number} are {describe(labels)}. They are integers, one for "
                "each example: x.argmax(-1) of one-hot rows, x[:, 0] of columns."
            )
        wrong = np.flatnonzero((labels < 0) | (labels >= self._num_classes))
        if wrong.size:
            raise ValueError(
                f"The labels of batch {number} are out of range: {labels[wrong[0]]} in row "
                f"{wrong[0]}, and {wrong.size} in all. They are integers from 0 to "
                f"{self._num_classes - 1} (num_classes={self._num_classes}). JAX would train with "
                "a wrong class, or with NaN."
            )


def part_of(batch: PyTree, part: PartOfBatch, argument: str) -> Any:
    """The part of a batch that a key, an index or a function names.

    Raises:
        ValueError: there is none.
    """
    if callable(part):
        return part(batch)
    try:
        return batch[part]
    except (KeyError, IndexError, TypeError) as error:
        there = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"{argument}={part!r}: a batch has no such part; it has {there}. Pass a key of the "
            "batch, or a function of it."
        ) from error


def _per_example(
    what: str, value: Any, size: int, fix: str = "", reduce: str = _OF_EXAMPLES
) -> Array:
    """The value as an array `(size,)`, or the error."""
    is_array = hasattr(value, "shape") or isinstance(value, int | float)
    shape = np.shape(value) if is_array else None
    if shape == (size,):
        return jnp.asarray(value)
    received = f"an array of shape {shape}" if is_array else describe(value)
    if shape and shape[0] == size:
        fix = reduce
    raise ValueError(
        f"{what} is {received}; of a replica's {size} examples it must be ({size},). {fix}".rstrip()
    )


def _sums(values: Mapping[str, Array], mask: Array) -> dict[str, Array]:
    """Adds up each over the examples of a replica."""
    return {
        name: jnp.sum(value, where=mask, dtype=_wide(value.dtype)) for name, value in values.items()
    }


def _as_floats(weights: Array) -> Array:
    return weights.astype(jnp.promote_types(weights.dtype, jnp.float32))


def add(a: PyTree, b: PyTree) -> PyTree:
    """Two trees of arrays, added leaf by leaf."""
    return jax.tree.map(jnp.add, a, b)


def _wide(dtype: Any) -> Any:
    """What to add up in: counts stay exact integers, small floats become float32."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.promote_types(dtype, jnp.float32)
    return jnp.promote_types(dtype, jnp.int32)
