"""A loss by name: what it reads from a batch, its outputs, and the checks of its labels."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr

from mirror._src.base.errors import describe, expected
from mirror._src.base.naming import name_of, parameter_names, require_parameters, signature_of
from mirror._src.base.types import Array, PyTree, is_half
from mirror._src.jaxprs.origins import activation_of
from mirror._src.training.losses import (
    LOSSES,
    Metrics,
    aligned,
    is_named,
    logits_of,
    metric_functions,
    per_example,
    require_loss,
)

PartOfBatch: TypeAlias = str | int | Callable[[PyTree], Any]

_lock = threading.Lock()  # batches are read in another thread than steps are traced


@final
class Labels:
    """The labels of each batch, and the range that they must be in.

    The number of classes may be unknown until the step is traced, which returns the logits. Batches
    that were read ahead by then are checked as soon as it is known, and later ones when they are
    read.

    Args:
        part: Part of a batch that contains the labels.
        num_classes: Number of classes, or None if the logits determine it.
        are_columns: Whether labels may have more axes than `(B,)`.
        are_probabilities: Whether labels may be floats from 0 to 1, instead of integers.
    """

    def __init__(
        self,
        part: PartOfBatch,
        num_classes: int | None,
        *,
        are_columns: bool = False,
        are_probabilities: bool = False,
    ) -> None:
        self.part = part
        self.num_classes = num_classes
        self._are_columns = are_columns
        self._are_probabilities = are_probabilities
        self._source = "" if num_classes is None else f"num_classes={num_classes}"
        self._waiting: list[tuple[int, np.ndarray]] = []

    def inspect(self, number: int, batch: PyTree) -> None:
        """Checks the labels of a batch on the host.

        Raises:
            ValueError: If they have the wrong shape or dtype, or are out of range.
        """
        labels = np.asarray(part_of(batch, self.part, "labels"))
        is_integer = np.issubdtype(labels.dtype, np.integer)
        if self._are_columns:
            if not is_integer and not self._are_probabilities:
                return  # the loss names the dtype
        elif labels.ndim != 1 or not is_integer:
            raise ValueError(
                f"`labels` must be integers, one per example, got {describe(labels)} in batch "
                f"{number}. Convert one-hot rows with x.argmax(-1), and columns with x[:, 0]."
            )
        with _lock:
            if self.num_classes is None:
                self._waiting.append((number, labels))
                return
        self._require_range(number, labels)

    def infer(self, num_classes: int) -> None:
        """Sets the number of classes from the width of the logits, if it was not passed.

        Raises:
            ValueError: If there are fewer logits than classes, or labels of a batch that was read
                ahead are out of range.
        """
        with _lock:
            if self.num_classes is None:
                self.num_classes = num_classes
                self._source = f"the model returns {num_classes} logits per example"
            waiting, self._waiting = self._waiting, []
        if num_classes < self.num_classes:
            raise ValueError(
                f"num_classes={self.num_classes}, but the model returns {num_classes} logits per "
                "example. Return one logit per class."
            )
        for number, labels in waiting:
            self._require_range(number, labels)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_waiting": []}

    def _require_range(self, number: int, labels: np.ndarray) -> None:
        assert self.num_classes is not None
        most = self.num_classes - 1
        wrong = np.argwhere(~((labels >= 0) & (labels <= most)))  # also for NaN
        if not len(wrong):
            return
        first = labels[tuple(wrong[0])]
        if self._are_probabilities:
            raise ValueError(
                f"Labels of batch {number} must be from 0 to 1 for binary cross-entropy, but row "
                f"{wrong[0][0]} is {first} (invalid labels in this batch: {len(wrong)}). Map two "
                "classes to 0 and 1: (labels > 0)."
            )
        raise ValueError(
            f"Labels of batch {number} must be in [0, {most}] ({self._source}), but row "
            f"{wrong[0][0]} is {first} (invalid labels in this batch: {len(wrong)}). JAX does not "
            "check indices: an invalid label would silently train the wrong class or produce NaN."
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


MODEL_OUTPUTS = "mirror.model_outputs"  # of `checkpoint_name`: computes nothing
LossFunction: TypeAlias = Callable[[Any, PyTree], Any]

_LABEL_KEYS = ("label", "labels", "y", "target", "targets")
_OF_CLASSES = {  # losses of other libraries, in lowercase without "loss"
    "crossentropy": "sparse_categorical_crossentropy",
    "bcewithlogits": "binary_crossentropy",
    "l1": "mean_absolute_error",
    "mse": "mean_squared_error",
    "smoothl1": "huber",
}


@final
class NamedLoss:
    """Calls the model with the inputs of a batch, and compares the outputs with its labels.

    A batch is `(inputs, labels)`, or a dict with two entries, one of which `labels` names. The
    entry of `sample_weight`, if there is one, is a third.

    Args:
        name: A name in the table of losses.
        labels: Key or index of the labels. Defaults to 1 in tuples.
        sample_weight: Key or index of the weights; other values do not select an entry.
        metrics: Names or functions `(outputs, labels)`, or a dict of them.
        num_classes: Number of classes, or None if the logits determine it.
        from_logits: Whether the model returns logits. Otherwise it returns probabilities.

    Attributes:
        metrics: The functions of the metrics, by name.
    """

    def __init__(
        self,
        name: str,
        labels: PartOfBatch | None,
        sample_weight: PartOfBatch | None,
        metrics: Metrics | None,
        num_classes: int | None,
        from_logits: bool,
    ) -> None:
        self.__name__ = name  # for messages
        self._loss = require_loss(name)
        if callable(labels):
            fix = "Pass a key or an index, or write a function (model, batch) for the loss."
            raise TypeError(expected("labels", labels, f"a part of the batch for {name!r}", fix))
        if num_classes is not None and self._loss.kind != "classes":
            raise ValueError(
                f"num_classes={num_classes} does not fit the loss {name!r}, whose labels are not "
                "integer classes. Omit num_classes, or use 'sparse_categorical_crossentropy'."
            )
        self.takes_logits = self._loss.kind != "values" and from_logits
        if not from_logits and self._loss.kind == "values":
            raise ValueError(
                f"from_logits={from_logits} does not fit the loss {name!r}, which compares outputs "
                "with labels directly. Omit from_logits."
            )
        self._key = labels
        self._weight = None if callable(sample_weight) else sample_weight
        self.metrics = metric_functions(metrics, self._loss.kind, name)
        self._of_logits = {key for key, fn in self.metrics.items() if is_named(fn)}
        self.labels: Labels | None = None
        if self._loss.kind == "classes":
            self.labels = Labels(self.labels_of, num_classes, are_columns=True)
        elif self._loss.kind == "binary":
            self.labels = Labels(self.labels_of, 2, are_columns=True, are_probabilities=True)

    def __call__(self, model: Any, batch: PyTree) -> tuple[Array, dict[str, Array]]:
        """Returns the losses and the metrics of a batch, each with one value per example."""
        inputs, labels = self._parts(batch)
        outputs = model(inputs)
        if not isinstance(outputs, jax.Array):
            raise TypeError(
                f"The model must return one array for the loss {self.__name__!r}, got "
                f"{describe(outputs)}. {self._function}"
            )
        if not hasattr(labels, "shape"):
            raise TypeError(
                f"Labels for {self.__name__!r} must be one array, got {describe(labels)}. "
                f"{self._function}"
            )
        if self.takes_logits:
            outputs = checkpoint_name(outputs, MODEL_OUTPUTS)
        if is_half(outputs.dtype):  # with few digits, a loss hardly changes
            outputs = outputs.astype(jnp.float32)
        outputs, labels = aligned(self.__name__, self._loss.kind, outputs, jnp.asarray(labels))
        if self.labels is not None and self._loss.kind == "classes":
            self.labels.infer(outputs.shape[-1])
        logits = outputs
        if self._loss.kind != "values" and not self.takes_logits:
            logits = logits_of(self._loss.kind, outputs)
        losses = per_example(self._loss.fn(logits, labels))
        metrics = {
            name: fn(logits if name in self._of_logits else outputs, labels)
            for name, fn in self.metrics.items()
        }
        return losses, metrics

    def warning_about(self, program: ClosedJaxpr) -> str | None:
        """Returns a warning about a step whose model returns probabilities instead of logits."""
        function = activation_of(program, MODEL_OUTPUTS)
        if function is None:
            return None
        return (
            f"The model ends in a {function}, but {self.__name__!r} computes the loss from logits, "
            f"and applies a {function} itself: the model would hardly learn. Remove the {function} "
            "at the end of the model, or pass mirror.Trainer(..., from_logits=False)."
        )

    def labels_of(self, batch: PyTree) -> Any:
        """Returns the labels of a batch."""
        return self._parts(batch)[1]

    def inputs_of(self, batch: PyTree) -> Any:
        """Returns the inputs of a batch, which may have no labels, or be the inputs themselves.

        Raises:
            ValueError: If several entries of the batch may be the inputs.
        """
        if not isinstance(batch, Mapping | tuple | list):
            return batch
        key, inputs = self._entries(batch)
        if len(inputs) != 1:
            raise inputs_unknown(batch, f"the loss is {self.__name__!r} with labels={key!r}")
        return batch[inputs[0]]

    def _parts(self, batch: PyTree) -> tuple[Any, Any]:
        """Returns the inputs and the labels of a batch.

        Raises:
            ValueError: If the batch does not have exactly these two parts.
        """
        if not isinstance(batch, Mapping | tuple | list):
            fix = "If the data are a list of arrays, pass a tuple: fit((x, y), batch_size=32)."
            raise self._not_a_pair(batch, f"{fix} {self._function}")
        key, inputs = self._entries(batch)
        if key is None:
            guess = next((name for name in _LABEL_KEYS if name in batch), "label")
            fix = f"Name the labels: mirror.Trainer(..., labels={guess!r})."
            raise self._not_a_pair(batch, fix)
        labels = part_of(batch, key, "labels")
        if len(inputs) != 1:
            fix = ""
            if len(inputs) > 1 and self._weight is None and len(batch) == 3:
                weights = min(reversed(inputs), key=lambda name: np.ndim(batch[name]))
                fix = f"If the third entry contains weights, pass sample_weight={weights!r}. "
            raise self._not_a_pair(batch, fix + self._function)
        return batch[inputs[0]], labels

    def _entries(self, batch: Mapping[Any, Any] | Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns the key of the labels, None if it is unknown, and the keys of inputs."""
        names = list(batch) if isinstance(batch, Mapping) else list(range(len(batch)))
        key = 1 if self._key is None and not isinstance(batch, Mapping) else self._key
        return key, [name for name in names if name not in (key, self._weight)]

    def _not_a_pair(self, batch: PyTree, fix: str) -> ValueError:
        pair = "a tuple (inputs, labels), or a dict with two entries and labels=..."
        if isinstance(batch, Mapping):
            shown = f"a dict with the keys {list(batch)}"
        elif isinstance(batch, tuple | list):
            shown = f"a {type(batch).__name__} of {len(batch)}: {', '.join(map(describe, batch))}"
        else:
            shown = describe(batch)
        return ValueError(
            f"With the loss {self.__name__!r}, a batch must be {pair}, got {shown}. {fix}"
        )

    @property
    def _function(self) -> str:
        """The loss as a function that the user can change, for messages."""
        outputs = "logits" if "logits" in self._loss.line else "outputs"
        return (
            "Or write the loss as a function:\n"
            "    def loss_fn(model, batch):\n"
            "        inputs, labels = ...  # from the batch\n"
            f"        {outputs} = model(inputs)\n"
            f"        return {self._loss.line}"
        )


def inputs_unknown(batch: PyTree, why: str) -> ValueError:
    """Returns the error for a batch of which several entries, or the whole, may be the inputs."""
    is_mapping = isinstance(batch, Mapping)
    first = next(iter(batch), "x") if is_mapping else 0
    shown = f"a dict with the keys {list(batch)}" if is_mapping else f"a tuple of {len(batch)}"
    return ValueError(
        "trainer.predict and trainer.export call the model on the inputs of a batch, but "
        f"{why}, and the batch is {shown}. Pass the function to compute, as in "
        f"trainer.predict(data, lambda model, batch: model(batch[{first!r}])), or model(batch) if "
        "all of it is the inputs."
    )


def require_loss_function(loss_fn: Any, metrics: Metrics | None, from_logits: bool) -> None:
    """Rejects a loss that is not a function of model and batch, and options of named losses.

    Raises:
        TypeError: If it is not a function, takes other arguments, or an option is passed with it.
    """
    if not callable(loss_fn):
        fix = "Pass a name, such as 'mse', or a function (model, batch) -> per-example losses."
        raise TypeError(expected("loss_fn", loss_fn, "a name or a function", fix))
    _require_parameters(loss_fn)
    if not from_logits:
        raise TypeError(
            f"from_logits={from_logits} requires the name of a loss, but loss_fn is the function "
            f"{name_of(loss_fn)}, which receives what the model returns. Omit from_logits."
        )
    if metrics is not None:
        raise TypeError(
            f"`metrics` requires the name of a loss, but loss_fn is the function "
            f"{name_of(loss_fn)}. Return the metrics from it: return losses, {{'accuracy': "
            "logits.argmax(-1) == labels}."
        )


def _require_parameters(fn: Callable[..., Any]) -> None:
    """Rejects losses of other libraries, and functions of other arguments than `(model, batch)`."""
    kind = fn if isinstance(fn, type) else type(fn)
    module = fn.__module__ if isinstance(getattr(fn, "__module__", None), str) else kind.__module__
    library = module.partition(".")[0]
    name = getattr(fn, "__name__", kind.__name__)
    if library in ("keras", "tensorflow", "tf_keras", "torch"):
        plain = name.lower().replace("_", "").removesuffix("loss")
        ours = _OF_CLASSES.get(plain) or next(
            (loss for loss in LOSSES if loss.replace("_", "") == plain), None
        )
        fix = "Write a function (model, batch) -> per-example losses."
        if ours is not None:
            fix = f"Pass its name, {ours!r}, and let the model return logits."
        raise TypeError(f"`loss_fn` is {name} of {library}, which JAX cannot differentiate. {fix}")
    parameters = parameter_names(fn)
    first = next(iter(parameters), "")
    if library == "optax" or first in ("logits", "y_true", "y_pred", "predictions", "outputs"):
        where = "optax.losses." if library == "optax" else ""
        order = "labels, outputs" if first == "y_true" else "outputs, labels"
        raise TypeError(
            f"`loss_fn` is {name}{signature_of(fn)}, but a Trainer calls loss_fn(model, batch). "
            "Wrap it:\n"
            "    def loss_fn(model, batch):\n"
            "        inputs, labels = batch\n"
            "        outputs = model(inputs)\n"
            f"        return {where}{name}({order})  # one value per example"
        )
    unpack = ", ".join(parameters[1:]) or "x, y"
    fix = f"Take the batch as one argument, and unpack it: {unpack} = batch, or batch['x']."
    require_parameters(fn, f"`loss_fn` ({name})", ("model", "batch"), fix)
