"""Per-worker datasets: each worker iterates over its own, in the function that it runs."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, final

from mirror._src.base.modules import set_module
from mirror._src.ps.messages import Export


class RunningFunction(NamedTuple):
    """A scheduled function that runs on this worker.

    Attributes:
        iterators: The iterators of the worker over per-worker datasets, by number.
        load: Fetches an exported object.
    """

    iterators: dict[int, Any]
    load: Callable[[Any], Any]


_running: RunningFunction | None = None


def running_function() -> RunningFunction | None:
    """Returns the function that this process runs as a worker; None elsewhere."""
    return _running


def set_running(function: RunningFunction | None) -> None:
    """Sets what `running_function` returns."""
    global _running
    _running = function


@set_module("mirror.ps")
@final
class PerWorkerDataset:
    """A dataset that every worker creates for itself.

    From `ClusterCoordinator.create_per_worker_dataset`. Pass `iter(dataset)` to scheduled
    functions, which call `next` on it. A worker that was lost and returns begins its dataset again,
    so examples can be repeated: let the dataset repeat and shuffle, and count the steps yourself.

    >>> dataset = coordinator.create_per_worker_dataset(lambda: range(10))
    >>> iterator = iter(dataset)
    >>> coordinator.schedule(lambda: next(iterator)).fetch()
    0
    """

    def __init__(self, next_key: Callable[[], int], dataset_fn: Export) -> None:
        self._next_key, self._dataset_fn = next_key, dataset_fn

    def __iter__(self) -> "PerWorkerIterator":
        return PerWorkerIterator(self._next_key(), self._dataset_fn)


@set_module("mirror.ps")
@final
class PerWorkerIterator:
    """The iterators of all workers over a `PerWorkerDataset`, for scheduled functions."""

    def __init__(self, key: int, dataset_fn: Export) -> None:
        self._key, self._dataset_fn = key, dataset_fn

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError(
            "The elements of a per-worker dataset are on the workers. Pass the iterator to a "
            "scheduled function, and call next(iterator) there."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _on_worker, (self._key, self._dataset_fn)


def _on_worker(key: int, dataset_fn: Export) -> Any:
    """Returns this worker's iterator; the handle itself in other processes."""
    function = running_function()
    if function is None:
        return PerWorkerIterator(key, dataset_fn)
    if key not in function.iterators:
        function.iterators[key] = iter(function.load(dataset_fn)())
    return function.iterators[key]
