"""The addresses of the processes of a job, and the resolvers that find them."""

import abc
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

from mirror._src.base.errors import describe, expected, nearest, require_int
from mirror._src.base.public_names import set_module

TRAINING_JOBS = ("chief", "worker")
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:\s]+):(\d+)")
Tasks: TypeAlias = Sequence[str] | Mapping[int, str]
Jobs: TypeAlias = Mapping[str, Tasks]
_EXAMPLE = '{"cluster": {"worker": ["a:2222"]}, "task": {"type": "worker", "index": 0}}'
_PORTS = 4096  # of the dynamic range, from which a port follows from the number of the Slurm job


class ClusterTask(NamedTuple):
    """One process of a cluster.

    Attributes:
        job: Name of the job, such as `"worker"`.
        number: Index of the task in the job.
    """

    job: str
    number: int

    def __str__(self) -> str:
        return f"{self.job} {self.number}"


@set_module("mirror.distributed")
@final
class ClusterSpec:
    """The addresses of the processes of a cluster, by job.

    Args:
        cluster: For each job, a list of `"host:port"`, or a dict from task index to address; or
            another `ClusterSpec`.

    Raises:
        TypeError: If `cluster` is not a dict of lists or dicts of strings.
        ValueError: If an address is not `host:port`, or two tasks have the same address.

    >>> spec = ClusterSpec({"worker": ["a:2222", "b:2222"]})
    >>> spec.jobs, spec.num_tasks("worker"), spec.task_address("worker", 1)
    (['worker'], 2, 'b:2222')
    """

    def __init__(self, cluster: "Jobs | ClusterSpec") -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        fix = "For example {'worker': ['host0:2222', 'host1:2222']}."
        if not isinstance(cluster, Mapping):
            raise TypeError(expected("cluster", cluster, "a dict from job to addresses", fix))
        self._jobs: dict[str, dict[int, str]] = {
            job: _tasks(job, tasks, fix) for job, tasks in cluster.items()
        }
        addresses = [a for tasks in self._jobs.values() for a in tasks.values()]
        repeated = [a for i, a in enumerate(addresses) if a in addresses[:i]]
        if repeated:
            raise ValueError(
                f"The address {repeated[0]} occurs twice in the cluster {self.as_dict()}. Give "
                "every task its own port."
            )

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, Tasks]:
        """Returns a list of addresses for each job; a dict if task indices have gaps."""
        return {
            job: list(tasks.values()) if list(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks of a job.

        Raises:
            ValueError: If there is no such job.
        """
        return len(self._of(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of the tasks of a job.

        Raises:
            ValueError: If there is no such job.
        """
        return list(self._of(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of a task.

        Raises:
            ValueError: If there is no such job or task.
        """
        tasks = self._of(job_name)
        if task_index not in tasks:
            raise ValueError(
                f"The job {job_name!r} has no task {task_index}. It has the tasks {list(tasks)}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str]:
        """Returns the addresses of a job.

        Raises:
            ValueError: If there is no such job.
        """
        return list(self._of(job_name).values())

    def training_tasks(self) -> list[tuple[ClusterTask, str]]:
        """Returns the tasks that train, the chief first, with their addresses."""
        return [
            (ClusterTask(job, index), address)
            for job in TRAINING_JOBS
            for index, address in self._jobs.get(job, {}).items()
        ]

    def __bool__(self) -> bool:
        return any(self._jobs.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._jobs == other._jobs

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def _of(self, job: str) -> dict[int, str]:
        if job not in self._jobs:
            raise ValueError(
                f"The cluster has no job {job!r}. It has {self.jobs}.{nearest(str(job), self.jobs)}"
            )
        return self._jobs[job]


def _tasks(job: Any, tasks: Any, fix: str) -> dict[int, str]:
    if not isinstance(job, str):
        raise TypeError(expected("cluster", job, "a dict whose keys are names of jobs", fix))
    if isinstance(tasks, str) or not isinstance(tasks, Sequence | Mapping):
        raise TypeError(expected(f"cluster[{job!r}]", tasks, "a list of addresses", fix))
    pairs = list(tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks))
    for index, address in pairs:
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise ValueError(
                f"cluster[{job!r}][{index!r}] must be 'host:port', got {describe(address)}. {fix}"
            )
    return {int(index): address for index, address in pairs}


class Membership(NamedTuple):
    """The arguments of `jax.distributed.initialize`.

    Attributes:
        coordinator_address: Address of process 0.
        num_processes: Number of processes.
        process_id: Index of this process.
        local_device_ids: Accelerators of this process; None means all that are visible.
    """

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: list[int] | None = None


@set_module("mirror.distributed")
class ClusterResolver(abc.ABC):
    """Base class of the cluster resolvers, with the interface of TensorFlow's.

    >>> resolver = mirror.distributed.SimpleClusterResolver({"worker": ["a:2222"]}, "worker", 0)
    >>> isinstance(resolver, ClusterResolver), resolver.master()
    (True, 'a:2222')
    """

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all processes; an empty one if there is no cluster."""

    @property
    @abc.abstractmethod
    def task_type(self) -> str | None:
        """Job of this process, such as `"worker"`; None if there is no cluster."""

    @property
    @abc.abstractmethod
    def task_id(self) -> int | None:
        """Index of this process in its job; None if there is no cluster."""

    @property
    def local_device_ids(self) -> list[int] | None:
        """Accelerators of this process; None means all that are visible."""
        return None

    def master(self) -> str:
        """Returns the address of the coordinator: the chief, or worker 0."""
        members = self.cluster_spec().training_tasks()
        return members[0][1] if members else ""

    def membership(self) -> Membership | None:
        """Returns the place of this process among the processes that train.

        Returns:
            None if there is no cluster, or this process is the evaluator.

        Raises:
            ValueError: If the cluster has no such task.
            NotImplementedError: If this process, or the cluster, belongs to a parameter server.
        """
        spec = self.cluster_spec()
        if not spec:
            return None
        index = self.task_id
        me = ClusterTask(str(self.task_type), -1 if index is None else index)
        if me.job == "evaluator":
            return None
        if me.job == "ps" or "ps" in spec.jobs:
            raise NotImplementedError(
                f"The cluster {spec} has the job 'ps'. mirror.MultiWorkerMirroredStrategy trains "
                "without parameter servers. Use mirror.ps.ParameterServerStrategy, or remove 'ps' "
                "from the cluster, and do not start it."
            )
        members = spec.training_tasks()
        tasks = [task for task, _ in members]
        if me not in tasks:
            known = ", ".join(map(str, tasks)) or "none that train ('chief', 'worker')"
            raise ValueError(
                f"This process is task {me}, which the cluster {spec} does not have. Its tasks are "
                f"{known}. Give every process the same cluster and its own task."
            )
        return Membership(members[0][1], len(members), tasks.index(me), self.local_device_ids)


class _KnownCluster(ClusterResolver):
    """Base class of the resolvers that know the cluster, and their task, from the start."""

    _spec: ClusterSpec
    _type: str | None
    _id: int | None

    def cluster_spec(self) -> ClusterSpec:
        """See `ClusterResolver.cluster_spec`."""
        return self._spec

    @property
    def task_type(self) -> str | None:
        """Job of this process; None if there is no cluster."""
        return self._type

    @property
    def task_id(self) -> int | None:
        """Index of this process in its job; None if there is no cluster."""
        return self._id


@set_module("mirror.distributed")
@final
class SimpleClusterResolver(_KnownCluster):
    """A cluster that the program knows.

    Args:
        cluster_spec: The addresses of all processes.
        task_type: Job of this process, `"chief"` or `"worker"`.
        task_id: Index of this process in its job.

    Raises:
        TypeError: If `task_type` is not a string, or `task_id` is not an int.
        ValueError: If `task_id` is negative.

    >>> spec = mirror.distributed.ClusterSpec({"worker": ["a:2222", "b:2222"]})
    >>> SimpleClusterResolver(spec, task_type="worker", task_id=1).master()
    'a:2222'
    """

    def __init__(
        self, cluster_spec: ClusterSpec | Jobs, task_type: str = "worker", task_id: int = 0
    ) -> None:
        if not isinstance(task_type, str):
            raise TypeError(expected("task_type", task_type, "a string, such as 'worker'"))
        require_int("task_id", task_id, 0)
        self._spec = ClusterSpec(cluster_spec)
        self._type, self._id = task_type, int(task_id)


@set_module("mirror.distributed")
@final
class TFConfigClusterResolver(_KnownCluster):
    """The cluster of the environment variable `TF_CONFIG`, which is JSON.

    Kubeflow and Vertex AI set it for every process, and so does `mirror launch --processes`:

        {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}

    Args:
        task_type: Overrides the job of this process.
        task_id: Overrides the index of this process in its job.

    Raises:
        ValueError: If `TF_CONFIG` is not such JSON.

    >>> TFConfigClusterResolver().cluster_spec()  # without TF_CONFIG
    ClusterSpec({})
    """

    def __init__(self, task_type: str | None = None, task_id: int | None = None) -> None:
        config = _read_config(os.environ.get("TF_CONFIG", ""))
        try:
            self._spec = ClusterSpec(config.get("cluster") or {})
        except (TypeError, ValueError) as error:
            raise ValueError(f"TF_CONFIG is not valid: {error}") from None
        task = config.get("task") or {}
        if self._spec and not isinstance(task, Mapping):
            raise ValueError(_bad_config(f"its task is {task!r}"))
        if self._spec and task_type is None and not isinstance(task.get("type"), str):
            raise ValueError(_bad_config(f"its task has no type: {task!r}"))
        self._type = task.get("type") if task_type is None else task_type
        index = task.get("index") if task_id is None else task_id
        try:
            self._id = None if index is None and not self._spec else int(str(index))
        except ValueError:
            raise ValueError(_bad_config(f"its task has no index: {task!r}")) from None


def _read_config(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(_bad_config(f"it is not JSON ({error})")) from None
    if not isinstance(config, dict):
        raise ValueError(_bad_config(f"it is {config!r}"))
    return config


def _bad_config(reason: str) -> str:
    return f"TF_CONFIG is not valid: {reason}. For example: TF_CONFIG='{_EXAMPLE}'. Or unset it."


@set_module("mirror.distributed")
@final
class SlurmClusterResolver(_KnownCluster):
    """The tasks of a Slurm job step, which `srun` starts; all of them are workers.

    With one task per node, the task uses all GPUs that it can see. With several, each uses one.

    Args:
        port: Port of the coordinator. By default, it follows from the number of the job.

    Raises:
        RuntimeError: If this process has not been started by `srun`.

    >>> mirror.distributed.SlurmClusterResolver()
    Traceback (most recent call last):
        ...
    RuntimeError: SlurmClusterResolver needs the environment variables of Slurm, ...
    """

    def __init__(self, port: int | None = None) -> None:
        if port is not None:
            require_int("port", port)
        values = {
            "nodes": _variable("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
            "tasks": _variable("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
            "job": _variable("SLURM_JOB_ID"),
            "me": _variable("SLURM_PROCID"),
        }
        missing = [names for names, value in values.values() if not value]
        if missing:
            raise RuntimeError(
                "SlurmClusterResolver needs the environment variables of Slurm, but "
                f"{', '.join(missing)} are not set. Start the program with srun, for example: "
                "srun --nodes=2 --ntasks-per-node=1 python train.py"
            )
        nodes, counts, job, me = (value for _, value in values.values())
        first = 65536 - _PORTS + int(job) % _PORTS if port is None else int(port)
        hosts = expand_nodes(nodes)
        per_node = expand_counts(counts)
        addresses = [
            f"{host}:{(first + i - 1024) % (65536 - 1024) + 1024}"
            for host, count in zip(hosts, per_node, strict=True)
            for i in range(count)
        ]
        self._spec = ClusterSpec({"worker": addresses})
        self._type, self._id = "worker", int(me)
        self._shares_node = len(per_node) > 0 and max(per_node) > 1

    @property
    def local_device_ids(self) -> list[int] | None:
        """The GPU of a task that shares its node; None means all visible ones."""
        local = os.environ.get("SLURM_LOCALID", "")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        sees_one = bool(visible) and "," not in visible  # Slurm has already selected its GPU
        if not self._shares_node or not local.isdecimal() or sees_one:
            return None
        return [int(local)]


def _variable(*names: str) -> tuple[str, str]:
    """Returns the first name, and the value of the first of the variables that is set."""
    return names[0], next(filter(None, map(os.environ.get, names)), "")


def expand_nodes(text: str) -> list[str]:
    """Returns the nodes of a Slurm list: `gpu[01-03,7],login` is five of them.

    A name may have several ranges: `a[1-2]b[1-2]` is a1b1, a1b2, a2b1 and a2b2.
    """
    names = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    return [
        "".join(parts)
        for name in names
        for parts in itertools.product(*map(_expand, re.findall(r"\[[^\]]*\]|[^\[\]]+", name)))
    ]


def _expand(part: str) -> list[str]:
    """Returns the numbers of a range in brackets, or the text itself."""
    if not part.startswith("["):
        return [part]
    numbers: list[str] = []
    for piece in part.strip("[]").split(","):
        first, _, last = piece.partition("-")
        width = len(first) if last else 0
        values = range(int(first), int(last) + 1) if last else [first]
        numbers += [str(value).zfill(width) for value in values]
    return numbers


def expand_counts(text: str) -> list[int]:
    """Returns the numbers of tasks per node of Slurm: `2(x3),1` is `[2, 2, 2, 1]`."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in counts for _ in range(int(times or 1))]
