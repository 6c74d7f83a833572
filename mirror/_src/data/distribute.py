"""`distribute_dataset`: global batches in, per-replica batches on their devices out."""

import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, final

import jax

from mirror._src.data.batches import array_of, host_batch, host_batches
from mirror._src.data.foreign import advice, is_array
from mirror._src.data.padded import Inspect, PaddedDataset
from mirror._src.data.remainder import (
    Remainder,
    is_kept,
    mask_of,
    padded,
    padded_size,
    require_remainder,
)
from mirror._src.data.source import DistributedDatasetBase, Source, shape_on_devices
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.utils.errors import describe
from mirror._src.utils.modules import set_module
from mirror._src.utils.naming import keys
from mirror._src.utils.types import PyTree
from mirror._src.values.per_replica import PerReplica, on_replicas

_INSTEAD = "Distribute what makes it, a list or a dataset, or distribute a new one each epoch."
_INSTEAD_OF_FUNCTION = "Return what makes it, a list or a dataset, from the function."


@set_module("mirror")
@final
class DistributedDataset(DistributedDatasetBase):
    """An iterable of per-replica batches; made by `strategy.distribute_dataset`.

    Each `iter` starts the source again, if the source can be iterated again.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> dataset = strategy.distribute_dataset([np.zeros((4, 3), "float32")] * 5)
    >>> len(dataset), dataset.element_spec
    (5, ShapeDtypeStruct(shape=(2, 2, 3), dtype=float32))
    """

    def __init__(
        self,
        source: Iterable[PyTree],
        replicas: ReplicaDevices,
        remainder: Remainder,
        prefetch: int,
    ) -> None:
        super().__init__(Source(source, _INSTEAD), replicas, prefetch)
        require_remainder(remainder)
        _require_batches(source)
        self._remainder = remainder

    def __len__(self) -> int:
        """The number of batches of the source, where it knows; `"drop"` may yield fewer."""
        return len(self._source)

    def padded(
        self,
        *,
        multiple: int = 1,
        group: int = 1,
        skip: int = 0,
        inspect: Inspect | None = None,
    ) -> PaddedDataset:
        """The same batches as a training loop takes them: masked, and all of one shape.

        What `remainder` leaves out or refuses stays so; the rest is padded, whatever it is. Batches
        without examples are left out.

        Args:
            multiple: the padded size divides by this times the number of replicas.
            group: how many batches go to the replicas together, on an axis after that of the
                replicas; 1: no such axis. The last group is filled up with what the mask leaves
                out.
            skip: how many examples of the first pass to leave out. Whole batches are read and
                dropped, one that straddles is cut; shapes stay those without it.
            inspect: called with the number and the tree of each batch before it is distributed, in
                the thread that reads ahead. What it raises comes out in the loop, in its place.

        Returns:
            An iterable of `PaddedBatch`. It and this dataset read one source.

        Raises:
            ValueError: `multiple` or `group` below 1, a negative `skip`; while iterating, a batch
                larger than the first, or fewer examples than `skip`.
            TypeError: one of them is no int.
        """
        return PaddedDataset(
            self._source,
            self._replicas,
            self._remainder,
            self._prefetch,
            multiple=multiple,
            group=group,
            skip=skip,
            inspect=inspect,
        )

    def _distributed(self, batches: Iterator[PyTree]) -> Generator[Any, None, None]:
        full = 0
        for batch in host_batches(batches, self._source.advice):
            full = full or padded_size(batch.size, len(self._replicas))
            if not is_kept(batch, len(self._replicas), self._remainder):
                continue
            if self._remainder == "pad":
                mask = self._on_replicas(mask_of(batch, full))
                yield padded(batch, full).map(self._on_replicas), mask
            else:
                yield batch.map(self._on_replicas)

    def _shapes(self) -> Any:
        batch, n = host_batch("batch", self._first()[0], self._source.advice), len(self._replicas)
        is_kept(batch, n, self._remainder)
        size = padded_size(batch.size, n) // n
        spec = batch.map(lambda leaf: shape_on_devices((n, size, *leaf.shape[1:]), leaf.dtype))
        mask = jax.ShapeDtypeStruct((n, size), bool)
        return (spec, mask) if self._remainder == "pad" else spec


@final
class PerReplicaDataset(DistributedDatasetBase):
    """An iterable of batches of which each replica takes the next one, as it is.

    Made by `strategy.distribute_datasets_from_function`.
    """

    def __init__(self, source: Iterable[PyTree], replicas: ReplicaDevices, prefetch: int) -> None:
        super().__init__(Source(source, _INSTEAD_OF_FUNCTION), replicas, prefetch)
        if not isinstance(source, Iterable) or isinstance(source, str | Mapping):
            raise TypeError(
                f"The function returned {describe(source)}, no iterable of batches. Return a list, "
                "a generator, a DataLoader or a dataset that yields one replica's batches."
            )

    def _distributed(self, batches: Iterator[PyTree]) -> Generator[PyTree, None, None]:
        n, waiting = len(self._replicas), list[Any]()
        for batch in batches:
            waiting.append(batch)
            if len(waiting) == n:
                yield self._together(waiting)
                waiting = []
        if waiting:
            warnings.warn(
                f"Each step takes {n} batches, one for each replica, and at the end there were "
                f"only {len(waiting)}, which are left out. Yield a number that divides by {n}.",
                stacklevel=2,
            )

    def _together(self, batches: list[Any]) -> PyTree:
        treedefs: list[Any] = [jax.tree.structure(batch) for batch in batches]
        if len(set(treedefs)) > 1:
            raise ValueError(
                f"The replicas' batches differ in structure: {', '.join(map(str, treedefs))}. "
                "Yield the same keys each time."
            )
        columns = zip(*map(_arrays, batches), strict=True)
        leaves = [on_replicas(PerReplica(list(column)), self._replicas) for column in columns]
        return treedefs[0].unflatten(leaves)

    def _shapes(self) -> PyTree:
        (batch,), n = self._first(), len(self._replicas)
        treedef: Any = jax.tree.structure(batch)
        leaves = [shape_on_devices((n, *leaf.shape), leaf.dtype) for leaf in _arrays(batch)]
        return treedef.unflatten(leaves)


@set_module("mirror")
class InputContext(NamedTuple):
    """What a function that makes the input is told; see `distribute_datasets_from_function`.

    Attributes:
        num_input_pipelines: how many times it is called in all: once.
        input_pipeline_id: which of them this is.
        num_replicas_in_sync: how many replicas take from what it makes.

    >>> InputContext(1, 0, num_replicas_in_sync=8).get_per_replica_batch_size(64)
    8
    """

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """One replica's part of a global batch size.

        Raises:
            ValueError: it does not divide.
        """
        n = self.num_replicas_in_sync
        if global_batch_size % n:
            raise ValueError(
                f"A global batch of {global_batch_size} does not divide by {n} replicas. The "
                f"nearest that do: {global_batch_size // n * n}, {-(-global_batch_size // n) * n}."
            )
        return global_batch_size // n


def _arrays(batch: PyTree) -> list[Any]:
    """The leaves of one replica's batch."""
    found, _ = jax.tree_util.tree_flatten_with_path(batch)
    return [array_of("batch" + keys(path), leaf) for path, leaf in found]


def _require_batches(source: Any) -> None:
    """Refuses what is no iterable of global batches, and says what makes one of it."""
    if isinstance(source, DistributedDatasetBase):
        raise TypeError("The dataset is distributed already. Pass the source of global batches.")
    whole = isinstance(source, tuple) and bool(source) and all(map(is_array, source))
    if whole or is_array(source) or isinstance(source, Mapping):
        what = f"A {type(source).__name__} of arrays" if whole else describe(source)
        raise TypeError(
            f"{what} is no iterable of global batches. For whole arrays, pass "
            "mirror.data.from_arrays(arrays, batch_size); a list of batches; one split, "
            "datasets['train'], of several."
        )
    if not isinstance(source, Iterable) or isinstance(source, str):
        raise TypeError(
            f"{describe(source)} is no iterable of global batches. "
            + (
                advice(source)
                or "Pass a list, a generator, a DataLoader or a dataset that yields batches, such "
                "as {'image': (B, ...), ...}."
            )
        )
