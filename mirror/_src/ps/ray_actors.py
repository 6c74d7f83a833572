"""The actors of the parameter server on Ray: one process per server and per worker."""

import functools
import pickle
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mirror._src.base.optional import require
from mirror._src.ps.messages import NotSetUp, ServerGoneError, plain, received, typed


@functools.cache
def import_ray() -> Any:
    """Returns the module `ray`.

    Raises:
        ModuleNotFoundError: If it is not installed; the message says how to install it.
    """
    with warnings.catch_warnings():
        # Of tqdm, which Ray imports, in notebooks without ipywidgets.
        warnings.filterwarnings("ignore", "IProgress not found")
        return require("ray", "mirror.ps.ParameterServerStrategy", "ray")


class Pickled(NamedTuple):
    """A pickled object, whose arrays Ray can pass without a copy.

    Attributes:
        data: The pickle without the contents of arrays.
        buffers: Copies of the contents of the arrays.
    """

    data: bytes
    buffers: list[np.ndarray]


def dumps(value: Any) -> Pickled:
    """Pickles an object; functions and classes of the main program by value.

    Arrays are copied: the user may change them before a worker receives or repeats a function.
    """
    buffers: list[pickle.PickleBuffer] = []
    data = import_ray().cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return Pickled(data, [np.array(buffer.raw(), np.uint8) for buffer in buffers])


def loads(pickled: Pickled) -> Any:
    """Returns an object that `dumps` pickled; its arrays can be read-only."""
    return pickle.loads(pickled.data, buffers=pickled.buffers)


class ServerActor:
    """A parameter server. Calls run one after the other.

    The constructor takes an integer alone: Ray cannot restart an actor whose other arguments have
    left its object store.
    """

    def __init__(self, index: int) -> None:
        from mirror._src.ps.store import Store

        self._index, self._store = index, Store()
        self._definition: tuple[bytes, Any] = b"", None

    def load(self, definition: Pickled, snapshot: Any, incarnation: int) -> int:
        """Replaces everything by a snapshot."""
        if definition.data != self._definition[0]:  # the store compiles each definition
            self._definition = definition.data, loads(definition)
        self._store.load(self._definition[1], snapshot, incarnation)
        return incarnation

    def pull(self, *arguments: Any) -> Any:
        """Returns the values."""
        return plain(self._store.pull(*arguments))

    def push(self, push: Any) -> Any:
        """Takes the gradients of a part."""
        return self._store.push(typed(push))

    def commit(self, *arguments: Any) -> Any:
        """Applies the gradients of a step."""
        return self._store.commit(*arguments)

    def snapshot(self) -> Any:
        """Returns the state."""
        return self._store.snapshot()

    def statistics(self) -> dict[str, Any]:
        """Returns counts, and the bytes of memory that the process uses at most."""
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return {**self._store.statistics(), "memory": usage}


class WorkerActor:
    """A worker. Its constructor takes an integer alone, as for a server."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._worker: Any = None

    def set_up(self, servers: list[Any], num_devices: int | None) -> int:
        """Tells the worker its servers; again after every restart.

        Returns:
            The number of its devices.
        """
        from mirror._src.devices import backend
        from mirror._src.ps.work import Worker
        from mirror._src.strategy.mirrored import MirroredStrategy

        devices = backend.default_devices()
        if num_devices is not None and len(devices) < num_devices:
            raise RuntimeError(
                f"Worker {self._index} has {len(devices)} devices, but "
                f"devices_per_worker={num_devices}. Pass worker_options={{'num_gpus': "
                f"{num_devices}}}, or fewer devices per worker."
            )
        strategy = MirroredStrategy(devices[:num_devices])
        self._worker = Worker(
            self._index, RayServers(servers), strategy, loads=loads, dumps=dumps, fetch=_fetch
        )
        return strategy.num_replicas_in_sync

    def run(
        self,
        method: str,
        header: bytes,
        references: dict[int, Any],
        data: bytes,
        buffers: list[np.ndarray],
    ) -> Any:
        """Runs a scheduled function, or a part of a training step.

        Args:
            method: The method of `Worker`.
            header: Assignment and work; see `request`.
            references: As `request` returned them.
            data: The `Pickled` arguments of the user's function.
            buffers: Their arrays.
        """
        if self._worker is None:
            return NotSetUp()
        run = getattr(self._worker, method)
        return plain(run(*received(header, references), Pickled(data, buffers)))


class VariablesActor:
    """The named variables of a strategy. Calls run one after the other."""

    def __init__(self) -> None:
        from mirror._src.ps.variables import NamedVariables

        self._variables = NamedVariables()

    def apply(self, name: str, operation: str, value: Any) -> Any:
        """Applies an operation to a variable; returns an error of the user's."""
        try:
            return self._variables.apply(name, operation, value)
        except (TypeError, ValueError) as error:
            return error


class RayVariables:
    """The named variables of a strategy, for the main program and its workers.

    Args:
        actor: Handle of the actor.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def apply(self, name: str, operation: str, value: Any) -> Any:
        """Applies an operation to a variable, and returns its value.

        Raises:
            RuntimeError: If the process of the variables has ended.
        """
        ray = import_ray()
        try:
            if not ray.is_initialized():  # Ray would start or join a cluster again
                raise ray.exceptions.RayActorError
            reply = ray.get(self._actor.apply.remote(name, operation, value))
        except ray.exceptions.RayActorError:
            raise RuntimeError(
                f"Variable {name!r} is lost: the strategy has been closed, or the process that "
                "holds its variables has ended. Create a new strategy."
            ) from None
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def end(self) -> None:
        """Ends the process of the variables."""
        import_ray().kill(self._actor)


class RayServers:
    """The servers, as a worker reaches them.

    Args:
        actors: Handles of the actors.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors, self._ray = actors, import_ray()

    def call_all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of each server with its arguments, concurrently.

        Raises:
            ServerGoneError: If a server cannot be reached.
        """
        calls = zip(self._actors, arguments, strict=True)
        references = [getattr(actor, method).remote(*map(plain, each)) for actor, each in calls]
        return [self._get(server, reference) for server, reference in enumerate(references)]

    def _get(self, server: int, reference: Any) -> Any:
        try:
            return typed(self._ray.get(reference))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayActorError:
            raise ServerGoneError(server) from None


def _fetch(reference: Any) -> Any:
    return import_ray().get(reference)
