"""`distribute_dataset`: global batches in, per-replica batches on their devices out."""

import abc
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, final, get_args

import jax
import numpy as np

from mirror._errors import describe
from mirror._types import PyTree
from mirror.calls import keys
from mirror.data.prefetch import Prefetched
from mirror.devices.replicas import ReplicaDevices
from mirror.values import PerReplica, is_numeric, is_per_replica, on_replicas, per_replica

Remainder: TypeAlias = Literal["error", "drop", "pad"]


class _Dataset(abc.ABC):
    """What both kinds have in common: a source, read ahead of the loop."""

    _instead: ClassVar[str]

    def __init__(self, source: Iterable[PyTree], replicas: ReplicaDevices, prefetch: int) -> None:
        require_prefetch(prefetch)
        self._source = source
        self._replicas = replicas
        self._prefetch = prefetch
        self._used_up = False

    @abc.abstractmethod
    def _batches(self) -> Iterator[Any]:
        """The batches, on the replicas' devices."""

    @final
    def __iter__(self) -> Iterator[Any]:
        if self._used_up:
            raise ValueError(
                "The dataset is an iterator that has been used up: a second pass would be empty. "
                + self._instead
            )
        self._used_up = isinstance(self._source, Iterator)
        batches = self._batches()
        return Prefetched(batches, self._prefetch) if self._prefetch else batches


@final
class DistributedDataset(_Dataset):
    """An iterable of per-replica batches; made by `strategy.distribute_dataset`.

    Each `iter` starts the source again, if the source can be iterated again.
    """

    _instead = "Distribute what makes it, a list or a dataset, or distribute a new one each epoch."

    def __init__(
        self,
        source: Iterable[PyTree],
        replicas: ReplicaDevices,
        remainder: Remainder,
        prefetch: int,
    ) -> None:
        super().__init__(source, replicas, prefetch)
        if remainder not in get_args(Remainder):
            raise ValueError(
                f"remainder={remainder!r} is none of 'error', 'drop' and 'pad': what to do with a "
                "batch that does not divide by the number of replicas."
            )
        if isinstance(source, DistributedDataset):
            raise TypeError(
                "The dataset is distributed already. Pass the source of global batches."
            )
        if not isinstance(source, Iterable) or isinstance(
            source, str | dict | np.ndarray | jax.Array
        ):
            raise TypeError(
                f"{describe(source)} is no iterable of global batches. Pass a list, a generator, a "
                "DataLoader or a dataset that yields batches, such as {'image': (B, ...), ...}."
            )
        self._remainder = remainder

    def __len__(self) -> int:
        """The number of batches of the source, where it knows; `"drop"` may yield fewer."""
        return len(self._source)  # type: ignore[arg-type]

    def _batches(self) -> Iterator[Any]:
        first_size: int | None = None
        for number, batch in enumerate(self._source):
            named, treedef = _named_leaves(batch)
            size = _batch_size(named)
            if first_size is None:
                first_size = size
            divides = size % len(self._replicas) == 0
            if self._remainder == "pad":
                yield self._padded(named, treedef, size, first_size, number)
            elif divides and size:
                yield self._split(treedef, [leaf for _, leaf in named])
            elif self._remainder == "error" or number == 0:
                raise ValueError(self._indivisible(named, size, number))

    def _split(self, treedef: Any, leaves: list[Any]) -> PyTree:
        return treedef.unflatten([self._on_replicas(leaf) for leaf in leaves])

    def _on_replicas(self, leaf: Any) -> PerReplica:
        n = len(self._replicas)
        rows = leaf.reshape(n, leaf.shape[0] // n, *leaf.shape[1:])
        return per_replica(self._replicas.stack(rows))

    def _padded(
        self, named: list[tuple[str, Any]], treedef: Any, size: int, first_size: int, number: int
    ) -> tuple[PyTree, PerReplica]:
        n = len(self._replicas)
        full = max(-(-first_size // n) * n, n)
        if size > full:
            raise ValueError(
                f"Batch {number} has {size} examples, more than the first one's {first_size}. With "
                "remainder='pad' the first batch is the largest: all are padded to its size."
            )
        mask = self._on_replicas(np.arange(full) < size)
        leaves = [_pad(np.asarray(leaf), full) for _, leaf in named]
        return self._split(treedef, leaves), mask

    def _indivisible(self, named: list[tuple[str, Any]], size: int, number: int) -> str:
        n = len(self._replicas)
        name, leaf = named[0]
        if size == 0:
            return (
                f"{name} of batch {number} is {describe(leaf)}: it has 0 examples. Every batch "
                f"needs at least one for each replica, {n}; remainder='drop' leaves empty ones out."
            )
        below, above = size // n * n, (size // n + 1) * n
        nearest = f"{below} or {above}" if below else f"{above}"
        first = (
            "\nremainder='drop' leaves out such a batch, but this is the first: nothing trains."
            if self._remainder == "drop" and number == 0
            else "\nOr choose what happens to it: distribute_dataset(dataset, remainder='pad') "
            "yields (batch, mask), remainder='drop' leaves it out."
        )
        return (
            f"{name} of batch {number} is {describe(leaf)}: {size} examples do not divide by "
            f"{n} replicas. The nearest batch sizes that do: {nearest}.{first}"
        )


@final
class PerReplicaDataset(_Dataset):
    """An iterable of batches of which each replica takes the next one, as it is.

    Made by `strategy.distribute_datasets_from_function`.
    """

    _instead = "Return what makes it, a list or a dataset, from the function."

    def __init__(self, source: Iterable[PyTree], replicas: ReplicaDevices, prefetch: int) -> None:
        super().__init__(source, replicas, prefetch)
        if not isinstance(source, Iterable) or isinstance(source, str | dict):
            raise TypeError(
                f"The function returned {describe(source)}, no iterable of batches. Return a list, "
                "a generator, a DataLoader or a dataset that yields one replica's batches."
            )

    def _batches(self) -> Iterator[Any]:
        n, waiting = len(self._replicas), list[Any]()
        for batch in self._source:
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
        columns = zip(*map(jax.tree.leaves, batches), strict=True)
        leaves = [on_replicas(PerReplica(list(column)), self._replicas) for column in columns]
        return treedefs[0].unflatten(leaves)


class InputContext(NamedTuple):
    """What a function that makes the input is told; see `distribute_datasets_from_function`.

    Attributes:
        num_input_pipelines: how many times it is called in all: once.
        input_pipeline_id: which of them this is.
        num_replicas_in_sync: how many replicas take from what it makes.
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


def require_prefetch(prefetch: Any) -> None:
    """Refuses what is no number of batches.

    Raises:
        ValueError: it is negative.
        TypeError: it is no int.
    """
    if isinstance(prefetch, bool) or not isinstance(prefetch, int):
        raise TypeError(f"prefetch={describe(prefetch)} is no int. Pass how many batches, or 0.")
    if prefetch < 0:
        raise ValueError(f"prefetch={prefetch} is negative. Pass how many batches, or 0.")


def _named_leaves(batch: PyTree) -> tuple[list[tuple[str, Any]], Any]:
    found, treedef = jax.tree_util.tree_flatten_with_path(batch, is_leaf=is_per_replica)
    if not found:
        raise ValueError(f"The dataset yielded {describe(batch)}, which holds no arrays.")
    named = [("batch" + keys(path), _array("batch" + keys(path), leaf)) for path, leaf in found]
    return named, treedef


def _array(name: str, leaf: Any) -> Any:
    """The leaf as an array with a batch axis: JAX's own, or NumPy's of whatever it is."""
    if isinstance(leaf, PerReplica):
        raise TypeError(f"{name} is a PerReplica. distribute_dataset takes global batches.")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(
            f"{name} is an array that has been deleted: a step gave up its buffer "
            "(donate_argnums). Yield a fresh one, or keep NumPy arrays."
        )
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if not isinstance(array, jax.Array) and not is_numeric(array.dtype):
        raise TypeError(
            f"{name} is {describe(leaf)} of dtype {array.dtype}, which JAX has no arrays for. "
            "Yield numbers; encode text before."
        )
    if array.ndim == 0:
        raise ValueError(
            f"{name} is the scalar {leaf!r}. Each leaf of a batch needs a leading batch axis; what "
            "is the same for all examples is a mirrored argument: strategy.run(step, (batch, x))."
        )
    return array


def _batch_size(named: list[tuple[str, Any]]) -> int:
    sizes = {name: leaf.shape[0] for name, leaf in named}
    if len(set(sizes.values())) > 1:
        received = ", ".join(f"{name}: {describe(leaf)}" for name, leaf in named)
        raise ValueError(
            f"The leaves of a batch have different leading sizes: {received}. The first axis is "
            "the batch axis of every leaf."
        )
    return next(iter(sizes.values()))


def _pad(leaf: np.ndarray, full: int) -> np.ndarray:
    """Repeats the last example up to the full size: real data, so that no log or norm blows up."""
    widths = [(0, full - leaf.shape[0])] + [(0, 0)] * (leaf.ndim - 1)
    return np.pad(leaf, widths, mode="edge" if len(leaf) else "constant")
