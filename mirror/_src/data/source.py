"""The source of batches, pass by pass, its state, and the base class of distributed datasets."""

import abc
import base64
import itertools
import json
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar, final

import numpy as np

from mirror._src.base.errors import require_int
from mirror._src.base.naming import warn_user
from mirror._src.base.optional import require
from mirror._src.base.types import PyTree
from mirror._src.data.arrays import ArrayDataset
from mirror._src.data.batches import host_batch, shape_on_devices
from mirror._src.data.foreign import advice, copied
from mirror._src.data.input import Pass, global_passes
from mirror._src.data.local_input import local_passes
from mirror._src.data.prefetch import PrefetchIterator
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.per_replica import PerReplica, per_replica

_MOST_SENT = 2**16  # bytes of JSON, for each step of a local input
B = TypeVar("B")
"""A batch, whose leaves are `PerReplica` values on the replicas."""


@final
class StatefulPass:
    """A pass over a dataset, which begins at a state if the dataset can restore it.

    Args:
        dataset: The dataset.
        saved: A result of `state`, or None.
        is_local: Whether the process needs a batch if others have some, and sends its states.

    Attributes:
        batches: The batches of the pass.
        is_restored: Whether it begins at the state.
        is_only: Whether the dataset has no other pass.
        full: The padded size of the batches before the state, or 0.
    """

    def __init__(
        self, dataset: Any, saved: dict[str, Any] | None, *, is_local: bool = False
    ) -> None:
        # Hugging Face datasets have such methods, too, but do not resume in shuffled buffers.
        packages = [kind.__module__.partition(".")[0] for kind in type(dataset).__mro__]
        loader = dataset if "torchdata" in packages else None
        self._type, self._is_local, state = type(dataset).__qualname__, is_local, None
        self.is_restored = saved is not None and saved["type"] == self._type
        try:
            if saved is not None and self.is_restored:
                state = _decoded(saved["state"])
            self.batches: Any = _started(dataset, loader, state)
        except Exception as error:
            if not self.is_restored:
                raise
            self.is_restored = False
            _warn(f"{self._type} does not accept its state in the checkpoint: {error}")
            self.batches = iter(dataset)
        self.full: int = saved.get("full", 0) if saved is not None and self.is_restored else 0
        of_iterator = getattr(self.batches, "get_state", None)
        self._get = of_iterator if loader is None else loader.state_dict
        self.is_only = self.batches is dataset
        if is_local and self.is_restored:
            self.batches = self._or_empty(self.batches, dataset, state)

    def put_before(self, peeked: list[Any]) -> None:
        """Puts batches before the others, unless they are those after a restored state."""
        if peeked and not self.is_restored:
            self.batches, self._get = itertools.chain(peeked, self.batches), None

    def state(self) -> dict[str, Any] | None:
        """Returns the state after the last batch, as JSON, or None if the dataset has none."""
        try:
            state = self._get and {"type": self._type, "state": _encoded(self._get())}
            size = len(json.dumps(state)) if self._is_local else 0
            if size > _MOST_SENT:
                raise ValueError(f"it has {size:,} bytes, and input='local' sends {_MOST_SENT:,}")
            return state
        except Exception as error:
            self._get = None
            _warn(f"The state of {self._type} cannot be stored in checkpoints: {error}")
            return None

    def _or_empty(self, batches: Iterator[Any], dataset: Any, state: Any) -> Iterator[Any]:
        """Yields the batches; without any, one without examples, which changes no state."""
        first = next(batches, None)
        if first is not None:
            yield from itertools.chain([first], batches)
            return
        self._get = lambda: state
        for batch in itertools.islice(iter(dataset), 1):
            yield host_batch("batch", batch).part(slice(0)).map(lambda leaf: leaf)


def _started(dataset: Any, loader: Any, state: Any) -> Iterator[Any]:
    """Returns the batches of a pass that begins at a state of the loader, or of its iterator."""
    if loader is not None and state is not None:
        loader.load_state_dict(state)
    try:
        batches = iter(dataset)
    except Exception:
        if loader is not None:
            loader.load_state_dict({})
        raise
    if loader is None and state is not None:
        batches.set_state(state)
    return batches


def _warn(what: str) -> None:
    warn_user(
        f"{what.rstrip('.')}. Training that resumes within an epoch reads and drops the batches "
        "that were used."
    )


def _encoded(value: Any) -> Any:
    """Returns a state as JSON; lists with a tag stand for all that JSON has no type for."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [_encoded(item) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[_encoded(key), _encoded(item)] for key, item in value.items()]]
    is_torch = type(value).__module__ == "torch"
    if is_torch or isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        kind = "torch" if is_torch else "numpy"
        return [kind, [array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode()]]
    raise TypeError(f"it contains a {type(value).__name__}")


def _decoded(value: Any) -> Any:
    """Returns the state of a result of `_encoded`."""
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dict":
        return {_decoded(key): _decoded(item) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_decoded(item) for item in content]
        return items if kind == "list" else tuple(items)
    dtype, shape, data = content
    array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    return require("torch").from_numpy(array) if kind == "torch" else array[()]


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


class DistributedDatasetBase(abc.ABC, Generic[B]):
    """Base class for datasets that load their batches onto the replicas ahead of the loop."""

    def __init__(
        self, source: Source, replicas: ReplicaDevices, prefetch: int, *, is_local: bool
    ) -> None:
        require_int("prefetch", prefetch, 0)
        self._source, self._replicas, self._prefetch = source, replicas, prefetch
        self._is_local, self._on_host = is_local, False
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
        """Puts each row of a `(num_rows, *shape)` array on the device of its replica.

        A dataset on the host copies them in NumPy, in their dtype on the devices.
        """
        if self._on_host:
            return per_replica(np.array(rows, shape_on_devices(rows.shape, rows.dtype).dtype))
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
