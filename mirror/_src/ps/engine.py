"""`RayEngine`, and the actors of the parameter server on Ray: a process per server and worker."""

import asyncio
import contextlib
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mirror._src.devices.jax_options import numeric_options
from mirror._src.ps.messages import (
    Assignment,
    Export,
    LostError,
    NotExportedError,
    StepWork,
    plain,
    received,
    request,
    require_accepted,
    typed,
)
from mirror._src.ps.ray_cluster import Demand, import_ray
from mirror._src.ps.step_data import ArgumentOfStep, pickled
from mirror._src.ps.variables import NamedVariables

_MAX_EXPORTS = 256
_MOST_COPIED_BYTES = 16 << 10


class Pickled(NamedTuple):
    """A pickled object, whose arrays Ray can pass without a copy.

    Attributes:
        data: The pickle without the contents of large arrays.
        buffers: Copies of these contents.
    """

    data: bytes
    buffers: list[np.ndarray]


def dumps(value: Any) -> Pickled:
    """Pickles an object; functions and classes of the main program by value.

    Arrays are copied: the user may change them before a worker receives or repeats a function.
    """
    buffers: list[np.ndarray] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        contents = buffer.raw()
        if contents.nbytes <= _MOST_COPIED_BYTES:
            return True
        buffers.append(np.array(contents, np.uint8))
        return False

    # cloudpickle takes five times as long. References of Ray, and what users register, need it.
    pickler = pickle if _is_data(value) else import_ray().cloudpickle
    return Pickled(pickler.dumps(value, protocol=5, buffer_callback=is_small), buffers)


def _is_data(node: Any) -> bool:
    """Whether a tree has NumPy arrays and plain values alone, in containers of Python."""
    kind = type(node)
    if kind is np.ndarray:
        return not node.dtype.hasobject
    if kind is dict:
        return all(map(_is_data, (*node, *node.values())))
    if kind in (tuple, list, ArgumentOfStep):
        return all(map(_is_data, node))
    return kind in (bool, int, float, str, type(None)) or isinstance(node, np.generic)


def loads(value: Pickled) -> Any:
    """Returns an object that `dumps` pickled; its arrays can be read-only."""
    return pickle.loads(value.data, buffers=value.buffers)


class ServerActor:
    """A parameter server. Calls run one after the other.

    The constructor takes an integer alone: Ray cannot restart an actor whose other arguments have
    left its object store.
    """

    def __init__(self, index: int) -> None:
        from mirror._src.ps.store import Store

        self._index, self._store = index, Store()
        self._definition: tuple[bytes, Any] = b"", None

    def load(self, definition: Pickled, snapshot: Any, held: Any, incarnation: int) -> int:
        """Replaces everything by a snapshot."""
        if definition.data != self._definition[0]:  # the store compiles each definition
            self._definition = definition.data, loads(definition)
        self._store.load(self._definition[1], snapshot, incarnation, held)
        return incarnation

    def pull(self, arguments: tuple[Any, ...]) -> Any:
        """Returns the values."""
        return plain(self._store.pull(*arguments))

    def push(self, arguments: tuple[Any, ...]) -> Any:
        """Takes the gradients of a part."""
        return self._store.push(*map(typed, arguments))

    def commit(self, *arguments: Any) -> Any:
        """Applies the gradients of a step."""
        return self._store.commit(*arguments)

    def snapshot(self) -> tuple[Any, Any]:
        """Returns the state; what is second stays on this machine, in Ray's object store."""
        return self._store.snapshot(), self._store.held_tables()

    def rows(self, *arguments: Any) -> Any:
        """Returns rows of a table."""
        return self._store.rows(*arguments)

    def statistics(self) -> dict[str, Any]:
        """Returns counts."""
        return self._store.statistics()


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
            self._index,
            RayServers(servers),
            strategy,
            loads=loads,
            dumps=dumps,
            fetch=import_ray().get,
        )
        return strategy.num_replicas_in_sync

    def run(self, call: tuple[str, bytes, dict[int, Any], bytes, list[np.ndarray]]) -> Any:
        """Runs a scheduled function, or a part of a training step.

        Args:
            call: The method of `Worker`, both results of `request`, and the `Pickled` arguments of
                the user's function.
        """
        method, header, references, data, buffers = call
        if self._worker is None:
            raise LostError(self._index, "it has been restarted")
        run = getattr(self._worker, method)
        return plain(run(*received(header, references), Pickled(data, buffers)))


class RayVariables:
    """The named variables of a strategy, for the main program and its workers.

    Args:
        actor: Handle of an actor of `NamedVariables`, whose calls run one after the other.
    """

    def __init__(self, actor: Any) -> None:
        self._actor, self._has_ended = actor, False

    def apply(self, name: str, operation: str, value: Any) -> Any:
        """Applies an operation to a variable, and returns its value.

        Raises:
            RuntimeError: If the process of the variables has ended.
        """
        ray = import_ray()
        try:
            # Ray would start or join a cluster again, and ends a process some time later.
            if self._has_ended or not ray.is_initialized():
                raise LostError(None)
            with _errors_of(None):
                return ray.get(self._actor.apply.remote(name, operation, value))
        except LostError:
            raise RuntimeError(
                f"Variable {name!r} is lost: the strategy has been closed, or the process that "
                "holds its variables has ended. Create a new strategy."
            ) from None

    def end(self) -> None:
        """Ends the process of the variables."""
        self._has_ended = True
        import_ray().kill(self._actor)


class RayServers:
    """The servers, as a worker reaches them.

    Args:
        actors: Handles of the actors.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors, self._ray = actors, import_ray()

    def call_all(
        self, method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        """See `Servers`."""
        calls = zip(self._actors, arguments, strict=True)
        # One argument: Ray pickles each on its own.
        references = [
            getattr(actor, method).remote(tuple(map(plain, each))) for actor, each in calls
        ]
        return lambda: [self._get(server, each) for server, each in enumerate(references)]

    def _get(self, server: int, reference: Any) -> Any:
        with _errors_of(server):
            return typed(self._ray.get(reference))


@contextlib.contextmanager
def _errors_of(index: int | None) -> Iterator[None]:
    """Raises what an actor raised, and `LostError` if it has ended."""
    exceptions = import_ray().exceptions
    try:
        yield
    except exceptions.RayTaskError as error:
        # Others, such as a CancelledError, would end the coroutine that waits.
        raise (error.cause if isinstance(error.cause, Exception) else error) from error
    except exceptions.RayActorError as error:
        is_forever = isinstance(error, exceptions.ActorDiedError)
        reason = str(error).partition("\n")[0]
        raise LostError(index, reason, is_forever=is_forever) from None


@final
class RayEngine:
    """The actors of a parameter server on a cluster of Ray that is connected already.

    Args:
        servers: What each server demands.
        workers: What each worker demands.
        devices_per_worker: Number of devices of a worker; None means all of its GPUs, or one CPU
            device.

    Attributes:
        dumps: Pickles an object for a worker.
        loads: Returns what a worker pickled.
    """

    dumps, loads = staticmethod(dumps), staticmethod(loads)

    def __init__(
        self,
        servers: Sequence[Demand],
        workers: Sequence[Demand],
        devices_per_worker: int | None,
    ) -> None:
        self._ray = import_ray()
        self.num_servers, self.num_workers = len(servers), len(workers)
        self._devices_per_worker = devices_per_worker
        self._options = numeric_options()
        self._demanded = {name for demand in (*servers, *workers) for name in demand.resources}
        self._servers = self._start(ServerActor, servers, {})
        cpu_devices = devices_per_worker or 1
        flags = f"--xla_force_host_platform_device_count={cpu_devices}"
        self._workers = self._start(WorkerActor, workers, {"XLA_FLAGS": flags})
        self._known: list[set[int]] = [set() for _ in workers]  # exports that each worker has had
        self._exports: OrderedDict[int, tuple[Any, Export]] = OrderedDict()
        self._keys = itertools.count()
        self._is_closed = False
        self._variables: RayVariables | None = None

    def free_resources(self) -> str:
        """Returns a sentence that names the resources of the cluster that nothing occupies."""
        free, total = self._ray.available_resources(), self._ray.cluster_resources()
        names = sorted(name for name in total if name in ("CPU", "GPU") or name in self._demanded)
        shown = ", ".join(f"{free.get(name, 0):g} of {total[name]:g} {name}" for name in names)
        return f"Free in the Ray cluster: {shown}."

    async def set_up_worker(self, worker: int) -> int:
        """Tells a worker its servers, as soon as it has been restarted.

        Returns:
            The number of its devices.
        """
        self._require_open()
        self._known[worker] = set()
        method = self._workers[worker].set_up.options(max_task_retries=-1)
        reference = method.remote(self._servers, self._devices_per_worker)
        num_devices: int = await _reply(worker, reference)
        return num_devices

    async def call_worker(
        self,
        worker: int,
        method: str,
        assignment: Assignment,
        work: Export | StepWork,
        data: Pickled,
    ) -> Any:
        """Calls a method of a worker. Ray does not repeat the call if the worker is lost."""
        self._require_open()
        while True:
            header, references = request(assignment, work, self._known[worker])
            self._known[worker].update(references)
            call = self._workers[worker].run.remote
            reply = await _reply(worker, call((method, header, references, *data)))
            if not isinstance(reply, NotExportedError):
                return typed(reply)
            self._known[worker].clear()  # it has had many others since

    def call_server(self, server: int, method: str, *arguments: Any) -> Awaitable[Any]:
        """Calls a method of a server at once, and returns what waits for the reply.

        `load` waits for its restart. The reply of `snapshot` is a pair, whose second is a
        reference.
        """
        self._require_open()
        call = getattr(self._servers[server], method)
        if method == "snapshot":
            return _both(server, *call.options(num_returns=2).remote())
        if method == "load":
            call = call.options(max_task_retries=-1)
        return _accepted(server, call.remote(*arguments))

    def ask_server(self, server: int, method: str, *arguments: Any) -> Any:
        """Calls a method of one server, and waits for the reply.

        Raises:
            LostError: If it has ended, or has no values.
        """
        self._require_open()
        with _errors_of(server):
            reference = getattr(self._servers[server], method).remote(*arguments)
            return require_accepted(server, self._ray.get(reference))

    @property
    def variables(self) -> RayVariables:
        """The named variables, whose process is started on this machine when it is first used."""
        self._require_open()
        if self._variables is None:
            here = self._ray.get_runtime_context().get_node_id()
            strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options = {
                "num_cpus": 0,
                "scheduling_strategy": strategy(here, soft=True),
                "runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu", **self._environment}},
            }
            actor = self._ray.remote(NamedVariables).options(**options).remote()
            self._variables = RayVariables(actor)
        return self._variables

    def export(self, value: Any, what: str = "") -> Export:
        """Stores an object for the workers, once, as long as it is used.

        Raises:
            TypeError: If it cannot be pickled; see `pickled`.
            RuntimeError: If an option of `jax.config` has changed.
        """
        self._require_open()
        for name, now in numeric_options().items():
            if now != (old := self._options[name]):
                raise RuntimeError(
                    f"{name} is {now!r}, but the servers and workers were started with {old!r}. "
                    f"Set it before you create the strategy: jax.config.update({name!r}, {now!r})."
                )
        known = self._exports.get(id(value))
        if known is None:
            reference = self._ray.put(pickled(dumps, value, what))
            known = value, Export(next(self._keys), [reference])
            self._exports[id(value)] = known
            if len(self._exports) > _MAX_EXPORTS:
                self._exports.popitem(last=False)
        self._exports.move_to_end(id(value))
        return known[1]

    def next_key(self) -> int:
        """Returns a number that no other export has."""
        return next(self._keys)

    def close(self) -> None:
        """Ends all actors."""
        self._is_closed = True
        if not self._ray.is_initialized():
            return  # the actors have ended with their cluster
        for actor in [*self._servers, *self._workers]:
            self._ray.kill(actor)
        if self._variables is not None:
            self._variables.end()

    @property
    def _environment(self) -> dict[str, str]:
        """The environment variables that give a process the options of this one."""
        return {k.upper(): str(v) for k, v in self._options.items() if v is not None}

    def _require_open(self) -> None:
        # Ray would start or join a cluster again.
        if self._is_closed:
            raise RuntimeError("The strategy has been closed. Create a new one.")
        if not self._ray.is_initialized():
            raise RuntimeError(
                "The program has left the Ray cluster of the strategy. Call strategy.close() "
                "before ray.shutdown(), and create a new strategy."
            )

    def _start(
        self, actor: type, demands: Sequence[Demand], environment: Mapping[str, str]
    ) -> list[Any]:
        handles = []
        for index, demand in enumerate(demands):
            options, variables = dict(demand.options), self._environment
            if not options.get("num_gpus"):
                # Ray does not hide GPUs from an actor without any, and JAX would reserve theirs.
                variables |= {"JAX_PLATFORMS": "cpu", **environment}
            given = dict(options.get("runtime_env") or {})
            given["env_vars"] = {**variables, **given.get("env_vars", {})}
            options["runtime_env"] = given
            remote = self._ray.remote(actor).options(max_restarts=-1, **options)
            handles.append(remote.remote(index))
        return handles


async def _reply(index: int, reference: Any) -> Any:
    with _errors_of(index):
        return await asyncio.wrap_future(reference.future())


async def _accepted(server: int, reference: Any) -> Any:
    return require_accepted(server, await _reply(server, reference))


async def _both(server: int, reference: Any, held: Any) -> tuple[Any, Any]:
    return await _accepted(server, reference), held
