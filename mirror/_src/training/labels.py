"""The labels of a batch: selected, and checked on the host before a batch is split."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

import numpy as np

from mirror._src.base.errors import describe
from mirror._src.base.types import PyTree

PartOfBatch: TypeAlias = str | int | Callable[[PyTree], Any]


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
        self._lock = threading.Lock()  # batches are read in another thread than steps are traced

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
        with self._lock:
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
        with self._lock:
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
        state = {**vars(self), "_waiting": []}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

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
