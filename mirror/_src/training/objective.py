"""The objective of a `Trainer`: per-example losses and metrics, and their sums."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from mirror._src.base.errors import describe, expected, require_callable, require_int
from mirror._src.base.naming import is_first, name_of, warn_user
from mirror._src.base.types import Array, PyTree, accumulator, is_half, is_numeric, widened
from mirror._src.engine.examples import masking
from mirror._src.training.losses import Metrics, name_in_table
from mirror._src.training.metric import Metric, Weighted
from mirror._src.training.mistakes import describes_batch
from mirror._src.training.named_loss import (
    Labels,
    LossFunction,
    NamedLoss,
    PartOfBatch,
    part_of,
    require_loss_function,
)
from mirror._src.training.precision import Precision

_BASE = 256
_MOST_EXACT = 2**24  # float32 has all integers up to it


def exact_sum(values: Array, mask: Array) -> Array:
    """Returns the sum of the integers or booleans where the mask is True: int32 or digits."""
    size = values.dtype.itemsize
    if size == 1:
        return jnp.sum(values, where=mask, dtype=jnp.int32)
    low = [(values >> 8 * i) & (_BASE - 1) for i in range(size - 1)]
    high = values >> 8 * (size - 1)  # has the sign
    columns = [x.astype(jnp.int32) for x in (*low, high)]
    sums = [jnp.sum(x, where=mask, dtype=jnp.int32) for x in columns]
    return jnp.stack([*sums, jnp.zeros((), jnp.int32)])


def fit_floats(num_examples: int) -> bool:
    """Whether float32 has all sums of digits, 8-bit integers or booleans of this many examples."""
    return num_examples * _BASE <= _MOST_EXACT


def carried_digits(total: Array) -> Array:
    """Returns the digits with all but the last below 256, so that equal sums have equal digits."""
    if not total.ndim:
        return total
    digits = list(total)
    for i in range(len(digits) - 1):
        digits[i + 1] = digits[i + 1] + (digits[i] >> 8)
        digits[i] = digits[i] & (_BASE - 1)
    return jnp.stack(digits)


def as_float(total: Array, dtype: Any) -> Array:
    """Returns a sum as a float; digits are joined."""
    floats = total.astype(dtype)
    if not total.ndim:
        return floats
    result = floats[-1]
    for i in reversed(range(len(floats) - 1)):
        result = result * _BASE + floats[i]
    return result


def number_of(total: Any) -> float | int:
    """Returns a sum as a number of Python; digits are joined exactly.

    >>> number_of(np.asarray([255, 1, 0])), number_of(np.asarray([0, 0, -1]))
    (511, -65536)
    """
    array = np.asarray(total)
    if not array.ndim:
        number: float | int = array.item()
        return number
    return sum(int(digit) * _BASE**i for i, digit in enumerate(array))


LOSS = "loss"
_RETURN_LOSSES = (
    "Return per-example losses, e.g. optax.softmax_cross_entropy_with_integer_labels(logits, "
    "labels) without .mean(): mirror averages over the examples of all replicas."
)
_RETURN_VALUES = (
    "Return one value per example, e.g. {'accuracy': logits.argmax(-1) == labels} without .mean(): "
    "mirror averages over the examples of all replicas."
)
_RETURN_SUMS = (
    "Return per-example sums, e.g. mirror.Weighted((losses * mask).sum(axis=-1), "
    "mask.sum(axis=-1)): mirror divides by the sum of the weights of all replicas."
)
_REDUCE_AXES = "Reduce the other axes: x.mean(axis=-1), or x[:, 0]."
_ONE_LABEL = "For labels of tokens, weight the losses in a function (model, batch)."
_DIGITS = {"bfloat16": "2 to 3", "float16": "3 to 4"}
_SUM_AXES = "Sum over the other axes: x.sum(axis=-1)."


class Sums(NamedTuple):
    """Sums over examples, from which means are computed at the end.

    Attributes:
        totals: Sums of the loss and of each metric. Sums of integers may be digits: see `exact`.
        count: Number of examples, without padding.
        weights: Sums of the weights of the loss and of each metric that is `Weighted`.
        metrics: Each `Metric`, with the arrays of the examples; in evaluation only.
    """

    totals: dict[str, Any]
    count: Any
    weights: dict[str, Any] = {}
    metrics: dict[str, Metric] = {}


@final
class Objective:
    """The user's loss function with weights and penalty: masked losses of a batch, and their sums.

    Args:
        loss_fn: Function `(model, batch)` that returns losses `(B,)`, or losses and a dict of
            metrics, each `(B,)`. Any of them may be `Weighted`. Or the name of a loss.
        sample_weight: Part of a batch by which the losses are multiplied.
        labels: Part of a batch that contains the classes, integers `(B,)`.
        num_classes: Number of classes: labels are less than this.
        class_weight: Factors of the losses by class; 1 for classes that it omits.
        penalty: Function of the model; its scalar is added to the mean loss, and never weighted.
        metrics: Metrics of a named loss.
        precision: The dtype in which the model computes.
        from_logits: Whether the model returns logits, with a named loss.

    Attributes:
        loss_fn: The function, or the named loss.
        functions: All functions that a step calls, the loss first.
        inspect: A function that validates each batch on the host before it is split, or None.
        evaluated: Names of metrics that only evaluation computes, known after a trace.
        is_constant: Whether a trace has found that no trained parameter has a gradient.

    Raises:
        TypeError: If `loss_fn` is neither a name nor a function `(model, batch)`, `penalty` is not
            callable, `class_weight` is not a dict, or `metrics` are passed with a function.
        ValueError: If a name is unknown, or an argument does not fit the loss. For a function, if
            `class_weight` is passed without `labels`, or `labels` without `num_classes`. If
            `num_classes` is less than 1.
    """

    def __init__(
        self,
        loss_fn: LossFunction | str,
        sample_weight: PartOfBatch | None = None,
        labels: PartOfBatch | None = None,
        num_classes: int | None = None,
        class_weight: Mapping[int, float] | None = None,
        penalty: Callable[[Any], Any] | None = None,
        metrics: Metrics | None = None,
        precision: Precision | None = None,
        from_logits: bool = True,
    ) -> None:
        if num_classes is not None:
            require_int("num_classes", num_classes)
        self.loss_fn: Any = loss_fn
        self._labels: Labels | None = None
        name = name_in_table(loss_fn)
        if name is not None:
            options = labels, sample_weight, metrics, num_classes, from_logits
            self.loss_fn = NamedLoss(name, *options)
            self._labels = self.loss_fn.labels
        else:
            require_loss_function(loss_fn, metrics, from_logits)
            is_pair = (labels is None) == (num_classes is None)
            if not is_pair or (class_weight is not None and labels is None):
                raise ValueError(
                    f"labels={labels!r}, num_classes={num_classes!r}, "
                    f"class_weight={class_weight!r}: labels and num_classes must be passed "
                    "together, and class_weight needs both. For example labels='label', "
                    "num_classes=10, class_weight={3: 2.0}."
                )
            if labels is not None:
                self._labels = Labels(labels, num_classes)
        if penalty is not None:
            fix = "Pass a function of the model that returns a scalar."
            require_callable("penalty", penalty, fix)
        self._penalty = penalty
        self.precision = Precision(None) if precision is None else precision
        self.evaluated: tuple[str, ...] = ()
        self._half_precision: str | None = None  # the dtype of the losses, after a trace
        self.is_constant = False
        self._is_traced = False  # since the last warnings
        self._warned: set[str] = set()  # kinds of warnings that were issued, or need not be
        self._sample_weight = sample_weight
        self.inspect = None if self._labels is None else self._labels.inspect
        self._class_weight = class_weight
        if class_weight is not None:
            self._require_class_weight(class_weight)
        more = [penalty, sample_weight, labels, *getattr(self.loss_fn, "metrics", {}).values()]
        self.functions = [self.loss_fn, *filter(callable, more)]

    def _require_class_weight(self, class_weight: Any) -> None:
        if self._labels is None:
            raise ValueError(
                f"class_weight={class_weight!r} does not fit the loss {name_of(self.loss_fn)!r}, "
                "whose labels are not classes. Use 'sparse_categorical_crossentropy', or "
                "sample_weight."
            )
        if not isinstance(class_weight, Mapping):
            fix = "Pass weights by class, for example class_weight={3: 2.0}."
            raise TypeError(expected("class_weight", class_weight, "a dict", fix))
        if self._labels.num_classes is not None:
            _factors(class_weight, self._labels.num_classes)

    def warn_after_trace(self, traced: Callable[[], ClosedJaxpr]) -> None:
        """Warns, after a trace, of losses that may be a mistake, each once.

        mirror adds up losses in float32, and a loss may take logits that a model does not return.

        Args:
            traced: Returns the step that was traced.
        """
        if not self._is_traced:
            return
        self._is_traced = False
        dtype = self._half_precision
        if dtype is not None and is_first(self._warned, "half precision"):
            warn_user(
                f"The per-example losses of {name_of(self.loss_fn)} are {dtype}, with only "
                f"{_DIGITS.get(dtype, 'few')} significant digits. Compute the loss in float32: "
                "logits = logits.astype(jnp.float32)."
            )
        if self.is_constant and is_first(self._warned, "constant"):
            warn_user(
                f"The losses of {name_of(self.loss_fn)} do not depend on the parameters that are "
                "trained, so their gradients are 0. Compute the losses with the `model` that it "
                "receives, without jax.lax.stop_gradient, argmax or comparisons."
            )
        takes_logits = isinstance(self.loss_fn, NamedLoss) and self.loss_fn.takes_logits
        if takes_logits and is_first(self._warned, "logits"):
            message = self.loss_fn.warning_about(traced())
            if message is not None:
                warn_user(message)

    def outputs(self, model: Any, batch: PyTree) -> Any:
        """Returns what the loss function returns."""
        self._is_traced = True
        precision = self.precision.computing(name_of(self.loss_fn))
        with describes_batch(self.loss_fn, batch), precision:
            return self.loss_fn(model, batch)

    def __call__(self, model: Any, batch: PyTree, mask: Array) -> tuple[Array, Array | None, Sums]:
        """Returns the losses of a replica's examples, their weights, and the sums.

        Losses and weights are 0 where the mask is False. The weights are None if every example
        counts as 1.
        """
        with masking(mask):
            values, weights, metrics = self._values(model, batch, mask.shape[0])
        penalty = self._penalty_of(model)
        if LOSS in weights:  # so that it is added to the quotient
            penalty = penalty * widened(weights[LOSS])
        losses = jnp.where(mask, self._weighted(values.pop(LOSS), batch) + penalty, 0)
        totals = {LOSS: losses.sum(dtype=accumulator(losses.dtype)), **_sums(values, mask)}
        divisors = jnp.where(mask, weights[LOSS], 0) if LOSS in weights else None
        sums = Sums(totals, mask.sum(dtype=jnp.int32), _sums(weights, mask), metrics)
        return losses, divisors, sums

    def examples(self, model: Any, batch: PyTree, mask: Array) -> list[Array]:
        """Returns the losses, the metrics and the weights of the examples, and the penalty."""
        with masking(mask):
            values, weights, metrics = self._values(model, batch, mask.shape[0])
        values[LOSS] = self._weighted(values[LOSS], batch)
        penalty = jnp.asarray(self._penalty_of(model))
        return [*values.values(), *weights.values(), *jax.tree.leaves(metrics), penalty]

    def _values(
        self, model: Any, batch: PyTree, size: int
    ) -> tuple[dict[str, Array], dict[str, Array], dict[str, Metric]]:
        """Calls the loss function; returns values, weights of `Weighted` ones, and `Metric`s."""
        result = self.outputs(model, batch)
        is_pair = isinstance(result, tuple) and len(result) == 2
        losses, metrics = result if is_pair else (result, {})
        if not isinstance(metrics, Mapping) or LOSS in metrics:
            raise TypeError(
                f"The metrics of {name_of(self.loss_fn)} must be a dict of per-example values "
                f"without the key {LOSS!r}, got {describe(metrics)}. For example: "
                "return losses, {'accuracy': correct}."
            )
        returned = {LOSS: self._returned(LOSS, losses, size)}
        dtype = returned[LOSS][0].dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"The losses of {name_of(self.loss_fn)} must be floats to have a gradient, got "
                f"{dtype}."
            )
        if is_half(dtype):
            self._half_precision = str(dtype)
        of_rows = {str(name): x for name, x in metrics.items() if isinstance(x, Metric)}
        for name, metric in of_rows.items():
            self._require_rows(name, metric, size)
        self.evaluated = tuple(of_rows)
        for name, value in metrics.items():
            if not isinstance(value, Metric):
                returned[str(name)] = self._returned(str(name), value, size)
        weights = {name: x for name, (_, x) in returned.items() if x is not None}
        return {name: x for name, (x, _) in returned.items()}, weights, of_rows

    def _require_rows(self, name: str, metric: Metric, size: int) -> None:
        for argument, value in metric.inputs.items():
            if np.shape(value)[:1] != (size,):
                raise ValueError(
                    f"{argument} of the metric {name!r} of {name_of(self.loss_fn)} must have shape "
                    f"({size}, ...), one row per example of the replica's batch, got "
                    f"{describe(value)}."
                )

    def _returned(self, name: str, value: Any, size: int) -> tuple[Array, Array | None]:
        """Returns the values of the loss or of a metric, and its weights if it is `Weighted`."""
        what = f"{'The loss' if name == LOSS else repr(name)} of {name_of(self.loss_fn)}"
        if not isinstance(value, Weighted):
            fix = _RETURN_LOSSES if name == LOSS else _RETURN_VALUES
            if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
                fix = "Return a tuple: return losses, {...}."
            return _per_example(what, value, size, fix), None
        weight = f"The weight of {what[0].lower()}{what[1:]}"
        weights = _per_example(weight, value.weights, size, _RETURN_SUMS, _SUM_AXES)
        values = _per_example(what, value.values, size, _RETURN_SUMS, _SUM_AXES)
        return values, weights

    def _weighted(self, losses: Array, batch: PyTree) -> Array:
        if self._sample_weight is not None:
            weights = part_of(batch, self._sample_weight, "sample_weight")
            what = f"sample_weight={self._sample_weight!r}"
            losses = losses * _per_example(what, weights, losses.size)
        if self._class_weight is not None:
            assert self._labels is not None
            assert self._labels.num_classes is not None, "the loss has inferred it"
            labels = jnp.asarray(part_of(batch, self._labels.part, "labels"))
            if labels.shape == (losses.size, 1):
                labels = labels[:, 0]
            labels = _per_example("labels for class_weight", labels, losses.size, _ONE_LABEL)
            factors = _factors(self._class_weight, self._labels.num_classes)
            dtype = jnp.promote_types(losses.dtype, jnp.float32)
            losses = losses * jnp.asarray(factors, dtype)[labels.astype(jnp.int32)]
        return losses

    def _penalty_of(self, model: Any) -> Any:
        if self._penalty is None:
            return 0
        with self.precision.computing():
            penalty = self._penalty(model)
        if isinstance(penalty, dict | list | tuple) or jnp.shape(penalty) != ():
            raise ValueError(
                f"The penalty of {name_of(self._penalty)} must be a scalar, got "
                f"{describe(penalty)}. Sum over all parameters."
            )
        return penalty


def _per_example(
    what: str, value: Any, size: int, fix: str = "", reduce: str = _REDUCE_AXES
) -> Array:
    """Returns the value as an array of real numbers of shape `(size,)`.

    Raises:
        ValueError: If it has another shape.
        TypeError: If it has other numbers, or random keys.
    """
    is_array = hasattr(value, "shape") or isinstance(value, int | float)
    shape = np.shape(value) if is_array else None
    if shape == (size,):
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        if not is_numeric(array.dtype) or jnp.iscomplexobj(array):
            raise TypeError(
                f"{what} must have real numbers, got {array.dtype}. For complex numbers, return "
                "abs(x) or x.real."
            )
        return jnp.asarray(array)
    received = f"an array of shape {shape}" if is_array else describe(value)
    if shape and shape[0] == size:
        fix = reduce
    raise ValueError(
        f"{what} must have shape ({size},), one value per example of the replica's batch, got "
        f"{received}. {fix}".rstrip()
    )


def _sums(values: Mapping[str, Array], mask: Array) -> dict[str, Array]:
    """Sums each value over the examples of a replica."""
    return {name: _sum(value, mask) for name, value in values.items()}


def _sum(value: Array, mask: Array) -> Array:
    if jnp.issubdtype(value.dtype, jnp.floating):
        return jnp.sum(value, where=mask, dtype=accumulator(value.dtype))
    return exact_sum(value, mask)


def add_on_host(a: Sums, b: Sums) -> Sums:
    """Adds the sums of two steps that were run one after the other."""
    return jax.tree.map(lambda x, y: np.add(np.asarray(x), np.asarray(y)), a, b)


def carried(sums: Sums) -> Sums:
    """Returns the sums with normalized digits, so that equal sums are equal arrays."""
    return jax.tree.map(carried_digits, sums)


def _factors(class_weight: Mapping[int, float], num_classes: int) -> np.ndarray:
    """Returns the factor of each class."""
    table = np.ones(num_classes)
    for label, weight in class_weight.items():
        if label not in range(num_classes):
            raise ValueError(
                f"The classes of class_weight must be in [0, {num_classes - 1}] "
                f"(num_classes={num_classes}), got {label!r}."
            )
        table[int(label)] = weight  # `table[True]` are all classes
    return table
