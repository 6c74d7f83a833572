"""The source of batches, pass by pass, and the base class of all distributed datasets."""

import abc
import itertools
from collections.abc import Generator, Iterable
from typing import Any, Generic, TypeVar, final

import numpy as np

from mirror._src.base.errors import require_int
from mirror._src.base.types import PyTree
from mirror._src.data.arrays import ArrayDataset
from mirror._src.data.foreign import advice, copied
from mirror._src.data.input import Pass, global_passes
from mirror._src.data.local_input import local_passes
from mirror._src.data.prefetch import PrefetchIterator
from mirror._src.data.states import StatefulPass
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.per_replica import PerReplica, per_replica


@final
class Source:
    """A dataset of batches, which may be an iterator that only one pass can use.

    Args:
        dataset: Iterable of batches.
        fix: How to make a second pass possible, for the error message.

    Attributes:
        dataset: The iterable.
        advice: The line of code that makes batches of such a dataset, for messages.
    """

    def __init__(self, dataset: Iterable[PyTree], fix: str) -> None:
        self.dataset, self.advice = dataset, advice(dataset)
        self._fix = fix
        self._is_exhausted = False
        self._peeked: list[PyTree] = []

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        name = type(self.dataset).__name__
        if not isinstance(self.dataset, list | tuple | ArrayDataset):
            return name  # the length of others may take long
        count = len(self.dataset)
        return f"{name} of 1 batch" if count == 1 else f"{name} of {count} batches"

    @property
    def order(self) -> str:
        """Description of the order of the next pass, or "" if it is unknown."""
        return self.dataset.order if isinstance(self.dataset, ArrayDataset) else ""

    def start(self, state: dict[str, Any] | None, *, is_local: bool) -> StatefulPass:
        """Starts a pass, in the calling thread and before any later `set_epoch`.

        Args:
            state: Where to begin, if the dataset can restore it.
            is_local: Whether other processes read other parts of its batches.

        Raises:
            ValueError: If the dataset is an exhausted iterator.
        """
        self._require_batches_left()
        started = StatefulPass(self.dataset, state, is_local=is_local)
        if started.is_only:
            self._is_exhausted = True
            peeked, self._peeked = self._peeked, []
            started.put_before(peeked)
        return started

    def peek(self, count: int = 1) -> list[PyTree]:
        """Returns up to `count` first batches of the next pass, without consuming them."""
        if isinstance(self.dataset, ArrayDataset):
            return self.dataset.peek(count)
        self._require_batches_left()
        batches = iter(self.dataset)
        if batches is not self.dataset:
            return [copied(batch) for batch in itertools.islice(batches, count)]
        missing = max(count - len(self._peeked), 0)
        self._peeked += [copied(batch) for batch in itertools.islice(batches, missing)]
        return self._peeked[:count]

    def set_epoch(self, epoch: int) -> None:
        """Passes the number of the next epoch to the dataset, or to the parts of a torch loader."""
        parts = [getattr(self.dataset, p, None) for p in ("sampler", "batch_sampler", "dataset")]
        for part in (self.dataset, *parts):
            method = getattr(part, "set_epoch", None)
            if callable(method):
                method(epoch)

    def _require_batches_left(self) -> None:
        if self._is_exhausted:
            raise ValueError(f"The dataset is an exhausted iterator. {self._fix}")


B = TypeVar("B")
"""A batch, whose leaves are `PerReplica` values on the replicas."""


class DistributedDatasetBase(abc.ABC, Generic[B]):
    """Base class for datasets that load their batches onto the replicas ahead of the loop."""

    def __init__(
        self, source: Source, replicas: ReplicaDevices, prefetch: int, *, is_local: bool
    ) -> None:
        require_int("prefetch", prefetch, 0)
        self._source, self._replicas, self._prefetch = source, replicas, prefetch
        self._is_local = is_local
        self._num_rows = len(replicas.local_ids if is_local else replicas)
        self._start = (local_passes if is_local else global_passes)(replicas)
        self._spec: Any = None
        self._state: dict[str, Any] | None = None

    @final
    def _on_replicas(self, leaf: Any) -> PerReplica:
        """Splits the batch axis across the replicas, in order."""
        n = self._num_rows
        return self._placed_rows(leaf.reshape(n, leaf.shape[0] // n, *leaf.shape[1:]))

    @final
    def _placed_rows(self, rows: Any) -> PerReplica:
        """Puts each row of a `(num_rows, *shape)` array on the device of its replica."""
        if self._is_local:
            return per_replica(self._replicas.stack_local(np.asarray(rows)))
        return per_replica(self._replicas.stack(rows))

    @abc.abstractmethod
    def _distributed(self, reading: Pass, source: StatefulPass) -> Generator[B, None, None]:
        """Yields the items of one pass over the source."""

    @abc.abstractmethod
    def _shapes(self) -> Any:
        """Computes `element_spec`."""

    @final
    def __iter__(self) -> PrefetchIterator[B] | Generator[B, None, None]:
        order = self._source.order
        state, self._state = self._state, None  # of the first pass
        source = self._source.start(state, is_local=self._is_local)
        reading = self._start(source.batches, order)
        items = self._distributed(reading, source)
        if not self._prefetch:
            return items
        return PrefetchIterator(items, self._prefetch, reading.cancel)

    @final
    @property
    def element_spec(self) -> Any:
        """The structure of the items, with a `jax.ShapeDtypeStruct` for each `PerReplica`.

        Shapes are `(num_replicas, *shape)`, as in the first batch, which is not consumed. Dtypes
        are as on the devices.

        Raises:
            ValueError: If the dataset is empty.
        """
        if self._spec is None:
            self._spec = self._shapes()
        return self._spec

    @final
    def _require_known_size(self) -> None:
        """Checks that this process knows the padded size of the batches.

        Raises:
            NotImplementedError: If it depends on the other processes.
        """
        if self._is_local:
            raise NotImplementedError(
                "element_spec is unknown with input='local' and padding in several processes: the "
                "padded size depends on the parts of all of them. Look at the shapes of a batch."
            )

    @final
    def _first(self) -> PyTree:
        """Returns the first batch of the source, for `_shapes`."""
        batches = self._source.peek()
        if not batches:
            raise ValueError(
                "Cannot determine element_spec: the dataset yielded no batch. Distribute a dataset "
                "that yields batches."
            )
        return batches[0]

    @final
    def set_epoch(self, epoch: int) -> None:
        """Passes the number of the epoch that the next `iter` starts to the source.

        This has an effect if the source has a method of the same name, as
        `mirror.data.from_arrays` does, or if its sampler has one.
        """
        self._source.set_epoch(epoch)
