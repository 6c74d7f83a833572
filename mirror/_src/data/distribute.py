"""`distribute_dataset`: splits global batches into per-replica batches on the devices."""

import contextlib
import inspect
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Never, TypeAlias, final, get_args

import jax

from mirror._src.base.errors import counted, describe, expected
from mirror._src.base.foreign_arrays import is_array
from mirror._src.base.naming import keys
from mirror._src.base.public_names import set_module
from mirror._src.base.types import PyTree
from mirror._src.data.batches import (
    Remainder,
    array_of,
    host_batch,
    host_batches,
    is_kept,
    nearest_multiples,
    padded_size,
    require_remainder,
    shape_on_devices,
)
from mirror._src.data.foreign import advice
from mirror._src.data.input import InputMode, Inspect, Pass, Plan
from mirror._src.data.local_input import require_own_shard, warn_of_part
from mirror._src.data.padded import PaddedDataset
from mirror._src.data.source import (
    B,
    DistributedDatasetBase,
    Source,
    StatefulPass,
)
from mirror._src.data.step_exchange import Form
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import require_fits
from mirror._src.engine.per_replica import UNEQUAL_SHAPES, on_local_replicas

_REITERABLE = "an object that can be iterated repeatedly (a list, a DataLoader, a Grain dataset)"
_FIX = f"Pass {_REITERABLE}, or distribute a new iterator for every epoch."
_FIX_OF_FUNCTION = f"Return {_REITERABLE} from the function."

Group: TypeAlias = tuple[Any, dict[str, list[Any]]]
"""One batch for each replica of a process: their structure, and each leaf of all by its name."""


@set_module("mirror")
@final
class DistributedDataset(DistributedDatasetBase[B]):
    """An iterable of per-replica batches, returned by `strategy.distribute_dataset`.

    Each `iter` starts another pass over the source.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> dataset = strategy.distribute_dataset([np.zeros((4, 3), "float32")] * 5)
    >>> len(dataset), dataset.element_spec
    (5, ShapeDtypeStruct(shape=(2, 2, 3), dtype=float32))
    """

    def __next__(self) -> Never:
        raise TypeError(
            "A DistributedDataset is not an iterator. For one batch: next(iter(dataset))."
        )

    def __getitem__(self, index: Any) -> Never:
        raise TypeError(
            f"A DistributedDataset has no [{index!r}]: its batches are read in order. For the "
            "first batch: next(iter(dataset))."
        )

    def __init__(
        self,
        source: Iterable[PyTree],
        replicas: ReplicaDevices,
        remainder: Remainder,
        prefetch: int,
        input_mode: InputMode = "global",
    ) -> None:
        require_remainder(remainder)
        if input_mode not in get_args(InputMode):
            raise ValueError(expected("input", input_mode, "'global' or 'local'"))
        _require_batches(source)
        is_local = input_mode == "local" and replicas.spans_processes
        warn_of_part(source)
        if replicas.spans_processes:
            require_own_shard(source, is_local=is_local)
        super().__init__(Source(source, _FIX), replicas, prefetch, is_local=is_local)
        self._remainder = remainder

    def __len__(self) -> int:
        """The number of batches of the source, if known; `"drop"` may yield fewer.

        With `input="local"`, the number of batches of this process.
        """
        return len(self._source)

    @property
    def source(self) -> Iterable[PyTree]:
        """The dataset that was distributed."""
        return self._source.dataset

    def peek(self, count: int = 1) -> list[PyTree]:
        """Returns up to `count` first batches of the source, which the next pass still yields."""
        return self._source.peek(count)

    def __repr__(self) -> str:
        source = repr(self._source)
        replicas = counted(len(self._replicas), "replica")
        local = ", input='local'" if self._is_local else ""
        return f"DistributedDataset({source}, {replicas}, remainder={self._remainder!r}{local})"

    def padded(
        self,
        *,
        multiple: int = 1,
        group: int = 1,
        skip: int = 0,
        state: Sequence[dict[str, Any] | None] | None = None,
        inspect: Inspect | None = None,
        on_host: bool = False,
    ) -> PaddedDataset:
        """Returns the same batches with a mask and with one shape, as a training loop needs them.

        Batches that `remainder` drops or rejects are still dropped or rejected. All others are
        padded, for every choice of `remainder`. Batches without examples are skipped.

        Args:
            multiple: The padded batch size is a multiple of this times the number of replicas.
            group: Number of batches per launch, stacked on an axis after the replica axis. 1 adds
                no axis. A short last group is filled with masked batches.
            skip: Number of examples of the first pass to skip. Whole batches are read and dropped,
                and one batch may be cut. Shapes do not change.
            state: States of the source, of a `PaddedBatch`, at which the first pass begins instead
                of reading what it skips, if the source can restore it.
            inspect: Called with the number and the tree of each batch before it is distributed, in
                the prefetch thread. Its exceptions are raised in the loop, at that batch.
            on_host: Whether batches stay in NumPy, for steps in other processes.

        Returns:
            An iterable of `PaddedBatch`. It shares the source of this dataset.

        Raises:
            ValueError: If `multiple` or `group` is less than 1, or `skip` is negative. During
                iteration, if there are fewer examples than `skip`.
            TypeError: If one of them is not an int.
        """
        plan = Plan(self._remainder, multiple, skip, True, inspect, group, on_host=on_host)
        return PaddedDataset(
            self._source, self._replicas, self._prefetch, plan, state, is_local=self._is_local
        )

    def _distributed(self, reading: Pass, source: StatefulPass) -> Generator[Any, None, None]:  # noqa: ARG002
        batches = host_batches(reading.batches, self._source.advice)
        with contextlib.closing(reading.steps(batches, Plan(self._remainder))) as steps:
            for step in steps:
                if self._remainder == "pad":
                    mask = self._on_replicas(step.mask(step.full))
                    yield step.padded(step.full).map(self._on_replicas), mask
                else:
                    yield step.batch.map(self._on_replicas)

    def _shapes(self) -> Any:
        if self._remainder == "pad":
            self._require_known_size()
        batch = host_batch("batch", self._first(), self._source.advice)
        num_rows, n = self._num_rows, len(self._replicas)
        is_kept(batch, num_rows, self._remainder)
        size = padded_size(batch.size, num_rows) // num_rows
        spec = batch.map(lambda leaf: shape_on_devices((n, size, *leaf.shape[1:]), leaf.dtype))
        mask = jax.ShapeDtypeStruct((n, size), bool)
        return (spec, mask) if self._remainder == "pad" else spec


@final
class PerReplicaDataset(DistributedDatasetBase[B]):
    """An iterable that gives each replica the next batch of the source, unsplit.

    It is returned by `strategy.distribute_datasets_from_function`.
    """

    def __init__(self, source: Iterable[PyTree], replicas: ReplicaDevices, prefetch: int) -> None:
        is_local = replicas.spans_processes
        super().__init__(Source(source, _FIX_OF_FUNCTION), replicas, prefetch, is_local=is_local)
        if not isinstance(source, Iterable) or isinstance(source, str | Mapping):
            raise TypeError(
                f"The function must return an iterable of batches, got {describe(source)}. Return "
                "a list, a generator, a DataLoader or a dataset that yields per-replica batches."
            )

    def _distributed(self, reading: Pass, source: StatefulPass) -> Generator[PyTree, None, None]:  # noqa: ARG002
        num = len(self._replicas.local_ids)
        with contextlib.closing(reading.groups(num, self._joined, _form)) as groups:
            for treedef, columns in groups:
                leaves = [on_local_replicas(column, self._replicas) for column in columns.values()]
                yield treedef.unflatten(leaves)

    def _joined(self, batches: list[Any]) -> Group:
        treedefs: list[Any] = [jax.tree.structure(batch) for batch in batches]
        if len(set(treedefs)) > 1:
            raise ValueError(
                "The batches of the replicas have different structures: "
                f"{', '.join(map(str, treedefs))}. Every batch must have the same keys."
            )
        named = [_named_arrays(batch) for batch in batches]
        columns = {name: [arrays[name] for arrays in named] for name in named[0]}
        if self._is_local and any(len({a.shape for a in c}) > 1 for c in columns.values()):
            raise NotImplementedError(UNEQUAL_SHAPES)
        return treedefs[0], columns

    def _shapes(self) -> PyTree:
        batch, n = self._first(), len(self._replicas)
        treedef: Any = jax.tree.structure(batch)
        arrays = _named_arrays(batch).values()
        return treedef.unflatten(shape_on_devices((n, *a.shape), a.dtype) for a in arrays)


def _form(group: Group) -> Form:
    """Returns what must be equal in all processes."""
    treedef, columns = group
    leaves = tuple(
        (name, str(shape_on_devices((), column[0].dtype).dtype), tuple(column[0].shape))
        for name, column in columns.items()
    )
    return Form("batches of replicas", str(treedef), leaves)


@set_module("mirror")
class InputContext(NamedTuple):
    """The argument of a `distribute_datasets_from_function` input function.

    Attributes:
        num_input_pipelines: Number of calls of the function: one per process.
        input_pipeline_id: Index of this call: the index of the process.
        num_replicas_in_sync: Number of replicas, in all processes.

    >>> InputContext(1, 0, num_replicas_in_sync=8).get_per_replica_batch_size(64)
    8
    """

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the number of examples per replica.

        Raises:
            ValueError: If the global batch size is not a multiple of the number of replicas.
        """
        n = self.num_replicas_in_sync
        if global_batch_size % n:
            raise ValueError(
                f"A global batch of {global_batch_size} cannot be split evenly across {n} replicas."
                f" Use {nearest_multiples(global_batch_size, n)}."
            )
        return global_batch_size // n


def _named_arrays(batch: PyTree) -> dict[str, Any]:
    """Returns the leaves of one replica's batch, by name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(batch)
    arrays = {"batch" + keys(path): leaf for path, leaf in leaves}
    arrays = {name: array_of(name, leaf) for name, leaf in arrays.items()}
    for name, array in arrays.items():
        require_fits(name, array)
    return arrays


def _require_batches(source: Any) -> None:
    """Rejects everything but an iterable of global batches; the message shows how to make one."""
    if isinstance(source, DistributedDatasetBase):
        raise TypeError("The dataset is already distributed. Pass the source of global batches.")
    expects = "distribute_dataset expects an iterable of global batches, got"
    has_arrays = isinstance(source, tuple) and bool(source) and all(map(is_array, source))
    if has_arrays or is_array(source) or isinstance(source, Mapping):
        what = f"a {type(source).__name__} of arrays" if has_arrays else describe(source)
        raise TypeError(
            f"{expects} {what}. To batch in-memory arrays, use "
            "mirror.data.from_arrays(arrays, batch_size). If this is a dict of splits, pass one of "
            "them, e.g. datasets['train']."
        )
    if not isinstance(source, Iterable) or isinstance(source, str):
        fix = advice(source) or (
            "Call it for one pass; for several, pass an object whose __iter__ calls it."
            if inspect.isfunction(source)
            else "Pass a list, a generator, a DataLoader or a dataset that yields batches, such as "
            "{'image': (B, ...), ...}."
        )
        raise TypeError(f"{expects} {describe(source)}. {fix}")
