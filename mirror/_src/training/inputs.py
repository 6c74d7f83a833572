"""Data of a `Trainer`: in-memory arrays are split into batches, anything else yields batches."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mirror._src.base.errors import describe, expected
from mirror._src.base.types import PyTree
from mirror._src.data.arrays import ArrayDataset, batched, in_memory
from mirror._src.data.distribute import DistributedDataset
from mirror._src.data.foreign import is_array
from mirror._src.training.stream import NO_DATA

_SHOWN_NAMES = 4


class FitData(NamedTuple):
    """The data of one `fit`: iterables of global batches."""

    training: Iterable[PyTree]
    validation: Iterable[PyTree] | None


def fit_data(
    data: Any,
    validation_data: Any,
    *,
    batch_size: int | None,
    validation_split: float,
    shuffle: bool | None,
    seed: int | None,
) -> FitData:
    """Returns the data of `Trainer.fit`.

    Raises:
        ValueError: If in-memory arrays are passed without `batch_size`, an option for in-memory
            arrays with other data, or `validation_split` is out of range.
        TypeError: If an option has the wrong type.
    """
    if not has_arrays(data, batch_size):
        options = {
            "batch_size": batch_size,
            "validation_split": validation_split or None,
            "shuffle": shuffle,
            "seed": seed,
        }
        _reject_options("data", data, options)
        if validation_data is not None and has_arrays(validation_data):
            raise ValueError(
                f"`validation_data` is {_shown(validation_data)}, but `data` is a dataset of "
                "batches. Choose the batch size: "
                "validation_data=mirror.data.from_arrays(validation_data, batch_size=32)."
            )
        return FitData(data, validation_data)
    if shuffle is not None and not isinstance(shuffle, bool):
        raise TypeError(expected("shuffle", shuffle, "True or False"))
    batch_size = _require_batch_size("fit", "data", data, batch_size)
    rows = in_memory("data", data)
    held_out = _num_held_out(rows.size, validation_split)
    if held_out and validation_data is not None:
        raise ValueError(
            f"validation_split={validation_split} and `validation_data` were both passed. Pass "
            "one of them."
        )
    if held_out:
        end = rows.size - held_out
        validation_data = batched(rows.without(end), batch_size, shuffle=False, seed=0)
        rows = rows.first(end)
    elif validation_data is not None and has_arrays(validation_data):
        whole = in_memory("validation_data", validation_data)
        validation_data = batched(whole, batch_size, shuffle=False, seed=0)
    shuffles = shuffle is not False
    training = batched(rows, batch_size, shuffle=shuffles, seed=0 if seed is None else seed)
    return FitData(training, validation_data)


def batches_of(method: str, data: Any, batch_size: int | None) -> Iterable[PyTree]:
    """Returns the data of another method than `fit` as an iterable of batches.

    Raises:
        ValueError: If in-memory arrays are passed without `batch_size`, or `batch_size` with other
            data.
    """
    if not has_arrays(data, batch_size):
        _reject_options("data", data, {"batch_size": batch_size})
        return data
    batch_size = _require_batch_size(method, "data", data, batch_size)
    return batched(in_memory("data", data), batch_size, shuffle=False, seed=0)


def first_batch(data: Any) -> PyTree:
    """Returns a batch itself, or the first batch of a dataset, without consuming it.

    Raises:
        TypeError: If the data are an iterator, which this would consume.
        ValueError: If there is no batch.
    """
    if isinstance(data, Mapping) or has_arrays(data):
        return data
    is_iterator = isinstance(data, Iterator) and not isinstance(data, DistributedDataset)
    if is_iterator or not isinstance(data, Iterable):
        fix = "Pass one batch, for example trainer.summary(next(iter(data)))."
        raise TypeError(expected("data", data, "a batch or a dataset", fix))
    if isinstance(data, ArrayDataset | DistributedDataset):
        batches = data.peek()
    else:
        batches = list(itertools.islice(data, 1))
    if not batches:
        raise ValueError(NO_DATA)
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


def _require_batch_size(method: str, name: str, data: Any, batch_size: int | None) -> int:
    if batch_size is None:
        raise ValueError(
            f"`{name}` is {_shown(data)}, so `batch_size` is required, the number of examples per "
            f"step of all replicas together: trainer.{method}({name}, batch_size=32). To "
            "train on several datasets, such as a dict of splits, pass one of them."
        )
    return batch_size


def _reject_options(name: str, data: Any, options: Mapping[str, Any]) -> None:
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
    else:
        fix = (
            "Pass arrays, as in trainer.fit((x, y), batch_size=32), or choose the batch size and "
            "the order in the dataset."
        )
    raise ValueError(
        f"{written} requires in-memory arrays: a dict or a tuple of arrays, or one array. "
        f"`{name}` is {_shown(data)}. {fix}"
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
