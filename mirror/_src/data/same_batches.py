"""Finds processes of a job that read other global batches than the rest."""

import itertools
import json
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, final

import jax
import numpy as np

from mirror._src.base.errors import ReplicaDivergenceError
from mirror._src.base.naming import keys
from mirror._src.base.source_lines import line_of_user
from mirror._src.base.types import PyTree
from mirror._src.cluster import store

_MOST_CHECKS = 20  # batches of a pass after which the others are not waited for

_datasets: dict[str, Iterator[int]] = defaultdict(itertools.count)


def name_dataset(kind: str) -> tuple[str, str]:
    """Returns the user's line that creates a dataset, and a key of its own in the store.

    Datasets are told apart by this line and their number there, so that a dataset that only one
    process creates does not shift the others.
    """
    line = os.path.basename(line_of_user().partition(": ")[0])
    place = f"{kind}/{line}"
    return line, f"{place}/{next(_datasets[place])}"


@final
class SameBatches:
    """Compares the first batch of each pass with the other processes, without waiting for them.

    With a global input, every process reads the same batches and places its own rows. Another
    shuffle on one process would use some examples twice and others not at all, without an error.

    It never waits, because a process may look at its data alone: the process that is later finds
    the difference.
    """

    def __init__(self) -> None:
        self._line, self._key = name_dataset("data")
        self._passes = itertools.count()

    def start(self, batches: Iterator[PyTree]) -> Iterator[PyTree]:
        """Returns the batches of a pass, of which the first is compared."""
        return self._compared(batches, f"{self._key}/{next(self._passes)}")

    def _compared(self, batches: Iterator[PyTree], key: str) -> Iterator[PyTree]:
        mine: dict[str, int] = {}
        missing = [i for i in range(store.process_count()) if i != store.process_index()]
        for number, batch in enumerate(batches):
            if number == 0:
                mine = _checksums(batch)
                store.set_default(f"{key}/{store.process_index()}", json.dumps(mine))
            if missing and number < _MOST_CHECKS:
                missing = self._compare(key, mine, missing)
            yield batch
        if missing and mine:  # a short pass
            self._compare(key, mine, missing)

    def _compare(self, key: str, mine: dict[str, int], others: list[int]) -> list[int]:
        """Compares with the processes that have arrived; returns those that have not.

        Raises:
            ReplicaDivergenceError: If one of them has read another batch.
        """
        missing = []
        for i in others:
            text = store.get(f"{key}/{i}", time.monotonic())
            if text is None:
                missing.append(i)
                continue
            theirs = json.loads(text)
            names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
            if names:
                raise ReplicaDivergenceError(
                    f"The dataset of {self._line} yields different batches on process "
                    f"{store.process_index()} and process {i}: {', '.join(names)} of the first "
                    "batch differ. Every process must read the same global batches: shuffle and "
                    "augment with the same seed, for example mirror.data.from_arrays(arrays, "
                    "batch_size, shuffle=True, seed=0)."
                )
        return missing


def _checksums(batch: PyTree) -> dict[str, int]:
    """Returns a checksum of each leaf of a batch that is on the host."""
    return {
        f"batch{keys(path)}": checksum(np.asarray(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if not isinstance(leaf, jax.Array) and _is_numeric(leaf)
    }


def _is_numeric(leaf: Any) -> bool:
    try:
        return np.asarray(leaf).dtype != object
    except Exception:  # not an array: rejected with a message where the batch is placed
        return False


def checksum(array: np.ndarray) -> int:
    """Returns a checksum of the shape, dtype and values of an array."""
    return zlib.crc32(repr((array.shape, array.dtype)).encode() + array.tobytes())
