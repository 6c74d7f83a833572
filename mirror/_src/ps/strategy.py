"""`ParameterServerStrategy`: variables on parameter servers, gradients from workers."""

import atexit
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np

from mirror._src.base.errors import bytes_in_words, counted, expected, require_int
from mirror._src.base.public_names import set_module
from mirror._src.base.tracebacks import api_boundary
from mirror._src.base.unknown_names import unknown_attribute
from mirror._src.cluster.resolvers import ClusterResolver, ClusterSpec, Jobs
from mirror._src.devices import backend
from mirror._src.engine.storage import as_array
from mirror._src.ps import ray_cluster
from mirror._src.ps.driver_thread import DriverThread
from mirror._src.ps.engine import RayEngine
from mirror._src.ps.messages import LostError
from mirror._src.ps.objects import TrainingObjects
from mirror._src.ps.placement import MinSizePartitioner, PartitionerLike, Placement
from mirror._src.ps.server import cluster_of
from mirror._src.ps.sparse import SparseTables
from mirror._src.ps.training import ServedSteps, ServedTraining, has_tables
from mirror._src.ps.variables import ServerVariable
from mirror._src.strategy.scope import Scope
from mirror._src.strategy.strategy import OneDeviceStrategy, Strategy
from mirror._src.training.runners import RemoteStrategy, StepRunner, Training


@set_module("mirror.ps")
@final
class ParameterServerStrategy(RemoteStrategy):
    """Training with parameter servers, on a cluster of Ray.

    The variables are on servers, and workers compute gradients. Workers can be lost and can
    return at any time. It serves CPU clusters, preemptible workers and large embedding tables. For
    the GPUs of one machine, use `MirroredStrategy`, which does not move gradients over the network.

    `mirror.Trainer` trains with it. `ClusterCoordinator` schedules functions and asynchronous
    steps, which are written as for `MirroredStrategy.run`.

    Args:
        cluster: Addresses of the jobs `ps`, `worker` and `chief`, or a resolver. Each task runs on
            the machine of its `mirror.distributed.Server`; the one of the chief is started here.
            Defaults to the cluster that Ray is connected to, or else a new one on this machine.
        ps: Number of parameter servers, without `cluster`.
        workers: Number of workers, without `cluster`. Defaults to the number of machines.
        staleness: 0 for synchronous updates by `mirror.Trainer`: each has the gradients of all
            workers, which read the same values. With k, a worker's gradient is applied as soon as
            it arrives, at most k updates after its values were read. None sets no bound.
        partitioner: Function of shape and dtype that returns the number of shards of a variable.
            None does not cut variables.
        devices_per_worker: Number of devices of a worker. Defaults to all GPUs that Ray gives it,
            or one CPU device.
        worker_options: Options of Ray for the workers, such as `{"num_gpus": 1}`.
        ps_options: Options of Ray for the servers, such as `{"memory": 8 << 30}`.
        snapshot_every: Number of updates between two snapshots of the servers, which the main
            program keeps in memory. If a server is lost, all return to the last snapshot, and the
            updates since are repeated. With 0, the loss of a server is an error.
        sparse: For each variable of which a batch touches few rows, such as `"embed.embedding"`, a
            function that returns the integer ids of these rows. It receives the batch of a
            `Trainer`, or the arguments of a scheduled step without model and optimizer. Only these
            rows are sent and updated, also by optimizers that would change rows without a gradient,
            such as Adam; in the step, all others are NaN.

    Raises:
        ValueError: If a number is out of range, or contradicts another argument.
        TypeError: If an argument has the wrong type.
        ModuleNotFoundError: If Ray is not installed.
        RuntimeError: If the cluster has no room for the tasks within 60 s (300 s with `cluster`),
            or if other actors occupy it for 300 s.

    >>> with mirror.ps.ParameterServerStrategy(ps=2, workers=4) as strategy:
    ...     coordinator = mirror.ps.ClusterCoordinator(strategy)
    """

    def __init__(
        self,
        cluster: ClusterSpec | Jobs | ClusterResolver | None = None,
        *,
        ps: int | None = None,
        workers: int | None = None,
        staleness: int | None = 0,
        partitioner: PartitionerLike | None = MinSizePartitioner(),  # noqa: B008 - immutable
        devices_per_worker: int | None = None,
        worker_options: Mapping[str, Any] | None = None,
        ps_options: Mapping[str, Any] | None = None,
        snapshot_every: int = 100,
        sparse: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._is_closed, self._open = True, contextlib.ExitStack()
        spec = None if cluster is None else cluster_of(cluster)
        ps, workers = _counts(spec, ps, workers)
        _require_staleness(staleness)
        require_int("snapshot_every", snapshot_every, 0, "0 disables snapshots.")
        if devices_per_worker is not None:
            require_int("devices_per_worker", devices_per_worker)
        for name, options in (("worker_options", worker_options), ("ps_options", ps_options)):
            if not isinstance(options, Mapping | None):
                fix = f"For example {name}={{'num_cpus': 1}}."
                raise TypeError(expected(name, options, "a dict or None", fix))
        if partitioner is not None and not callable(partitioner):
            fix = "For example mirror.ps.MinSizePartitioner(256 << 10)."
            raise TypeError(expected("partitioner", partitioner, "callable or None", fix))
        self._tables = SparseTables(sparse)
        self._open.callback(ray_cluster.Connection(spec).close)
        self._coordinator: Any = None
        try:
            servers = ray_cluster.demands("ps", ps, ps_options or {}, spec)
            count = workers or ray_cluster.num_nodes()
            demands = ray_cluster.demands("worker", count, worker_options or {}, spec)
            ray_cluster.require_resources([*servers, *demands])
            atexit.register(self._open.close)
            self._engine = RayEngine(servers, demands, devices_per_worker)
            self._open.callback(self._engine.close)
            self._thread = DriverThread(
                self._engine, staleness=staleness, snapshot_every=snapshot_every
            )
            self._open.callback(self._thread.close)
            self._thread.start()
        except BaseException:
            self.close()
            raise
        self._is_closed = False
        self._staleness = staleness
        self._local = OneDeviceStrategy(backend.default_devices()[0])
        self._names = (f"Variable_{i}" for i in itertools.count())
        self._training = ServedTraining(
            self._thread,
            self._engine,
            is_sync=self.is_sync,
            partitioner=partitioner,
            tables=self._tables,
        )

    @property
    def local(self) -> Strategy:
        """The strategy of the main program: one replica, which evaluates and predicts."""
        return self._local

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that compute an update: the devices of all workers, or of one."""
        return self.devices_per_worker * self._training.num_parts

    def step_runner(self, training: Training) -> StepRunner:
        """See `RemoteStrategy.step_runner`."""
        if self._tables.functions or has_tables(training.objects["model"]):
            objects = TrainingObjects(**training.objects)
            self._tables.require_in(objects.leaves, objects.tables)
        return ServedSteps(self, self._training, training)

    @property
    def num_ps(self) -> int:
        """Number of parameter servers."""
        return self._engine.num_servers

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._engine.num_workers

    @property
    def devices_per_worker(self) -> int:
        """Number of devices of each worker."""
        return self._thread.driver.devices_per_worker

    @property
    def is_sync(self) -> bool:
        """Whether each update has the gradients of all workers."""
        return self._staleness == 0

    @property
    def staleness(self) -> int | None:
        """The most updates between reading values and applying their gradient; None: any number."""
        return self._staleness

    def scope(self) -> Scope[Self]:
        """Returns a context manager in which `mirror.get_strategy()` returns this strategy.

        Create model and optimizer in it, as with `MirroredStrategy`. They are on one device of
        the main program; the first scheduled step loads them onto the servers.
        """
        return Scope(self, self._local._replicas, self._local)

    @api_boundary
    def Variable(self, value: Any, name: str | None = None) -> ServerVariable:
        """Creates a variable that the main program and scheduled functions share.

        Args:
            value: Its first value. A variable of this name that exists keeps its value.
            name: Its name. Defaults to `Variable_0`, `Variable_1`, ...

        Raises:
            TypeError: If `value` is not an array or a number.
            ValueError: If a variable of this name has another shape or dtype, or an integer does
                not fit 32 bits.
        """
        if name is None:
            name = next(self._names)
        elif not isinstance(name, str):
            raise TypeError(expected("name", name, "a string or None", "For example name='a'."))
        variables = self._engine.variables
        first = as_array(f"The first value of variable {name!r}", value)
        variables.apply(name, "create", np.asarray(first))
        return ServerVariable(name, variables)

    @api_boundary
    def read_rows(self, table: str, ids: Any) -> np.ndarray:
        """Returns rows of a variable named in `sparse`, after all scheduled steps have ended.

        Args:
            table: Its name, such as `"embed.embedding"`.
            ids: Numbers of rows, in any shape.

        Returns:
            The rows, in the shape of `ids` and then of a row.

        Raises:
            ValueError: If there is no such table on the servers, or an id is out of range.
            TypeError: If the ids are not integers.
            Exception: What a scheduled function raised.
        """
        return self._training.read_rows(table, ids)

    @api_boundary
    def report(self) -> "ParameterServerReport":
        """Returns where each variable is, how much travels, and what was lost."""
        statistics: list[dict[str, Any]] = [{} for _ in range(self.num_ps)]
        for server in range(self.num_ps):
            with contextlib.suppress(LostError):  # it is being restarted
                statistics[server] = self._engine.ask_server(server, "statistics")
        return ParameterServerReport(
            self._training.placement,
            statistics,
            dict(self._thread.driver.losses),
            self.num_workers,
        )

    def close(self) -> None:
        """Ends servers and workers; with them, the values that were not collected by `join`."""
        self._is_closed = True
        atexit.unregister(self._open.close)
        self._open.close()

    if not TYPE_CHECKING:  # A type checker would accept any attribute.

        def __getattr__(self, name):
            raise unknown_attribute("strategy", self, name, "parameter servers")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._is_closed:
            return "ParameterServerStrategy(closed)"
        servers, workers = counted(self.num_ps, "server"), counted(self.num_workers, "worker")
        return f"ParameterServerStrategy({servers}, {workers}, staleness={self._staleness})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "A ParameterServerStrategy cannot be sent to a worker. In a scheduled function, "
            "mirror.get_strategy() returns the strategy of the worker."
        )


def _counts(spec: ClusterSpec | None, ps: Any, workers: Any) -> tuple[int, int | None]:
    """Returns the numbers of servers and workers; None means one worker per machine."""
    for name, count in (("ps", ps), ("workers", workers)):
        if count is not None:
            require_int(name, count, 1, "There must be at least one ps and one worker.")
            if spec is not None:
                raise ValueError(
                    f"`{name}`={count} cannot be combined with `cluster`, which has the tasks "
                    f"{spec.as_dict()}. Omit {name}."
                )
    if spec is None:
        return 1 if ps is None else ps, workers
    return spec.num_tasks("ps"), spec.num_tasks("worker")


def _require_staleness(staleness: Any) -> None:
    if staleness is not None:
        fix = "0 is synchronous, k is asynchronous with at most k updates in between, None is any."
        require_int("staleness", staleness, 0, fix)


@set_module("mirror.ps")
@final
class ParameterServerReport:
    """Report of a `ParameterServerStrategy`; print it.

    Attributes:
        placement: For each variable, the servers that hold its rows, as `(server, start, stop)`.
        bytes_per_server: Bytes of the variables on each server.
        bytes_per_update: Bytes that one worker pulls and pushes for an update. With `sparse`, of
            which every batch touches other rows, the mean over the updates so far.
        bytes_moved: Bytes that the servers have sent and received since they were started.
        num_updates: Updates that the servers have made.
        staleness: How many gradients were applied that many updates after their values were read.
            Each server counts for itself; these are the counts of the server whose gradients were
            the most late.
        lost_workers: Number of times that a worker was lost.
        rejoined_workers: Number of times that a worker returned.
        lost_servers: Number of times that a server was lost.
    """

    def __init__(
        self,
        placement: Placement | None,
        statistics: Sequence[Mapping[str, Any]],
        losses: Mapping[str, int],
        num_workers: int,
    ) -> None:
        holders = {} if placement is None else placement.holders
        self.placement = {
            name: tuple((server, part.start, part.stop) for server, part in held)
            for name, held in holders.items()
        }
        empty = [0] * len(statistics)
        self.bytes_per_server = empty if placement is None else placement.nbytes()
        self.bytes_per_update = 2 * sum(self.bytes_per_server)
        if placement is not None and placement.tables:
            self.bytes_per_update = round(sum(map(_bytes_per_part, statistics)))
        self.bytes_moved = sum(_bytes(each, "out") + _bytes(each, "in") for each in statistics)
        self.num_updates = max((each.get("version", 0) for each in statistics), default=0)
        counts = [dict(each.get("staleness", {})) for each in statistics]
        self.staleness: dict[int, int] = max(counts, key=_lateness, default={})
        self.lost_workers, self.rejoined_workers = losses["workers"], losses["rejoined"]
        self.lost_servers = losses["servers"]
        self._num_workers = num_workers

    def __repr__(self) -> str:
        lines = [
            f"{len(self.bytes_per_server)} parameter servers, {self._num_workers} workers",
            *(
                f"  ps {server}: {bytes_in_words(count)}"
                for server, count in enumerate(self.bytes_per_server)
            ),
            f"Each worker receives and sends {bytes_in_words(self.bytes_per_update)} per update.",
            f"Updates: {self.num_updates}. Staleness of gradients: "
            + (", ".join(f"{k}: {n}" for k, n in self.staleness.items()) or "none applied"),
            f"Lost: {self.lost_workers} workers, of which {self.rejoined_workers} returned; "
            f"{self.lost_servers} servers.",
        ]
        for name, held in self.placement.items():
            where = ", ".join(f"ps {server} [{start}:{stop}]" for server, start, stop in held)
            lines.append(f"  {name}: {where}")
        return "\n".join(lines)


def _lateness(counts: Mapping[int, int]) -> tuple[int, int]:
    """Returns the largest staleness, and the sum of all."""
    return max(counts, default=0), sum(late * count for late, count in counts.items())


def _bytes(statistics: Mapping[str, Any], way: str) -> int:
    return int(statistics.get(f"bytes_{way}", 0))


def _bytes_per_part(statistics: Mapping[str, Any]) -> float:
    """Returns the mean of what a server sent for a pull and received in a push."""
    pulls, pushes = (max(1, statistics.get(name, 0)) for name in ("pulls", "pushes"))
    return _bytes(statistics, "out") / pulls + _bytes(statistics, "in") / pushes
