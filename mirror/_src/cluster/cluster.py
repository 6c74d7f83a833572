"""`ClusterSpec`: the addresses of the processes of a job."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

from mirror._src.base.errors import describe, expected, nearest
from mirror._src.base.modules import set_module

TRAINING_JOBS = ("chief", "worker")
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:\s]+):(\d+)")
Tasks: TypeAlias = Sequence[str] | Mapping[int, str]
Jobs: TypeAlias = Mapping[str, Tasks]


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
