"""Data of a `Trainer`: arrays become batches; passes over the data, and validation data."""

import itertools
import math
import operator
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, final

import jax
import numpy as np

from mirror._src.base import interrupts
from mirror._src.base.errors import closing, describe, expected, require_int
from mirror._src.base.foreign_arrays import is_array
from mirror._src.base.naming import warn_user
from mirror._src.base.types import PyTree
from mirror._src.data.arrays import ArrayDataset, in_memory
from mirror._src.data.distribute import DistributedDataset
from mirror._src.data.foreign import advice
from mirror._src.data.padded import PaddedBatch, PaddedDataset

_SHOWN_NAMES = 4


def fit_data(
    data: Any,
    validation_data: Any,
    *,
    batch_size: int | None,
    validation_split: float,
    shuffle: bool | None,
    seed: int | None,
) -> tuple[Iterable[PyTree], Iterable[PyTree] | None]:
    """Returns the training and validation data of `Trainer.fit`, as iterables of global batches.

    Raises:
        ValueError: If in-memory arrays are passed without `batch_size`, an option for in-memory
            arrays with other data, or `validation_split` is out of range.
        TypeError: If an option has the wrong type, or the data are neither arrays nor iterable.
    """
    _require_data("data", data)
    if validation_data is not None:
        _require_data("validation_data", validation_data)
    if not has_arrays(data, batch_size):
        options = {
            "batch_size": batch_size,
            "validation_split": validation_split or None,
            "shuffle": shuffle,
            "seed": seed,
        }
        _reject_options(data, options)
        if validation_data is not None and has_arrays(validation_data):
            raise ValueError(
                f"`validation_data` is {_shown(validation_data)}, but `data` is a dataset of "
                "batches. Choose the batch size: "
                "validation_data=mirror.data.from_arrays(validation_data, batch_size=32)."
            )
        return data, validation_data
    if shuffle is not None and not isinstance(shuffle, bool):
        raise TypeError(expected("shuffle", shuffle, "True or False"))
    batch_size = _require_batch_size("fit", data, batch_size)
    rows = in_memory("data", data)
    held_out = _num_held_out(rows.size, validation_split)
    if held_out and validation_data is not None:
        raise ValueError(
            f"validation_split={validation_split} and `validation_data` were both passed. Pass "
            "one of them."
        )
    if held_out:
        end = rows.size - held_out
        validation_data = ArrayDataset(rows.part(slice(end, None)), batch_size)
        rows = rows.part(slice(end))
    elif validation_data is not None and has_arrays(validation_data):
        validation_data = ArrayDataset(in_memory("validation_data", validation_data), batch_size)
    seed = 0 if seed is None else seed
    training: Any = ArrayDataset(rows, batch_size, shuffle=shuffle is not False, seed=seed)
    return training, validation_data


def batches_of(method: str, data: Any, batch_size: int | None) -> Iterable[PyTree]:
    """Returns the data of another method than `fit` as an iterable of batches.

    Raises:
        ValueError: If in-memory arrays are passed without `batch_size`, or `batch_size` with other
            data.
        TypeError: If the data are neither arrays nor iterable.
    """
    _require_data("data", data)
    if not has_arrays(data, batch_size):
        _reject_options(data, {"batch_size": batch_size})
        return data
    batch_size = _require_batch_size(method, data, batch_size)
    return ArrayDataset(in_memory("data", data), batch_size)


def _require_data(name: str, data: Any) -> None:
    if is_array(data) or (isinstance(data, Iterable) and not isinstance(data, str)):
        return
    fix = advice(data) or "Pass arrays, as in trainer.fit((x, y), batch_size=32)."
    raise TypeError(expected(name, data, "in-memory arrays or an iterable of batches", fix))


def first_batch(data: Any) -> PyTree:
    """Returns a batch itself, or the first batch of a dataset, without consuming it.

    Raises:
        TypeError: If the data are an iterator, which this would consume.
        ValueError: If there is no batch.
    """
    if isinstance(data, Mapping) or has_arrays(data):
        return data
    if is_iterator(data) or not isinstance(data, Iterable) or isinstance(data, str):
        fix = "Pass one batch, for example trainer.summary(next(iter(data)))."
        raise TypeError(expected("data", data, "a batch or a dataset", fix))
    if isinstance(data, ArrayDataset | DistributedDataset):
        batches = data.peek()
    else:
        batches = list(itertools.islice(data, 1))
    if not batches:
        raise ValueError(NO_DATA.format("data"))
    return batches[0]


def has_arrays(data: Any, batch_size: int | None = None) -> bool:
    """Whether the data are in-memory arrays and not an iterable of batches.

    These are an array, a dict of arrays and a tuple of arrays, also nested. A list is an iterable
    of batches. So is a tuple of trees, such as `({"x": x}, {"x": x})`, unless there is a batch
    size, because it may also be the features and the labels of all examples.
    """
    if is_array(data):
        return True
    if not isinstance(data, dict | tuple):
        return False
    is_pass = isinstance(data, tuple) and not any(map(is_array, data))
    if is_pass and batch_size is None:
        return False
    leaves = jax.tree.leaves(data, is_leaf=lambda x: isinstance(x, list))
    if batch_size is None:
        return bool(leaves) and all(map(is_array, leaves))
    return all(is_array(leaf) or _is_column(leaf) for leaf in leaves)


def _is_column(leaf: Any) -> bool:
    """Whether this is a scalar or a list of scalars, whose error names the leaf."""
    leaves = leaf if isinstance(leaf, list) else [leaf]
    return all(isinstance(each, int | float | str) for each in leaves)


def _require_batch_size(method: str, data: Any, batch_size: int | None) -> int:
    if batch_size is None:
        raise ValueError(
            f"`data` is {_shown(data)}, so `batch_size` is required, the number of examples per "
            f"step of all replicas together: trainer.{method}(data, batch_size=32)."
            + ("" if is_array(data) else " If these are several datasets, pass one of them.")
        )
    return batch_size


def _reject_options(data: Any, options: Mapping[str, Any]) -> None:
    """Rejects options that only in-memory arrays have."""
    given = {option: value for option, value in options.items() if value is not None}
    if not given:
        return
    written = ", ".join(f"{option}={value!r}" for option, value in given.items())
    if isinstance(data, ArrayDataset):
        fix = (
            f"The dataset has batch_size={data.batch_size}; its options are arguments of "
            "mirror.data.from_arrays(arrays, batch_size, shuffle=True, seed=0)."
        )
    elif isinstance(data, list) and all(map(is_array, data)):
        fix = "A list is an iterable of batches. For arrays of inputs and labels, pass a tuple: "
        fix += "(x, y)."
    elif isinstance(data, dict) and list in map(type, data.values()):
        fix = "Convert the lists to arrays: np.asarray(rows)."
    else:
        fix = (
            "Pass arrays, as in trainer.fit((x, y), batch_size=32), or choose the batch size and "
            "the order in the dataset."
        )
    raise ValueError(
        f"{written} requires in-memory arrays: a dict or a tuple of arrays, or one array. "
        f"`data` is {_shown(data)}. {fix}"
    )


def _num_held_out(count: int, fraction: Any) -> int:
    """Returns the number of examples at the end that are for validation, as Keras counts them."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float | np.number):
        what = "a fraction of the examples, at least 0 and less than 1"
        raise TypeError(expected("validation_split", fraction, what))
    if not 0 <= fraction < 1:
        fix = "validation_split=0.2 holds out the last 20% of the examples."
        what = "at least 0 and less than 1"
        raise ValueError(expected("validation_split", fraction, what, fix))
    held_out = count - math.floor(count * (1 - float(fraction)))
    if fraction and not 0 < held_out < count:
        raise ValueError(
            f"validation_split={fraction} of {count} examples leaves {count - held_out} for "
            f"training and {held_out} for validation. Both need at least one."
        )
    return held_out


def _shown(data: Any) -> str:
    """Describes data in a few words: `a tuple of arrays (float32[60,3], int64[60])`."""
    if is_array(data):
        return f"an array, {describe(data)}"
    if not has_arrays(data):
        return f"a list of {len(data)} batches" if isinstance(data, list) else describe(data)
    parts = data.items() if isinstance(data, dict) else enumerate(data)
    shown = [
        (f"{key!r}: " if isinstance(data, dict) else "")
        + (describe(part) if is_array(part) else f"a {type(part).__name__}")
        for key, part in parts
    ]
    omitted = ", ..." if len(shown) > _SHOWN_NAMES else ""
    listed = ", ".join(shown[:_SHOWN_NAMES]) + omitted
    return f"a {type(data).__name__} of arrays ({listed})"


NO_DATA = (
    "`{}` yielded no batch. Pass batches with at least one example; an exhausted generator "
    "yields nothing more."
)


@final
class Stream:
    """The launches of one pass over the data after the other."""

    def __init__(self, data: PaddedDataset) -> None:
        self._data = data
        self._batches: Any = None
        self._rest: PaddedBatch | None = None

    def next_batch(self, number: int | None = None, most: int | None = None) -> PaddedBatch | None:
        """Returns the next launch, or None at the end of the pass. An interrupt ends the wait.

        Args:
            number: Number of the pass, which shuffling datasets receive with `set_epoch`. Defaults
                to the one that they have.
            most: Maximum number of batches; the rest of a larger group is the next launch. None
                takes the whole group.
        """
        interrupts.check()
        with interrupts.immediate():
            if self._batches is None:
                if number is not None:
                    self._data.set_epoch(number)
                self._batches = iter(self._data)
            batch, self._rest = self._rest or next(self._batches, None), None
        if batch is not None and most is not None and most < batch.num_batches:
            batch, self._rest = batch.split(most)
        return batch

    def close(self) -> None:
        """Ends the pass and releases the data."""
        batches, self._batches, self._rest = self._batches, None, None
        if batches is not None:
            batches.close()


def whole_pass(
    data: DistributedDataset[Any],
    *,
    name: str = "data",
    most: int | None = None,
    fix: str = "",
    **options: Any,
) -> Generator[PaddedBatch]:
    """Yields the batches of one pass, all or the first `most`.

    Args:
        data: The dataset.
        name: Its name, for messages.
        most: Maximum number of batches.
        fix: How to limit data without an end: said after many batches if the length is unknown.
        options: Arguments of `DistributedDataset.padded`.

    Raises:
        ValueError: If there is no batch.
    """
    padded = data.padded(**options)
    padded.read_at_most(most)
    stream, count = Stream(padded), 0
    many = _MANY_BATCHES if fix and not _has_len(data.source) else 0
    with closing("closing the data", stream.close):
        for count, batch in enumerate(iter(stream.next_batch, None), 1):
            yield batch
            _say_if_many(count, many, fix)
    if not count:
        raise ValueError(NO_DATA.format(name))


def _say_if_many(count: int, many: int, fix: str) -> None:
    if count == many:
        text = f"{count:,} batches have been read. If `data` has no end, this lasts forever. {fix}"
        interrupts.say(text)


_MANY_BATCHES = 10_000
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
        self.data: Any = data
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

    def observed(
        self, num_trained: int, batches: Iterator[PaddedBatch]
    ) -> Generator[PaddedBatch, None, None]:
        """Yields the batches of an epoch; warns in the first one if they may have no end.

        Args:
            num_trained: Number of batches of the epoch of training.
            batches: The batches of this validation.

        Raises:
            ValueError: If they repeat: after the warning, one equals the first.
        """
        is_known = self._has_ended or self.num_batches is not None or _has_len(self.data)
        most = max(_FEWEST_BATCHES, _TIMES_THE_EPOCH * num_trained)
        first: Any = None
        for count, batch in enumerate(batches, 1):
            yield batch
            if is_known:
                continue
            first = batch if first is None else first
            limit = "Limit it: trainer.fit(..., validation_steps=100)."
            if count == most:
                warn_user(
                    f"Validation has read {count} batches of `validation_data`, which has no "
                    f"len(); the epoch trained on {num_trained}. If the data has no end, `fit` "
                    f"waits forever. {limit}"
                )
            elif count > most and _are_equal(first, batch):
                raise ValueError(
                    f"`validation_data` has no end: batch {count} equals the first one. {limit}"
                )
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


def is_iterator(data: Any) -> bool:
    """Whether the data have one pass only."""
    # The error of its `__next__` makes a distributed dataset look like one.
    return isinstance(data, Iterator) and not isinstance(data, DistributedDataset)


def _are_equal(first: PaddedBatch, other: PaddedBatch) -> bool:
    """Whether two batches have the same bits; False in several processes, which may differ."""
    mask: Any = first.mask.stacked
    if first.types != other.types or not mask.is_fully_addressable:
        return False
    pairs = zip(*(jax.tree.leaves((x.batch, x.mask)) for x in (first, other)), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def _has_len(data: Any) -> bool:
    return operator.length_hint(data, -1) >= 0
