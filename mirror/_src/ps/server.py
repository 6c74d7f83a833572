"""`Server`: makes this process a task of a cluster with parameter servers, as a Ray node."""

import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, final

from mirror._src.base.errors import expected, require_int, require_secs
from mirror._src.base.interrupts import arriving
from mirror._src.base.optional import describe_missing
from mirror._src.base.public_names import set_module
from mirror._src.cluster.resolvers import ClusterResolver, ClusterSpec, ClusterTask, Jobs
from mirror._src.ps import tethered
from mirror._src.ps.tethered import answers

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

    >>> from mirror._src.cluster.resolvers import ClusterTask
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


_logger = logging.getLogger("mirror")
_POLL_SECS = 0.5
_HEAD_SECS = 5.0  # without an answer of the head, before `join` returns
_DRAIN_SECS = 40.0  # Ray lets its node drain for up to 30 s
_STARTED = "Ray runtime started"
_ATTEMPTS = 3


@set_module("mirror.distributed")
@final
class Server:
    """Makes this process a task of a cluster, for `mirror.ps.ParameterServerStrategy`.

    Every process of the cluster but the chief runs it, and waits. It starts a Ray node with Ray's
    own command, `ray start`, as a child process. The strategy, in the program of the chief, finds
    the node by its resource, such as `mirror:ps:0`, and runs the task in it. Several tasks of one
    machine are several nodes. The node of the chief is the head of the Ray cluster, and the
    strategy starts it; without a chief, it is the node of the first parameter server.

        # ps.py, on the machine of the parameter server
        mirror.distributed.Server(cluster, "ps", 0).join()

    Where something else starts Ray (`ray up`, KubeRay, a batch system), no `Server` is needed: omit
    the cluster of the strategy.

    Anyone who can reach the port of the head can run code on all nodes, unless all processes have
    the same token of Ray, `~/.ray/auth_token`. Use it in a private network.

    Args:
        cluster: The addresses of all tasks, by job: a `mirror.distributed.ClusterSpec`, a dict, or
            a resolver such as `mirror.distributed.TFConfigClusterResolver()`.
        job_name: Job of this process: `"ps"`, `"worker"` or `"chief"`. A resolver knows it.
        task_index: Index of this process in its job. A resolver knows it.
        num_cpus: Number of CPU cores that Ray counts for this node. Defaults to all of the
            machine.
        num_gpus: Number of GPUs that Ray counts for this node. Defaults to all of the machine.
        start_secs: How long to wait for the head of the cluster, and for the node to start.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the cluster does not have this task, or lacks servers or workers.
        ModuleNotFoundError: If Ray is not installed.
        RuntimeError: If the head does not answer within `start_secs`, or the node does not start;
            the message has what Ray printed.

    >>> cluster = {"chief": ["a:2222"], "ps": ["b:2222"], "worker": ["c:2222"]}
    >>> mirror.distributed.Server(cluster, "ps", 1)
    Traceback (most recent call last):
        ...
    ValueError: The job 'ps' has no task 1. It has the tasks [0].
    """

    def __init__(
        self,
        cluster: ClusterSpec | Jobs | ClusterResolver,
        job_name: str | None = None,
        task_index: int | None = None,
        *,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        start_secs: float = 300.0,
    ) -> None:
        self._spec = cluster_of(cluster)
        self._task = task_of(cluster, job_name, task_index)
        for name, value in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
            if value is not None:
                require_int(name, value, 0)
        deadline = time.monotonic() + require_secs("start_secs", start_secs)
        tether = [sys.executable, "-I", tethered.__file__, str(_DRAIN_SECS), self.target]
        command = [*tether, _ray_command(), *self._options(num_cpus, num_gpus)]
        if self._task != head_of(self._spec):
            _wait_for_head(self.target, deadline, start_secs)
        import fcntl  # which Windows lacks

        # Ray (2.60) may give nodes that start together the same socket: one then fails after 30 s.
        with open(Path(tempfile.gettempdir(), f"mirror-{os.getuid()}.lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for attempts_left in reversed(range(_ATTEMPTS)):
                self._output = tempfile.TemporaryFile()  # noqa: SIM115 - `stop` closes it
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **token_variables()},
                    stdin=subprocess.PIPE,  # closed when this process ends
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                )
                if self._has_started(deadline, start_secs, attempts_left):
                    break
        _logger.info("%s is a node of the Ray cluster at %s", self._task, self.target)

    @property
    def target(self) -> str:
        """Address of the head of the Ray cluster, `"host:port"`."""
        return head_address(self._spec)

    def __repr__(self) -> str:
        state = "running" if self._process.poll() is None else "stopped"
        return f"Server({self._task} of the cluster at {self.target}, {state})"

    def join(self) -> None:
        """Waits until the head of the cluster has ended, or for SIGTERM, and stops the node."""
        with arriving(signal.SIGTERM) as received:
            unanswered = 0.0
            while self._process.poll() is None and not received:
                time.sleep(_POLL_SECS)
                unanswered = 0.0 if answers(self.target) else unanswered + _POLL_SECS
                if unanswered >= _HEAD_SECS:
                    break
            self.stop()

    def stop(self) -> None:
        """Stops the node. Ray's other nodes on this machine remain."""
        self._process.terminate()
        self._process.communicate()
        self._output.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _options(self, num_cpus: int | None, num_gpus: int | None) -> list[str]:
        """Returns the options of `ray start`."""
        host, _, port = self.target.rpartition(":")
        is_head = self._task == head_of(self._spec)
        own_host = self._spec.task_address(*self._task).rpartition(":")[0]
        options = ["start", "--block", "--disable-usage-stats"]
        options += [f"--resources={json.dumps({resource_of(self._task): 1})}"]
        options += [f"--node-ip-address={own_host.strip('[]')}"]
        if is_head:
            options += ["--head", f"--port={port}", "--include-dashboard=false"]
        else:
            options += [f"--address={host}:{port}"]
        counts = {"num-cpus": num_cpus, "num-gpus": num_gpus}
        return options + [f"--{name}={n}" for name, n in counts.items() if n is not None]

    def _has_started(self, deadline: float, secs: float, attempts_left: int) -> bool:
        """Waits until the node runs; False if it should be started again.

        Raises:
            RuntimeError: If it does not start.
        """
        while _STARTED not in self._printed():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                lines = self._printed().splitlines()[-15:]
                self.stop()
                if ended and attempts_left and time.monotonic() < deadline:
                    return False
                how = f"ended with exit code {self._process.returncode}" if ended else "hangs"
                raise RuntimeError(
                    f"The Ray node of {self._task} {how} (limit {secs:g} s). Is the port of "
                    f"{self._spec.task_address(*self._task)} free? Ray printed:\n"
                    + "\n".join(f"  {line}" for line in lines)
                )
            time.sleep(_POLL_SECS / 5)
        return True

    def _printed(self) -> str:
        """Returns what the node has printed."""
        file = self._output.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")


def _ray_command() -> str:
    """Returns the path of the command `ray` of this environment.

    Raises:
        ModuleNotFoundError: If Ray is not installed.
    """
    beside = Path(sys.executable).with_name("ray")
    found = str(beside) if beside.exists() else shutil.which("ray")
    if importlib.util.find_spec("ray") is None or found is None:
        text = describe_missing("ray", "mirror.distributed.Server", "ray")
        raise ModuleNotFoundError(text, name="ray")
    return found


def _wait_for_head(address: str, deadline: float, secs: float) -> None:
    while not answers(address):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"The head of the cluster at {address} has not answered for {secs:g} s. Start the "
                "program of the chief (or, without a chief, the first parameter server), give all "
                "processes the same cluster, and open the port to this machine."
            )
        time.sleep(_POLL_SECS)
