"""The tasks of a cluster with parameter servers, and the Ray nodes that they are."""

import os
from pathlib import Path
from typing import Any

from mirror._src.base.errors import expected
from mirror._src.cluster.cluster import ClusterSpec, ClusterTask, Jobs
from mirror._src.cluster.resolvers import ClusterResolver

JOBS = ("chief", "ps", "worker")
_FIX = (
    'For example {"chief": ["host0:2222"], "ps": ["host1:2222"], "worker": ["host2:2222", '
    '"host3:2222"]}.'
)


def cluster_of(cluster: ClusterSpec | Jobs | ClusterResolver | Any) -> ClusterSpec:
    """Returns the spec of a cluster that has parameter servers and workers.

    Raises:
        TypeError: If it is neither a cluster spec, nor a dict of addresses, nor a resolver.
        ValueError: If a job is missing, unknown, or has two chiefs.
    """
    if isinstance(cluster, ClusterResolver):
        name = type(cluster).__name__
        cluster = cluster.cluster_spec()
        if not cluster:
            raise ValueError(
                f"The {name} has found no cluster. Set TF_CONFIG, or pass a "
                f"mirror.distributed.ClusterSpec. {_FIX}"
            )
    spec = ClusterSpec(cluster)
    unknown = [job for job in spec.jobs if job not in (*JOBS, "evaluator")]
    if unknown:
        raise ValueError(
            f"The cluster has the unknown job {unknown[0]!r}. The jobs are 'chief', 'ps', "
            f"'worker' and 'evaluator'. {_FIX}"
        )
    for job in ("ps", "worker"):
        if not (job in spec.jobs and spec.num_tasks(job)):
            raise ValueError(
                f"The cluster {spec} has no {job!r}. There must be at least one 'ps' and one "
                f"'worker'. {_FIX}"
            )
    if "chief" in spec.jobs and spec.num_tasks("chief") > 1:
        raise ValueError(
            f"The cluster has {spec.num_tasks('chief')} tasks of the job 'chief', but the chief is "
            "the one process that runs the program. Keep one."
        )
    return spec


def head_of(spec: ClusterSpec) -> ClusterTask:
    """Returns the task whose node is the head of the Ray cluster: the chief, or the first server.

    >>> str(head_of(mirror.distributed.ClusterSpec({"ps": ["a:2222"], "worker": ["b:2222"]})))
    'ps 0'
    """
    job = "chief" if "chief" in spec.jobs and spec.num_tasks("chief") else "ps"
    return ClusterTask(job, spec.task_indices(job)[0])


def head_address(spec: ClusterSpec) -> str:
    """Returns the address of the head of the Ray cluster."""
    return spec.task_address(*head_of(spec))


def resource_of(task: ClusterTask) -> str:
    """Returns the name of the Ray resource that the node of a task has one of.

    >>> from mirror._src.cluster.cluster import ClusterTask
    >>> resource_of(ClusterTask("ps", 0))
    'mirror:ps:0'
    """
    return f"mirror:{task.job}:{task.number}"


def task_of(
    cluster: ClusterSpec | Jobs | ClusterResolver, job_name: str | None, task_index: int | None
) -> ClusterTask:
    """Returns the task of this process: of the arguments, or of the resolver.

    Raises:
        TypeError: If the job is not a string, or the index is not an int.
        ValueError: If neither says which task this is, or the cluster does not have it.
    """
    if isinstance(cluster, ClusterResolver):
        job_name = cluster.task_type if job_name is None else job_name
        task_index = cluster.task_id if task_index is None else task_index
    fix = "Pass the task of this process: mirror.distributed.Server(cluster, 'ps', 0)."
    if not isinstance(job_name, str):
        raise TypeError(expected("job_name", job_name, "'chief', 'ps' or 'worker'", fix))
    if isinstance(task_index, bool) or not isinstance(task_index, int):
        raise TypeError(expected("task_index", task_index, "an int", fix))
    if job_name == "evaluator":
        raise ValueError(
            "An evaluator needs no server. Evaluate in the program of the chief, or in another "
            "program that reads its checkpoints: mirror.load_checkpoint."
        )
    cluster_of(cluster).task_address(job_name, task_index)
    return ClusterTask(job_name, task_index)


def token_variables() -> dict[str, str]:
    """Returns the environment variables with which Ray presents the token of this user, if any.

    The head requires it of others if it finds one, which the first local `ray.init` of a user
    creates, but other nodes and `ray.init` with an address do not present it (Ray 2.60).
    """
    variables = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    has_token = any(os.environ.get(name) for name in variables) or os.path.exists(
        os.path.expanduser(TOKEN)
    )
    is_set = "RAY_AUTH_MODE" in os.environ
    return {"RAY_AUTH_MODE": "token"} if has_token and not is_set else {}


TOKEN = Path("~/.ray/auth_token")
