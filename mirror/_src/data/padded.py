"""What a training loop takes: batches padded to one shape, several for each launch."""

import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, TypeAlias, final

import jax
import numpy as np

from mirror._src.data.batches import HostBatch, host_batch, host_batches
from mirror._src.data.remainder import Remainder, is_kept, mask_of, padded, padded_size
from mirror._src.data.source import DistributedDatasetBase, Source, shape_on_devices
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.utils.errors import describe, require_int
from mirror._src.utils.types import PyTree
from mirror._src.values.per_replica import PerReplica

Inspect: TypeAlias = Callable[[int, PyTree], None]


class PaddedBatch(NamedTuple):
    """What one launch takes. All of a dataset's are of one shape.

    Attributes:
        batch: the tree of the source's batches, each leaf a `PerReplica` of `(n, b, ...)`; of
            `(n, k, b, ...)` in groups of k.
        mask: True for examples, False for what pads; `(n, b)`, or `(n, k, b)`.
        num_batches: how many of the k are real; the others stand at the end, all masked.
        num_examples: how many examples there are in all.
    """

    batch: PyTree
    mask: PerReplica
    num_batches: int
    num_examples: int


@final
class PaddedDataset(DistributedDatasetBase):
    """An iterable of `PaddedBatch`, made by `DistributedDataset.padded`."""

    def __init__(
        self,
        source: Source,
        replicas: ReplicaDevices,
        remainder: Remainder,
        prefetch: int,
        *,
        multiple: int,
        group: int,
        skip: int,
        inspect: Inspect | None,
    ) -> None:
        super().__init__(source, replicas, prefetch)
        require_int("multiple", multiple)
        require_int("group", group)
        require_int("skip", skip, 0)
        self._remainder = remainder
        self._divisor = len(replicas) * multiple
        self._group = group
        self._skip = skip
        self._inspect = inspect

    def __len__(self) -> int:
        """The number of launches in a whole pass, where the source knows how many batches."""
        return -(-len(self._source) // self._group)

    def _distributed(self, batches: Iterator[PyTree]) -> Generator[PaddedBatch, None, None]:
        skip, self._skip = self._skip, 0  # before the thread starts: this pass, and no other
        return self._launches(self._rows(host_batches(batches, self._source.advice), skip))

    def _rows(self, batches: Iterator[HostBatch], skip: int) -> Iterator[HostBatch]:
        """The padded batches, on the host."""
        full, left = 0, skip
        for batch in batches:
            if not is_kept(batch, len(self._replicas), self._remainder) or not batch.size:
                continue
            full = full or padded_size(batch.size, self._divisor)
            skipped = min(left, batch.size)
            left -= skipped
            if skipped < batch.size:
                yield padded(self._inspected(batch.without(skipped)), full)
        if left:
            raise ValueError(
                f"The first {skip} examples were to be left out, and the dataset has only "
                f"{skip - left}. Continue with the dataset that the run began with."
            )

    def _inspected(self, batch: HostBatch) -> HostBatch:
        if self._inspect is not None:
            self._inspect(batch.number, batch.map(lambda leaf: leaf))
        return batch

    def _launches(self, batches: Iterator[HostBatch]) -> Generator[PaddedBatch, None, None]:
        while together := list(itertools.islice(batches, self._group)):
            num_examples = sum(batch.size for batch in together)
            yield PaddedBatch(*self._placed(together), len(together), num_examples)

    def _placed(self, batches: list[HostBatch]) -> tuple[PyTree, PerReplica]:
        first = batches[0]
        masks = [mask_of(batch, first.leaves[0].shape[0]) for batch in batches]
        if self._group == 1:
            return first.map(self._on_replicas), self._on_replicas(masks[0])
        _require_same_rows(batches)
        columns = zip(*(batch.leaves for batch in batches), strict=True)
        leaves = [self._stacked(column) for column in columns]
        masks += [np.zeros_like(masks[0])] * (self._group - len(batches))
        return first.treedef.unflatten(leaves), self._stacked(masks)

    def _stacked(self, column: Any) -> PerReplica:
        """One leaf of a group, `(n, k, b, ...)`; the last batch stands for those that lack."""
        n, shape = len(self._replicas), column[0].shape
        dtype = _on_devices(column[0]).dtype
        rows = np.empty((n, self._group, shape[0] // n, *shape[1:]), dtype)
        filled = itertools.chain(column, itertools.repeat(column[-1]))
        for i, leaf in zip(range(self._group), filled, strict=False):
            rows[:, i] = np.asarray(leaf).reshape(n, shape[0] // n, *shape[1:])
        return self._placed_rows(rows)

    def _shapes(self) -> PaddedBatch:
        batch = host_batch("batch", self._first()[0], self._source.advice)
        full, n = padded_size(batch.size, self._divisor), len(self._replicas)
        lead = (n, full // n) if self._group == 1 else (n, self._group, full // n)
        spec = batch.map(lambda leaf: shape_on_devices((*lead, *leaf.shape[1:]), leaf.dtype))
        mask: Any = jax.ShapeDtypeStruct(lead, bool)
        return PaddedBatch(spec, mask, self._group, batch.size * self._group)


def _on_devices(leaf: Any) -> jax.ShapeDtypeStruct:
    return shape_on_devices(leaf.shape, leaf.dtype)


def _require_same_rows(batches: list[HostBatch]) -> None:
    first = batches[0]
    for batch in batches:
        for name, leaf, other in zip(batch.names, batch.leaves, first.leaves, strict=True):
            if _on_devices(leaf) != _on_devices(other):
                raise ValueError(
                    f"{name} of batch {batch.number} is {describe(leaf)}, padded, and that of batch"
                    f" {first.number} {describe(other)}. Batches that go to the replicas together "
                    "have rows of one shape and dtype: pad the rows, or take one batch each launch."
                )
