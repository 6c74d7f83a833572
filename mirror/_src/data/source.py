"""Where batches come from, pass by pass; and what all distributed datasets have in common."""

import abc
import itertools
from collections.abc import Generator, Iterable, Iterator
from typing import Any, final

import jax

from mirror._src.data.arrays import ArrayDataset
from mirror._src.data.foreign import advice
from mirror._src.data.prefetch import PrefetchIterator
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.utils.errors import require_int
from mirror._src.utils.types import PyTree
from mirror._src.values.per_replica import PerReplica, is_numeric, per_replica


@final
class Source:
    """A dataset of batches, and whether it has been used up.

    Args:
        dataset: an iterable of batches; an iterator has one pass in it.
        instead: what to do where a second pass is asked for, for the message.
    """

    def __init__(self, dataset: Iterable[PyTree], instead: str) -> None:
        self._dataset = dataset
        self._instead = instead
        self._used_up = False
        self._peeked: list[PyTree] = []

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    @property
    def advice(self) -> str:
        """The line that makes batches of such a dataset, for messages."""
        return advice(self._dataset)

    def start(self) -> Iterator[PyTree]:
        """Starts a pass, here and now: in the thread that asks for it, before any `set_epoch`.

        Raises:
            ValueError: the dataset is an iterator that has been used up.
        """
        self._require_unused()
        batches = iter(self._dataset)
        if batches is not self._dataset:
            return batches
        self._used_up = True
        peeked, self._peeked = self._peeked, []
        return itertools.chain(peeked, batches)

    def peek(self, count: int = 1) -> list[PyTree]:
        """The first batches of the next pass, which loses none of them; fewer where there are."""
        if isinstance(self._dataset, ArrayDataset):
            return self._dataset.peek(count)
        self._require_unused()
        batches = iter(self._dataset)
        if batches is not self._dataset:
            return list(itertools.islice(batches, count))
        self._peeked += itertools.islice(batches, max(count - len(self._peeked), 0))
        return self._peeked[:count]

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch comes next to the dataset, or to the parts of a torch loader."""
        parts = [getattr(self._dataset, p, None) for p in ("sampler", "batch_sampler", "dataset")]
        for part in (self._dataset, *parts):
            tell = getattr(part, "set_epoch", None)
            if callable(tell):
                tell(epoch)

    def _require_unused(self) -> None:
        if self._used_up:
            raise ValueError(
                "The dataset is an iterator that has been used up: a second pass would be empty. "
                + self._instead
            )


class DistributedDatasetBase(abc.ABC):
    """A source whose batches are brought to the replicas, ahead of the loop."""

    def __init__(self, source: Source, replicas: ReplicaDevices, prefetch: int) -> None:
        require_int("prefetch", prefetch, 0)
        self._source = source
        self._replicas = replicas
        self._prefetch = prefetch
        self._spec: Any = None

    @final
    def _on_replicas(self, leaf: Any) -> PerReplica:
        """Cuts the batch axis up for the replicas, in order."""
        n = len(self._replicas)
        return self._placed_rows(leaf.reshape(n, leaf.shape[0] // n, *leaf.shape[1:]))

    @final
    def _placed_rows(self, rows: Any) -> PerReplica:
        """`(num_replicas, *shape)`, each row on its replica's device."""
        return per_replica(self._replicas.stack(rows))

    @abc.abstractmethod
    def _distributed(self, batches: Iterator[PyTree]) -> Generator[Any, None, None]:
        """What iterating yields, of the batches of one pass."""

    @abc.abstractmethod
    def _shapes(self) -> Any:
        """What `element_spec` says."""

    @final
    def __iter__(self) -> PrefetchIterator | Generator[Any, None, None]:
        items = self._distributed(self._source.start())
        return PrefetchIterator(items, self._prefetch) if self._prefetch else items

    @final
    @property
    def element_spec(self) -> Any:
        """What iterating yields, with a `jax.ShapeDtypeStruct` for each `PerReplica`.

        Shapes are `(num_replicas, *shape)`, those of the first batch, which is looked at and not
        lost; dtypes are those on the devices.

        Raises:
            ValueError: there is no first batch.
        """
        if self._spec is None:
            self._spec = self._shapes()
        return self._spec

    @final
    def _first(self, count: int = 1) -> list[PyTree]:
        """The first batches of the source, for `_shapes`."""
        batches = self._source.peek(count)
        if not batches:
            raise ValueError(
                "The dataset yielded no batch, so it has no element_spec. Distribute one that "
                "yields batches."
            )
        return batches

    @final
    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next `iter` starts to a source that wants to know.

        One that shuffles by epoch has a method of this name, as `mirror.data.from_arrays` has, or
        a sampler that has; others are left alone.
        """
        self._source.set_epoch(epoch)


def shape_on_devices(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """What an array of the host's dtype will be: JAX has no 64 bits unless told so."""
    on_devices = jax.dtypes.canonicalize_dtype(dtype) if is_numeric(dtype) else dtype
    return jax.ShapeDtypeStruct(shape, on_devices)
