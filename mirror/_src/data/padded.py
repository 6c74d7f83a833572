"""Batches for a training loop: padded to one shape, and grouped into launches."""

import contextlib
import itertools
import operator
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np

from mirror._src.base.errors import describe, require_int
from mirror._src.base.types import PyTree
from mirror._src.cluster import store
from mirror._src.data.arrays import ArrayDataset
from mirror._src.data.batches import (
    HostBatch,
    host_batch,
    host_batches,
    padded_size,
    shape_on_devices,
)
from mirror._src.data.foreign import taken
from mirror._src.data.input import InputBatch, Pass, Plan
from mirror._src.data.source import (
    DistributedDatasetBase,
    Source,
    StatefulPass,
)
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.per_replica import PerReplica, is_per_replica


class PaddedBatch(NamedTuple):
    """The input of one launch: one batch, or several from a group of `k`.

    Attributes:
        batch: Tree of the source's batches. Each leaf is a `PerReplica` of shape `(n, b, ...)`, or
            `(n, k, b, ...)` in groups. All items of a dataset have the same shapes.
        mask: True for examples, False for padding; `(n, b)` or `(n, k, b)`.
        num_batches: Number of batches in this launch.
        num_examples: Number of examples in these batches.
        first: Index in the group of the first of these batches.
        sizes: Number of examples of each batch of the group.
        states: States of the source after each batch of the group; see `InputBatch`.
    """

    batch: PyTree
    mask: PerReplica
    num_batches: int
    num_examples: int
    first: int = 0
    sizes: tuple[int, ...] = ()
    states: tuple[Sequence[dict[str, Any] | None] | None, ...] = ()

    @property
    def types(self) -> tuple[tuple[tuple[int, ...], Any], ...]:
        """The shape and dtype of each array, which select the compiled step."""
        leaves = jax.tree.leaves((self.batch, self.mask), is_leaf=is_per_replica)
        return tuple((leaf.stacked.shape, leaf.dtype) for leaf in leaves)

    @property
    def state(self) -> Sequence[dict[str, Any] | None] | None:
        """The states of the source after these batches, or None."""
        return self.states[self.first + self.num_batches - 1]

    def split(self, count: int) -> tuple["PaddedBatch", "PaddedBatch"]:
        """Returns one launch with the first `count` batches and one with the others.

        Both hold the arrays of the whole group, so that they run the same compiled step.
        """
        end = self.first + count
        num_examples = sum(self.sizes[self.first : end])
        num_left = self.num_examples - num_examples
        head = self._replace(num_batches=count, num_examples=num_examples)
        left = self.num_batches - count
        return head, self._replace(num_batches=left, num_examples=num_left, first=end)


@final
class PaddedDataset(DistributedDatasetBase[PaddedBatch]):
    """An iterable of `PaddedBatch`, made by `DistributedDataset.padded`."""

    def __init__(
        self,
        source: Source,
        replicas: ReplicaDevices,
        prefetch: int,
        plan: Plan,
        state: Sequence[dict[str, Any] | None] | None,
        *,
        is_local: bool,
    ) -> None:
        super().__init__(source, replicas, prefetch, is_local=is_local)
        own, count = (store.process_index(), store.process_count()) if is_local else (0, 1)
        self._state = state[own] if state and len(state) == count else None
        require_int("multiple", plan.multiple)
        require_int("group", plan.group)
        require_int("skip", plan.skip, 0)
        self._plan, self._group, self._on_host = plan, plan.group, plan.on_host
        self._most: int | None = None

    def read_at_most(self, num_batches: int | None) -> None:
        """Makes the next pass end after a number of batches: an iterator can be continued then."""
        self._most = num_batches

    def __len__(self) -> int:
        """The number of launches in a whole pass, if the length of the source is known."""
        return -(-len(self._source) // self._group)

    @property
    def num_batches(self) -> int | None:
        """The number of batches in a whole pass, or None if the source has no length."""
        return operator.length_hint(self._source) or None

    @property
    def last_size(self) -> int | None:
        """The number of examples of the last batch of a pass, or None if it is unknown."""
        data = self._source.dataset
        if not isinstance(data, ArrayDataset) or data.shard is not None:
            return None
        if self._is_local or self._plan.remainder != "pad":
            return None
        return min(data.batch_size, data.num_examples - (len(data) - 1) * data.batch_size)

    def _distributed(
        self, reading: Pass, source: StatefulPass
    ) -> Generator[PaddedBatch, None, None]:
        # Not in the generator, which the prefetch thread runs: a second `iter` must not skip.
        plan, self._plan = self._plan, self._plan._replace(skip=0)
        plan = plan._replace(is_restored=source.is_restored, full=source.full)
        batches = host_batches(reading.batches, self._source.advice, source.state)
        most, self._most = self._most, None
        return self._launches(reading.steps(batches, plan), most)

    def _launches(
        self, steps: Generator[InputBatch], most: int | None
    ) -> Generator[PaddedBatch, None, None]:
        with contextlib.closing(steps):
            batches = itertools.islice(steps, most)
            for group in iter(lambda: taken(batches, self._group), []):
                sizes = tuple(batch.num_examples for batch in group)
                states = tuple(batch.states for batch in group)
                placed = self._placed(group)
                yield PaddedBatch(*placed, len(group), sum(sizes), sizes=sizes, states=states)

    def _placed(self, group: list[InputBatch]) -> tuple[PyTree, PerReplica]:
        full = group[-1].full  # the largest: it never shrinks
        batches = [batch.padded(full) for batch in group]
        masks = [batch.mask(full) for batch in group]
        first = batches[0]
        if self._group == 1:
            return first.map(self._on_replicas), self._on_replicas(masks[0])
        _require_same_shapes(batches)
        columns = zip(*(batch.leaves for batch in batches), strict=True)
        leaves = [self._stacked(column) for column in columns]
        masks += [np.zeros_like(masks[0])] * (self._group - len(batches))
        return first.treedef.unflatten(leaves), self._stacked(masks)

    def _stacked(self, column: Any) -> PerReplica:
        """Stacks a leaf of a group to `(n, k, b, ...)`; the last batch fills a short group."""
        n, shape = self._num_rows, column[0].shape
        dtype = _on_devices(column[0]).dtype
        rows = np.empty((n, self._group, shape[0] // n, *shape[1:]), dtype)
        filled = itertools.chain(column, itertools.repeat(column[-1]))
        for i, leaf in zip(range(self._group), filled, strict=False):
            rows[:, i] = np.asarray(leaf).reshape(n, shape[0] // n, *shape[1:])
        return self._placed_rows(rows)

    def _shapes(self) -> PaddedBatch:
        self._require_known_size()
        batch = host_batch("batch", self._first(), self._source.advice)
        n = self._num_rows
        full = padded_size(batch.size, n * self._plan.multiple)
        lead = (n, full // n) if self._group == 1 else (n, self._group, full // n)
        spec = batch.map(lambda leaf: shape_on_devices((*lead, *leaf.shape[1:]), leaf.dtype))
        mask: Any = jax.ShapeDtypeStruct(lead, bool)
        return PaddedBatch(spec, mask, self._group, batch.size * self._group)


def _on_devices(leaf: Any) -> jax.ShapeDtypeStruct:
    return shape_on_devices(leaf.shape, leaf.dtype)


def _require_same_shapes(batches: list[HostBatch]) -> None:
    first = batches[0]
    for batch in batches:
        for name, leaf, other in zip(batch.names, batch.leaves, first.leaves, strict=True):
            if _on_devices(leaf) != _on_devices(other):
                raise ValueError(
                    f"{name} of batch {batch.number} is {describe(leaf)} after padding, but "
                    f"{describe(other)} in batch {first.number}. Batches of one launch must have "
                    "the same shapes and dtypes. Pad the examples, or use one batch per launch."
                )
