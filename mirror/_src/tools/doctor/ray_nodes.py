"""The checks of `mirror doctor --ray`, in a subprocess that connects to Ray."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from mirror._src.base.errors import bytes_in_words, counted, first_line
from mirror._src.base.optional import describe_missing, version_of
from mirror._src.cluster.resolvers import ClusterSpec, ClusterTask, TFConfigClusterResolver
from mirror._src.ps.ray_cluster import Connection, import_ray
from mirror._src.ps.server import JOBS, answers, cluster_of, head_address, resource_of
from mirror._src.tools.doctor.check import Check, Problem, run_steps

CLUSTER, TASKS, MACHINES, VERSIONS, CALLS = "cluster", "tasks", "nodes", "versions", "actor calls"
_PACKAGES = ("ray", "mirror-jax", "jax", "flax", "optax", "numpy", "cloudpickle")
_LEAST_STORE = 512 * 2**20
_CALLS, _SLOW_SECS = 30, 0.02
_BLOCK = 2**20  # float32


def run(secs: float) -> Iterator[dict[str, Any]]:
    """Runs the checks; yields the lines of `run_steps`, and one at the end.

    Args:
        secs: How long to wait for the nodes.
    """
    try:
        import_ray()
    except ModuleNotFoundError:
        text = describe_missing("ray", "mirror.ps.ParameterServerStrategy", "ray")
        yield asdict(Check("ray", "problem", "not installed", "", text))
        yield {"ends": True}
        return
    steps: dict[str, Callable[[], Check]] = {
        CLUSTER: lambda: check_cluster(spec_of(os.environ), secs),
        TASKS: lambda: check_tasks(spec_of(os.environ), secs),
        MACHINES: check_nodes,
        VERSIONS: lambda: check_versions(secs),
        CALLS: lambda: check_calls(secs),
    }
    yield from run_steps(steps.items(), "--ray")
    import_ray().shutdown()
    yield {"ends": True}


def spec_of(environment: Mapping[str, str]) -> ClusterSpec | None:
    """Returns the cluster of `TF_CONFIG`; None if it is not set."""
    if not environment.get("TF_CONFIG", "").strip():
        return None
    try:
        return cluster_of(TFConfigClusterResolver())
    except (TypeError, ValueError) as error:
        check = Check(CLUSTER, "problem", "TF_CONFIG", first_line(error), "Correct TF_CONFIG.")
        raise Problem(check) from error


def check_cluster(spec: ClusterSpec | None, secs: float) -> Check:
    """Connects to the cluster of `TF_CONFIG`, or starts one."""
    fix = (
        "Start the head first: mirror.distributed.Server(cluster, 'chief', 0), or the program of "
        "the chief. Open its port to this machine."
    )
    deadline = time.monotonic() + secs
    while spec is not None and not answers(head_address(spec)):  # Ray would wait for half a minute
        if time.monotonic() > deadline:
            found = f"the head {head_address(spec)} does not answer within {secs:g} s"
            raise Problem(Check(CLUSTER, "problem", found, "", fix))
        time.sleep(0.5)
    try:
        Connection(spec)
    except RuntimeError as error:
        raise Problem(Check(CLUSTER, "problem", first_line(error), "", fix)) from error
    where = "started on this machine; TF_CONFIG is not set"
    if spec is not None:
        where = f"of TF_CONFIG, whose head is {head_address(spec)}"
    return Check(CLUSTER, "ok", f"Ray {import_ray().__version__}, {where}")


def check_tasks(spec: ClusterSpec | None, secs: float) -> Check:
    """Checks that the node of every server and worker has joined."""
    if spec is None:
        return Check(TASKS, "ok", "any node can run servers and workers")
    jobs = [job for job in JOBS if job in spec.jobs]
    tasks = [ClusterTask(job, i) for job in jobs for i in spec.task_indices(job)]
    deadline = time.monotonic() + secs
    while missing := [task for task in tasks if not _has(resource_of(task))]:
        if time.monotonic() > deadline:
            names = ", ".join(f"{task} ({spec.task_address(*task)})" for task in missing)
            fix = f"Run mirror.distributed.Server(cluster, {missing[0].job!r}, "
            fix += f"{missing[0].number}).join() on its machine, and read its output."
            found = f"{len(missing)} of {len(tasks)} have not joined in {secs:g} s: {names}"
            raise Problem(Check(TASKS, "problem", found, "", fix))
        time.sleep(0.5)
    return Check(TASKS, "ok", f"all {len(tasks)} have joined")


def check_nodes() -> Check:
    """Lists the nodes, and warns of one whose object store is small."""
    nodes = _nodes()
    totals = {name: sum(n["Resources"].get(name, 0) for n in nodes) for name in ("CPU", "GPU")}
    found = f"{counted(len(nodes), 'node')}, {totals['CPU']:g} CPUs, {totals['GPU']:g} GPUs"
    sizes = {n["NodeManagerAddress"]: n["Resources"].get("object_store_memory", 0) for n in nodes}
    small = [f"{host}: {bytes_in_words(n)}" for host, n in sizes.items() if n < _LEAST_STORE]
    if small:
        meaning = "Batches and parameters travel through Ray's object store, which writes to disk "
        meaning += f"if it is full. It is small on {', '.join(small)}."
        fix = "Enlarge /dev/shm (docker run --shm-size=8g), or start Ray with "
        fix += "--object-store-memory."
        return Check(MACHINES, "warning", found, meaning, fix)
    return Check(MACHINES, "ok", found)


def check_versions(secs: float) -> Check:
    """Compares the versions on all nodes with the versions in this process."""
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    own = installed()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes()}
    remote = ray.remote(installed)
    asked = {
        host: remote.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote()
        for node, host in nodes.items()
    }
    problems = []
    for host, reference in asked.items():
        try:
            theirs = ray.get(reference, timeout=secs)
        except Exception as error:
            problems.append(f"{host}: {first_line(error)}")
            continue
        problems += [
            f"{host} has {name} {theirs.get(name)}, this process {own[name]}"
            for name in own
            if theirs.get(name) != own[name]
        ]
    if problems:
        fix = "Install the same versions on all machines."
        raise Problem(Check(VERSIONS, "problem", "; ".join(problems), "", fix))
    names = ", ".join(f"{name} {own[name]}" for name in ("python", "jax", "ray"))
    return Check(VERSIONS, "ok", f"equal on {counted(len(nodes), 'node')}: {names}")


def check_calls(secs: float) -> Check:
    """Measures a call of an actor, without data and with 4 MiB."""
    ray = import_ray()
    actor = ray.remote(_Echo).options(num_cpus=0).remote()
    block = np.zeros(_BLOCK, np.float32)
    ray.get(actor.size.remote(block), timeout=secs)

    def measured(argument: Any) -> float:
        times = []
        for _ in range(_CALLS):
            start = time.perf_counter()
            ray.get(actor.size.remote(argument), timeout=secs)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    empty, full = measured(None), measured(block)
    ray.kill(actor)
    found = f"{1e3 * empty:.1f} ms, with 4 MiB {1e3 * full:.1f} ms (median of {_CALLS})"
    if empty > _SLOW_SECS:
        meaning = "An update takes at least three calls, so steps shorter than this do not gain."
        return Check(CALLS, "warning", found, meaning, "Is the machine busy, or the network slow?")
    return Check(CALLS, "ok", found)


def installed() -> dict[str, str]:
    """Returns the versions of Python and of the packages that all processes share."""
    packages = {name: found for name in _PACKAGES if (found := version_of(name)) is not None}
    return {"python": platform.python_version(), **packages}


class _Echo:
    def size(self, argument: Any) -> int:
        return 0 if argument is None else int(argument.size)


def _has(resource: str) -> bool:
    return any(resource in node["Resources"] for node in _nodes())


def _nodes() -> list[dict[str, Any]]:
    return [node for node in import_ray().nodes() if node["Alive"]]
