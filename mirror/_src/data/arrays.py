"""`from_arrays`: splits in-memory arrays into a dataset of global batches."""

import itertools
import operator
from collections.abc import Iterator
from typing import Any, Generic, TypedDict, TypeVar, Unpack, final, overload

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import describe, expected, require_int
from mirror._src.base.public_names import set_module
from mirror._src.base.types import A, K, PyTree
from mirror._src.data.batches import HostBatch, host_batch, require_integers_fit

B = TypeVar("B")
_MOST_SEED = 2**32 - 1


@set_module("mirror.data")
@final
class ArrayDataset(Generic[B]):
    """A dataset of global batches from in-memory arrays, returned by `mirror.data.from_arrays`.

    Each `iter` is one epoch. Epochs are counted from 0; the order of an epoch depends only on the
    seed and the epoch number.

    Attributes:
        num_examples: Number of rows of the arrays.
        batch_size: Number of rows per global batch; the last batch may have fewer.
        shard: Index of the part of each global batch that is yielded, and number of parts; None
            for whole batches.

    >>> data = mirror.data.from_arrays(np.arange(5), batch_size=2, shuffle=True)
    >>> first = [batch.tolist() for batch in data]  # epoch 0
    >>> second = [batch.tolist() for batch in data]  # epoch 1, in another order
    >>> data.set_epoch(0)
    >>> first == [batch.tolist() for batch in data] != second
    True
    """

    def __init__(
        self,
        rows: HostBatch,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
        shard: tuple[int, int] | None = None,
    ) -> None:
        require_int("batch_size", batch_size)
        require_int("seed", seed, 0)
        if seed > _MOST_SEED:
            raise ValueError(expected("seed", seed, f"at most {_MOST_SEED} (2**32 - 1)"))
        if drop_remainder and rows.size < batch_size:
            raise ValueError(
                f"The arrays have {rows.size} rows, fewer than batch_size={batch_size}. With "
                "drop_remainder=True there would be no batch. Use a smaller batch_size."
            )
        self.num_examples = rows.size
        self.batch_size = int(batch_size)
        self.shard = shard
        self._rows = rows
        self._shuffle = shuffle
        self._seed = int(seed)
        self._drop_remainder = drop_remainder
        self._epoch = 0

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        whole, rest = divmod(self.num_examples, self.batch_size)
        return whole + bool(rest and not self._drop_remainder)

    def __iter__(self) -> Iterator[B]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._batches(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next `iter` starts; later ones continue from there.

        Raises:
            ValueError: If `epoch` is negative.
            TypeError: If `epoch` is not an int.
        """
        require_int("epoch", epoch, 0)
        self._epoch = int(epoch)

    def peek(self, count: int = 1) -> list[B]:
        """Returns up to `count` first batches of the epoch that the next `iter` starts."""
        return list(itertools.islice(self._batches(self._epoch), count))

    def _batches(self, epoch: int) -> Iterator[B]:
        order = self._order(epoch) if self._shuffle else None
        for number in range(len(self)):
            start = number * self.batch_size
            rows: Any = self._part(start, min(start + self.batch_size, self.num_examples))
            if order is not None:
                rows = order[rows]
            batch: Any = self._rows.map(operator.itemgetter(rows))
            yield batch

    def _part(self, start: int, end: int) -> slice:
        """Returns the part of the shard among the rows of a global batch; sizes differ by one."""
        index, count = self.shard or (0, 1)
        size, more = divmod(end - start, count)
        start += index * size + min(index, more)
        return slice(start, start + size + (index < more))

    @property
    def order(self) -> str:
        """The rows and the order of the epoch that the next `iter` starts, for messages.

        Empty without a shard: the parts of several processes need not belong to one dataset.
        """
        if self.shard is None:
            return ""
        epoch = f", epoch {self._epoch}" if self._shuffle else ""
        return f"{len(self)} batches of {self.batch_size} from {self.rows}{epoch}"

    @property
    def rows(self) -> str:
        """The rows and their order in all epochs, for messages: the same for any batch size."""
        shuffled = f"shuffled with seed {self._seed}" if self._shuffle else "not shuffled"
        return f"{self.num_examples} rows, {shuffled}"

    def _order(self, epoch: int) -> np.ndarray:
        """Returns the row numbers of an epoch, in the order in which they are used."""
        return np.random.default_rng((self._seed, epoch)).permutation(self.num_examples)

    def __repr__(self) -> str:
        leaves = zip(self._rows.names, self._rows.leaves, strict=True)
        arrays = ", ".join(f"{name}: {describe(leaf)}" for name, leaf in leaves)
        shuffled = f", shuffled with seed {self._seed}" if self._shuffle else ""
        shard = "" if self.shard is None else f", part {self.shard[0]} of {self.shard[1]}"
        return f"ArrayDataset({len(self)} batches of {self.batch_size}{shuffled}{shard}; {arrays})"


class _Options(TypedDict, total=False):
    """The options of `from_arrays`."""

    shuffle: bool
    seed: int
    drop_remainder: bool
    shard: tuple[int, int] | None


@overload
def from_arrays(
    arrays: A, batch_size: int, **options: Unpack[_Options]
) -> ArrayDataset[np.ndarray]: ...


@overload
def from_arrays(
    arrays: dict[K, A], batch_size: int, **options: Unpack[_Options]
) -> ArrayDataset[dict[K, np.ndarray]]: ...


@overload
def from_arrays(
    arrays: PyTree, batch_size: int, **options: Unpack[_Options]
) -> ArrayDataset[Any]: ...


def from_arrays(
    arrays: PyTree,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_remainder: bool = False,
    shard: tuple[int, int] | None = None,
) -> ArrayDataset[Any]:
    """Returns a dataset of global batches from in-memory NumPy, JAX or torch arrays.

    >>> data = from_arrays({"x": np.zeros((5, 2)), "y": np.arange(5)}, batch_size=2)
    >>> [batch["y"].tolist() for batch in data]
    [[0, 1], [2, 3], [4]]

    Args:
        arrays: Pytree of arrays with the same number of rows: a dict, a tuple, or one array. The
            arrays are not copied; do not modify them.
        batch_size: Number of rows per global batch, for all replicas together.
        shuffle: Whether to shuffle the rows differently in every epoch.
        seed: Seed of the shuffle, from 0 to 2**32 - 1.
        drop_remainder: Whether to drop a last batch with fewer rows.
        shard: `(index, count)` to yield only this part of each global batch, for
            `strategy.distribute_dataset(data, input="local")` in process `index` of `count`. The
            parts of all processes, one after the other, are the global batch; their sizes differ by
            at most one row, and may be 0. Every process must use the same arrays and seed.

    Returns:
        An iterable with a length, for `strategy.distribute_dataset`. Each `iter` is the next epoch;
        `set_epoch(e)` sets its number.

    Raises:
        ValueError: If the arrays have no rows, different numbers of rows, or contain scalars or
            integers that do not fit 32 bits while 64-bit types are disabled; if `batch_size`,
            `seed` or `shard` is out of range; or if `drop_remainder` leaves no batch.
        TypeError: If a leaf is not an array of numbers, `batch_size` or `seed` is not an int, or
            `shard` is not a pair of ints.
    """
    if getattr(batch_size, "shape", ()):
        fix = "Pass all arrays as one tree: from_arrays({'x': x, 'y': y}, batch_size=32)."
        raise TypeError(expected("batch_size", batch_size, "a positive integer", fix))
    return ArrayDataset(
        in_memory("arrays", arrays),
        batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_remainder=drop_remainder,
        shard=None if shard is None else _require_shard(shard),
    )


def in_memory(name: str, arrays: PyTree) -> HostBatch:
    """Returns arrays, called `name` in messages, as one batch on the host.

    Raises:
        ValueError: If the arrays have no rows, different numbers of rows, or contain scalars or
            integers that do not fit 32 bits while 64-bit types are disabled.
        TypeError: If a leaf is not an array of numbers.
    """
    rows = host_batch(name, arrays)
    if not rows.size:
        raise ValueError(
            f"{rows.names[0]} is {describe(rows.leaves[0])}, which has no rows. Pass at least one."
        )
    require_integers_fit(rows)
    for leaf_name, leaf in zip(rows.names, rows.leaves, strict=True):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"{leaf_name} is {describe(leaf)}: PRNG keys cannot be split into batches on the "
                "host. Pass integer seeds, and create the keys in the step."
            )
    return rows._replace(leaves=tuple(map(np.asarray, rows.leaves)))


def _require_shard(shard: Any) -> tuple[int, int]:
    fix = "Pass shard=(mirror.distributed.process_index(), mirror.distributed.process_count())."
    if not isinstance(shard, tuple) or len(shard) != 2:
        raise TypeError(expected("shard", shard, "a pair (index, count)", fix))
    index, count = shard
    require_int("count of shard", count, fix=fix)
    require_int("index of shard", index, 0, fix)
    if index >= count:
        raise ValueError(expected("shard", shard, "(index, count) with index < count", fix))
    return int(index), int(count)
