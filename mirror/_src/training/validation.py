"""`Validation`: the validation data of `fit`, and what may be wrong with their length."""

import itertools
import operator
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, final

from mirror._src.base.errors import require_int
from mirror._src.base.naming import depth_of_user
from mirror._src.base.types import PyTree
from mirror._src.data.distribute import DistributedDataset

_FEWEST_BATCHES = 256
_TIMES_THE_EPOCH = 10


@final
class Validation:
    """The validation data of one `fit`.

    Args:
        data: The data, or None.
        num_batches: Maximum number of batches per epoch, or None for all.

    Raises:
        ValueError: If the data certainly has no end and there is no maximum, if there is a maximum
            without data, or if it is less than 1.
        TypeError: If the maximum is not an int.
    """

    def __init__(self, data: Iterable[PyTree] | None, num_batches: int | None) -> None:
        self._data = data
        self._has_ended = False
        self.num_batches = num_batches
        if num_batches is None:
            require_end(
                "validation_data", data, "Limit it: trainer.fit(..., validation_steps=100)."
            )
            return
        require_int("validation_steps", num_batches)
        if data is None:
            raise ValueError(
                f"validation_steps={num_batches} requires validation data: pass "
                "trainer.fit(..., validation_data=...)."
            )

    @property
    def is_given(self) -> bool:
        """Whether there is validation data."""
        return self._data is not None

    def batches(self) -> Iterable[PyTree]:
        """Returns the data of one epoch; an iterator is read no further than the maximum."""
        assert self._data is not None
        if self.num_batches is None or isinstance(self._data, DistributedDataset):
            return self._data
        if isinstance(self._data, Iterator):
            return itertools.islice(self._data, self.num_batches)
        return self._data

    def after_batch(self, count: int, num_trained: int) -> None:
        """Warns once that the data may have no end, if they are suspiciously long.

        Args:
            count: Number of batches of this validation.
            num_trained: Number of batches of the epoch of training.
        """
        if self._has_ended or self.num_batches is not None or _has_len(self._data):
            return
        if count == max(_FEWEST_BATCHES, _TIMES_THE_EPOCH * num_trained):
            warnings.warn(
                f"Validation has read {count} batches of `validation_data`, which has no len(); "
                f"the epoch trained on {num_trained}. If the data has no end, `fit` waits forever. "
                "Limit it: trainer.fit(..., validation_steps=100).",
                stacklevel=depth_of_user(),
            )

    def after_pass(self) -> None:
        """Notes that the data has an end."""
        self._has_ended = True


def require_end(name: str, data: Any, fix: str) -> None:
    """Rejects data that certainly has no end.

    Raises:
        ValueError: If it is an endless iterator of `itertools`, or a dataset whose length is
            infinite, such as the result of `repeat()` in Grain and TensorFlow.
    """
    if isinstance(data, DistributedDataset):
        data = data.source
    if _is_endless(data):
        kind = type(data).__name__
        raise ValueError(f"`{name}` has no end: this {kind} repeats forever. {fix}")


def _is_endless(data: Any) -> bool:
    if isinstance(data, itertools.cycle | itertools.count):
        return True
    if isinstance(data, itertools.repeat):
        return not _has_len(data)
    try:
        return len(data) >= sys.maxsize  # as in Grain
    except Exception as error:
        return "infinite" in str(error)  # as in TensorFlow


def _has_len(data: Any) -> bool:
    return operator.length_hint(data, -1) >= 0
