"""The cluster of Ray that a parameter server runs on: connecting to it, and its resources."""

import functools
import logging
import os
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, final

from mirror._src.base.errors import first_line
from mirror._src.base.optional import require
from mirror._src.cluster.resolvers import ClusterSpec, ClusterTask
from mirror._src.ps.server import (
    TOKEN,
    Server,
    answers,
    head_address,
    head_of,
    resource_of,
    token_variables,
)

_logger = logging.getLogger("mirror")
_WAIT_SECS = 60.0
_JOIN_SECS = 300.0  # for machines whose tasks the user starts, as long as JAX waits for processes
_LINE_SECS = 10.0  # before and between the lines about a wait
_STATS = "RAY_USAGE_STATS_ENABLED"
_PIN = 0.001
"""Share of the resource of a task's node that pins an actor to the node."""


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


class Demand(NamedTuple):
    """Demand of an actor for resources.

    Attributes:
        task: The task, such as `ps 0`.
        options: Options of Ray: `num_cpus`, `num_gpus`, `memory`, `resources`, and others.
    """

    task: ClusterTask
    options: Mapping[str, Any]

    @property
    def resources(self) -> dict[str, float]:
        """The resources by name."""
        names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
        wanted = {names[key]: self.options.get(key) for key in names}
        wanted = {**wanted, **(self.options.get("resources") or {})}
        return {name: float(amount) for name, amount in wanted.items() if amount}


def demands(
    job: str, count: int, options: Mapping[str, Any], spec: ClusterSpec | None
) -> list[Demand]:
    """Returns the demands of the tasks of a job.

    Args:
        job: `ps` or `worker`.
        count: Number of tasks.
        options: The user's options of Ray.
        spec: The cluster, in which each task has a node with its own resource.
    """
    found = []
    for index in range(count) if spec is None else spec.task_indices(job):
        task, own = ClusterTask(job, index), {"num_cpus": 0, **options}
        if spec is not None:
            own["resources"] = {**own.get("resources", {}), resource_of(task): _PIN}
        found.append(Demand(task, own))
    return found


@final
class Connection:
    """A use of the connection of this process to Ray.

    A program that has called `ray.init` keeps its own. All strategies of a program share one, which
    the last of them closes, because Ray has one per process.

    Args:
        spec: The cluster, whose head it joins; None for a cluster on this machine. The program is
            the chief, so it starts the node of the chief, which is the head, unless it runs.

    Raises:
        RuntimeError: If the head does not answer, or cannot be started.
    """

    _num_users: ClassVar[int] = 0  # of the connection that mirror has opened
    _head: ClassVar[Server | None] = None  # of the cluster, if mirror has started it

    def __init__(self, spec: ClusterSpec | None) -> None:
        self._variables = {} if _STATS in os.environ else {_STATS: "0"}
        if spec is not None:
            self._variables |= token_variables()
        os.environ.update(self._variables)  # Ray reads them when it is imported
        ray = import_ray()
        self._is_open = Connection._num_users > 0 or not ray.is_initialized()
        Connection._num_users += self._is_open
        if ray.is_initialized():
            return
        try:
            self._join(ray, spec)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _join(ray: Any, spec: ClusterSpec | None) -> None:
        # Without `address`, Ray joins the cluster that a program before has left behind.
        address: dict[str, Any] = {"address": "local", "include_dashboard": False}
        if spec is not None:
            if head_of(spec).job == "chief" and not answers(head_address(spec)):
                Connection._head = Server(spec, *head_of(spec))
            address = {"address": head_address(spec)}
        try:
            with _sigterm_kept(), warnings.catch_warnings():
                # Of JAX: Ray starts processes, whose fork is followed by another program.
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **address)
        except (ConnectionError, RuntimeError, TimeoutError) as error:
            if spec is None:
                raise
            head = head_of(spec)
            raise RuntimeError(
                f"No Ray cluster answers at {head_address(spec)}, the address of {head}. Start "
                f"mirror.distributed.Server(cluster, {head.job!r}, {head.number}) there first. If "
                f"only some machines have a token of Ray, {TOKEN}, copy it to the others, or set "
                f"RAY_AUTH_MODE=disabled in all processes. ({first_line(error)})"
            ) from error

    def close(self) -> None:
        """Leaves the cluster with its last user; one that this process has started ends."""
        if self._is_open:
            self._is_open = False
            Connection._num_users -= 1
            if not Connection._num_users:
                with _sigterm_kept():
                    import_ray().shutdown()
                head, Connection._head = Connection._head, None
                if head is not None:
                    head.stop()
        for name in self._variables:
            os.environ.pop(name, None)


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keeps the program's handler of SIGTERM, which Ray replaces (2.60); in the main thread.

    `ray.init` sets one of Python, and its core, in C++, one that prints a trace and ends the
    process. `ray.shutdown` restores the default, of which Python does not know.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def require_resources(wanted: Sequence[Demand]) -> None:
    """Waits until the nodes of Ray have room for the actors, with a line every 10 s.

    Raises:
        RuntimeError: If they do not have room in time, which is 300 s for the nodes of a cluster
            specification and 60 s otherwise. The message says what is missing.
    """
    wait_secs = _JOIN_SECS if any(map(_pin_of, wanted)) else _WAIT_SECS
    start = time.monotonic()
    next_line = _LINE_SECS
    while (problem := _missing(wanted)) is not None:
        waited = time.monotonic() - start
        if waited > wait_secs:
            raise RuntimeError(f"{problem} Waited {wait_secs:.0f} s.")
        if waited > next_line:
            _logger.warning(
                "Waiting for the cluster, %.0f s of %.0f. %s", waited, wait_secs, problem
            )
            next_line += _LINE_SECS
        time.sleep(min(1.0, wait_secs / 10))


def num_nodes() -> int:
    """Returns the number of machines of the cluster."""
    return len(_nodes())


def _nodes() -> list[dict[str, float]]:
    return [dict(node["Resources"]) for node in import_ray().nodes() if node["Alive"]]


def _pin_of(demand: Demand) -> str | None:
    """Returns the resource that only the node of the demand's task has; None on any node."""
    return next((name for name in demand.resources if name.startswith("mirror:")), None)


def _missing(wanted: Sequence[Demand]) -> str | None:
    """Returns which demand no node has room for, after those before it; None if all have it."""
    nodes = _nodes()
    total: Counter[str] = Counter()
    for node in nodes:
        total.update(node)
    asked: Counter[str] = Counter()
    for demand in sorted(wanted, key=lambda d: -sum(d.resources.values())):
        asked.update(demand.resources)
        for node in nodes:
            if all(node.get(name, 0) >= amount for name, amount in demand.resources.items()):
                for name, amount in demand.resources.items():
                    node[name] -= amount
                break
        else:
            pin = _pin_of(demand)
            if pin is not None and not any(pin in node for node in nodes):
                return (
                    f"The node of {demand.task} has not joined the Ray cluster. Run "
                    f"mirror.distributed.Server(cluster, {demand.task.job!r}, "
                    f"{demand.task.number}).join() on its machine."
                )
            names = sorted(demand.resources)
            need = ", ".join(f"{demand.resources[name]:g} {name}" for name in names)
            have = ", ".join(f"{total.get(name, 0):g} {name}" for name in names)
            sums = ", ".join(f"{asked[name]:g} {name}" for name in names)
            return (
                f"No machine of the Ray cluster has room for {demand.task}, which demands {need}. "
                f"All tasks so far demand {sums}; the cluster of {len(nodes)} machines has "
                f"{have}. Start more machines, or demand less in `worker_options` and `ps_options`."
            )
    return None
