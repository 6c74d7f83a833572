"""`from_arrays`: whole arrays in memory, as a dataset of global batches."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from mirror._src.data.batches import HostBatch, host_batch
from mirror._src.utils.errors import describe, require_int
from mirror._src.utils.modules import set_module
from mirror._src.utils.types import PyTree

_MOST_SEED = 2**32 - 1


@set_module("mirror.data")
@final
class ArrayDataset:
    """Global batches of arrays in memory; made by `mirror.data.from_arrays`.

    Each `iter` is one epoch. Epochs are counted from 0, and the order of each is a function of the
    seed and its number alone.

    Attributes:
        num_examples: how many rows the arrays have.
        batch_size: how many of them a batch has; the last one may have fewer.

    >>> data = mirror.data.from_arrays(np.arange(5), batch_size=2, shuffle=True)
    >>> first = [batch.tolist() for batch in data]  # epoch 0
    >>> second = [batch.tolist() for batch in data]  # epoch 1, in another order
    >>> data.set_epoch(0)
    >>> first == [batch.tolist() for batch in data] != second
    True
    """

    def __init__(
        self, rows: HostBatch, batch_size: int, shuffle: bool, seed: int, drop_remainder: bool
    ) -> None:
        self.num_examples = rows.size
        self.batch_size = batch_size
        self._rows = rows
        self._shuffle = shuffle
        self._seed = seed
        self._drop_remainder = drop_remainder
        self._epoch = 0

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        whole, rest = divmod(self.num_examples, self.batch_size)
        return whole + bool(rest and not self._drop_remainder)

    def __iter__(self) -> Iterator[PyTree]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return map(functools.partial(self._batch, epoch), range(len(self)))

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next `iter` starts; the ones after it follow.

        Raises:
            ValueError: it is negative.
            TypeError: it is no int.
        """
        require_int("epoch", epoch, 0)
        self._epoch = int(epoch)

    def peek(self, count: int = 1) -> list[PyTree]:
        """The first batches of the epoch that the next `iter` starts."""
        return [self._batch(self._epoch, i) for i in range(min(count, len(self)))]

    def _batch(self, epoch: int, number: int) -> PyTree:
        start = number * self.batch_size
        rows: Any = slice(start, start + self.batch_size)
        if self._shuffle:
            rows = self._order[epoch * len(self) + number]
        return self._rows.map(lambda leaf: leaf[rows])

    @functools.cached_property
    def _order(self) -> Sequence[np.ndarray]:
        """Row numbers of all batches of all epochs, one after the other."""
        grain = _grain()
        order = grain.MapDataset.range(self.num_examples).seed(self._seed).shuffle()
        return order.batch(self.batch_size, drop_remainder=self._drop_remainder).repeat()

    def __repr__(self) -> str:
        leaves = zip(self._rows.names, self._rows.leaves, strict=True)
        arrays = ", ".join(f"{name}: {describe(leaf)}" for name, leaf in leaves)
        shuffled = f", shuffled with seed {self._seed}" if self._shuffle else ""
        return f"ArrayDataset({len(self)} batches of {self.batch_size}{shuffled}; {arrays})"


def from_arrays(
    arrays: PyTree,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_remainder: bool = False,
) -> ArrayDataset:
    """A dataset of global batches of arrays in memory: NumPy's, JAX's or torch's.

    >>> data = from_arrays({"x": np.zeros((5, 2)), "y": np.arange(5)}, batch_size=2)
    >>> [batch["y"].tolist() for batch in data]
    [[0, 1], [2, 3], [4]]

    Args:
        arrays: a tree of arrays of equally many rows: a dict, a tuple, or one array. They are not
            copied, so leave them as they are.
        batch_size: how many rows make a batch, for all replicas together.
        shuffle: whether each epoch has an order of its own. Grain makes it; extra `train`.
        seed: chooses the orders; 0 to 2**32 - 1.
        drop_remainder: leaves out a last batch of fewer rows.

    Returns:
        An iterable with a length, for `strategy.distribute_dataset`. Each `iter` is the next epoch;
        `set_epoch(e)` chooses it.

    Raises:
        ValueError: unequal numbers of rows, none, scalars, a batch size below 1, a seed out of
            range, or `drop_remainder` with fewer rows than a batch has.
        TypeError: leaves that are no arrays of numbers, or a batch size or seed that is no int.
        ImportError: `shuffle` without Grain.
    """
    require_int("batch_size", batch_size)
    require_int("seed", seed, 0)
    if seed > _MOST_SEED:
        raise ValueError(f"seed={seed} is more than 2**32 - 1. Pass 0 to {_MOST_SEED}.")
    rows = _whole(arrays)
    if drop_remainder and rows.size < batch_size:
        raise ValueError(
            f"The arrays have {rows.size} rows, fewer than batch_size={batch_size}, and "
            "drop_remainder=True leaves them out: there is no batch. Pass a smaller batch_size."
        )
    if shuffle:
        _grain()
    return ArrayDataset(rows, int(batch_size), shuffle, int(seed), drop_remainder)


def _whole(arrays: PyTree) -> HostBatch:
    """The arrays as one batch, on the host."""
    rows = host_batch("arrays", arrays)
    if not rows.size:
        raise ValueError(
            f"{rows.names[0]} is {describe(rows.leaves[0])}: it has no rows. Pass at least one."
        )
    return rows._replace(leaves=tuple(map(np.asarray, rows.leaves)))


def _grain() -> Any:
    try:
        import grain
    except ImportError as error:
        raise ImportError(
            "shuffle=True takes Grain, which is not installed: pip install "
            '"mirror-jax[train]". Or shuffle the arrays yourself.'
        ) from error
    return grain
