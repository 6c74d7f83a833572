"""Handles of values and datasets on the workers, and the errors in their place."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, final

from mirror._src.base.errors import require_secs
from mirror._src.base.public_names import set_module
from mirror._src.base.tracebacks import api_boundary
from mirror._src.ps.messages import Export


@set_module("mirror.ps")
class CancelledError(RuntimeError):
    """Raised by `RemoteValue.fetch` if the function was canceled before it ran.

    That happens if an earlier scheduled function fails, whose error `schedule`, `join` or `done`
    raise, if the values on the servers are lost, or if the strategy is closed.

    >>> issubclass(mirror.ps.CancelledError, RuntimeError)
    True
    """


@set_module("mirror.ps")
class ParameterServerLostError(RuntimeError):
    """Raised when the values on a parameter server are lost and no snapshot can replace them.

    Model and optimizer have the values of the last `join` or checkpoint, from which training can
    continue.

    >>> issubclass(mirror.ps.ParameterServerLostError, RuntimeError)
    True
    """


@set_module("mirror.ps")
@final
class RemoteValue:
    """The result of a scheduled function, which `ClusterCoordinator.schedule` returns.

    >>> value = coordinator.schedule(lambda x: x + 1, (1,))
    >>> value.fetch()
    2
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    @api_boundary
    def fetch(self, timeout: float | None = None) -> Any:
        """Waits for the result and returns it; arrays are NumPy arrays.

        Args:
            timeout: Seconds to wait. Defaults to forever.

        Raises:
            TimeoutError: If the function has not ended by then.
            CancelledError: If an earlier function failed before this one ran.
            Exception: What the function raised.
        """
        if timeout is not None:
            timeout = require_secs("timeout", timeout)
        if not self._event.wait(timeout):
            raise TimeoutError(
                f"The scheduled function has not ended after {timeout:g} s. Call fetch() again, or "
                "pass a longer timeout."
            )
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        """Whether the function has ended: with a result, an error, or because it was canceled."""
        return self._event.is_set()

    def _resolve(self, value: Any = None, error: BaseException | None = None) -> None:
        if not self._event.is_set():
            self._value, self._error = value, error
            self._event.set()

    def __repr__(self) -> str:
        if not self.done():
            return "RemoteValue(not done)"
        return f"RemoteValue({self._value if self._error is None else self._error!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A RemoteValue cannot be passed to a scheduled function. Pass its result: "
            "value.fetch()."
        )


class RunningFunction(NamedTuple):
    """A scheduled function that runs on this worker.

    Attributes:
        iterators: The iterators of the worker over per-worker datasets, by number.
        load: Fetches an exported object.
    """

    iterators: dict[int, Any]
    load: Callable[[Any], Any]


running: list[RunningFunction] = []
"""The function that this process runs as a worker, if any."""


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
    if not running:
        return PerWorkerIterator(key, dataset_fn)
    iterators, load = running[-1]
    if key not in iterators:
        iterators[key] = iter(load(dataset_fn)())
    return iterators[key]
