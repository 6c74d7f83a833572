"""`initialize`: joins this process to its job, whose processes must have the same settings."""

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from mirror._src.base.errors import expected, first_line, require_secs
from mirror._src.base.naming import warn_user
from mirror._src.base.optional import version_of
from mirror._src.cluster import store
from mirror._src.cluster.consensus import gather
from mirror._src.cluster.failures import Failures
from mirror._src.cluster.resolvers import (
    ClusterResolver,
    Membership,
    SlurmClusterResolver,
    TFConfigClusterResolver,
)
from mirror._src.devices import backend
from mirror._src.devices.backend import started, startup_cause, watch_startup
from mirror._src.devices.jax_options import numeric_options
from mirror._src.devices.physical import list_physical_devices
from mirror._version import __version__

_PACKAGES = ("jax", "jaxlib", "flax", "optax")
_logger = logging.getLogger("mirror")
_lock = threading.Lock()
_MARGIN_SECS = 5  # of JAX, after this deadline
_NO_CLUSTER = "should be defined"  # of JAX's error if it detects none (0.10.2, 0.12.0.1)


class _Job:
    """The job of this process, and the options that it was joined with."""

    def __init__(self) -> None:
        self.has_tried = False
        self.resolver: ClusterResolver | None = None
        self.agreement_secs = 300.0
        self.heartbeat_secs = math.inf  # unknown if the user has called JAX's initialize


_job = _Job()


def job_resolver() -> ClusterResolver | None:
    """Returns the resolver that found the job of this process, or None."""
    return _job.resolver


def agreement_secs() -> float:
    """Returns the time to wait for the other processes before a program first runs."""
    return _job.agreement_secs


def heartbeat_secs() -> float:
    """Returns the time after which JAX takes a silent process for dead; infinite if unknown."""
    return _job.heartbeat_secs


def has_joined_others() -> bool:
    """Whether this process belongs to a job of several, which have compared their settings."""
    return _job.has_tried and store.process_count() > 1


def initialize(
    cluster_resolver: ClusterResolver | None = None,
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: list[int] | None = None,
    heartbeat_secs: float = 30.0,
    shutdown_secs: float = 30.0,
    initialization_secs: float = 300.0,
    agreement_secs: float = 300.0,
) -> None:
    """Joins this process to the others of its job. Call it first, on every process.

    The arguments describe the job; otherwise the environment variable `TF_CONFIG` does, or Slurm,
    or another cluster that JAX detects (Open MPI, Kubernetes, Cloud TPU). Without a job,
    nothing happens. `mirror.MultiWorkerMirroredStrategy` calls `initialize` itself, so you need it
    only to set an argument. A second call has no effect.

    Args:
        cluster_resolver: Finds the addresses of the processes.
        coordinator_address: Address of process 0, `"host:port"`, instead of a resolver.
        num_processes: Number of processes; required with `coordinator_address`.
        process_id: Index of this process; required with `coordinator_address`.
        local_device_ids: Accelerators of this process. Defaults to all that are visible.
        heartbeat_secs: Time after which a process that does not respond is taken for dead. All
            processes then end.
        shutdown_secs: Time to wait at the end for processes that are still at work.
        initialization_secs: Time to wait at the start until all processes have joined.
        agreement_secs: Time to wait for the other processes before a program first runs, and before
            a step whose data each process reads for itself (`input="local"`).

    Raises:
        RuntimeError: If JAX's backend has already started, if the processes cannot reach each other
            in time, or if their versions or settings differ.
        TypeError: If `cluster_resolver` is not a `ClusterResolver`, or a time is not a number.
        ValueError: If a resolver and an address are passed, a number is missing, a time is not
            positive and finite, or the cluster does not have this process.
        NotImplementedError: If the cluster has parameter servers.

    >>> mirror.distributed.initialize()  # no TF_CONFIG and no cluster: one process
    >>> mirror.distributed.process_count()
    1
    """
    secs = {
        "heartbeat_secs": require_secs("heartbeat_secs", heartbeat_secs),
        "shutdown_secs": require_secs("shutdown_secs", shutdown_secs),
        "initialization_secs": require_secs("initialization_secs", initialization_secs),
        "agreement_secs": require_secs("agreement_secs", agreement_secs),
    }
    if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
        fix = "For example mirror.distributed.TFConfigClusterResolver()."
        raise TypeError(expected("cluster_resolver", cluster_resolver, "a ClusterResolver", fix))
    explicit: dict[str, Any] = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [name for name, value in explicit.items() if value is None]
    if 0 < len(missing) < len(explicit):
        raise ValueError(
            f"initialize needs {', '.join(explicit)} together, but {', '.join(missing)} is "
            "missing. Pass all three, or none to use TF_CONFIG or a detected cluster."
        )
    if cluster_resolver is not None and not missing:
        raise ValueError("Pass either a cluster_resolver or a coordinator_address, not both.")
    with _lock:
        if _job.has_tried and (_job.resolver or cluster_resolver is None) and missing:
            return
        _job.agreement_secs = secs["agreement_secs"]
        if not store.is_initialized():
            member = None if missing else Membership(**explicit)
            _join(member, cluster_resolver, local_device_ids, secs)
        if store.process_count() > 1 and not _job.has_tried:
            Failures(secs["shutdown_secs"]).install()
            require_same_settings(time.monotonic() + secs["initialization_secs"])
            _logger.info("Process %s of %s", store.process_index(), store.process_count())
        _job.has_tried = True


def _join(
    member: Membership | None,
    resolver: ClusterResolver | None,
    local_device_ids: list[int] | None,
    secs: dict[str, float],
) -> None:
    if member is None:
        resolver = resolver or resolver_of_environment()
        if resolver is not None:
            member = resolver.membership()
            if member is None:  # no cluster, or the evaluator, which trains alone
                return
    arguments: dict[str, Any] = {
        "heartbeat_timeout_seconds": max(round(secs["heartbeat_secs"]), 1),
        "shutdown_timeout_seconds": max(round(secs["shutdown_secs"]), 1),
        "initialization_timeout": max(round(secs["initialization_secs"]), 1),
    }
    ids = local_device_ids
    if member is not None:
        _require_not_started(member)
        ids = ids if ids is not None else member.local_device_ids
        arguments |= {**member._asdict(), "cluster_detection_method": "deactivate"}
    elif started():
        return  # only JAX could detect a cluster, and it would reject it now
    elif ids is None and os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1":
        # JAX would use one GPU per task of Open MPI, also of a task that has its node for itself.
        ids = list(range(len(list_physical_devices("GPU")))) or None
    watch_startup()
    limit: threading.Timer | None = None
    if member is not None:  # JAX aborts the process without saying for which one it has waited
        limit = threading.Timer(secs["initialization_secs"], _end_unjoined, (member, secs))
        limit.daemon = True
        limit.start()
        arguments["initialization_timeout"] += _MARGIN_SECS
    try:
        jax.distributed.initialize(**{**arguments, "local_device_ids": ids})
    except ValueError as error:
        if member is None and _NO_CLUSTER in str(error):
            return
        raise
    except RuntimeError as error:
        where = "its coordinator"
        if member is not None:
            where = f"process 0 at {member.coordinator_address}"
            where += f" (this is process {member.process_id} of {member.num_processes})"
        raise RuntimeError(
            f"This process could not reach {where} within {secs['initialization_secs']:g} s: "
            f"{first_line(error)}. Start all processes at about the same time with the same "
            "addresses, and check that the port of process 0 is free and can be reached."
        ) from error
    finally:
        if limit is not None:
            limit.cancel()
    _job.resolver = resolver
    _job.heartbeat_secs = secs["heartbeat_secs"]


def _end_unjoined(member: Membership, secs: Mapping[str, float]) -> None:
    """Ends this process, which waits in native code for processes that have not joined."""
    print(
        f"mirror: process {member.process_id} of {member.num_processes} has waited "
        f"{secs['initialization_secs']:g} s for the others, which have not all joined process 0 at "
        f"{member.coordinator_address}, and ends with status 1. Start all processes at about the "
        "same time with the same addresses, and check that the port of process 0 is free and can "
        "be reached; their output says why one has not joined.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def resolver_of_environment() -> ClusterResolver | None:
    """Returns the resolver for this environment; None if only JAX may detect a cluster."""
    if os.environ.get("TF_CONFIG", "").strip():
        return TFConfigClusterResolver()
    if os.environ.get("SLURM_STEP_NODELIST") and int(os.environ.get("SLURM_NTASKS") or 1) > 1:
        return SlurmClusterResolver()
    return None


def warn_if_alone() -> None:
    """Warns of a process of a `TF_CONFIG` cluster that trains apart from the others."""
    member = None
    if os.environ.get("TF_CONFIG") and store.process_count() == 1:
        with contextlib.suppress(ValueError, TypeError, NotImplementedError):
            member = TFConfigClusterResolver().membership()
    if member is not None and member.num_processes > 1:
        warn_user(
            f"This is process {member.process_id} of {member.num_processes}, but a "
            "MirroredStrategy trains with the devices of this process only, and the other "
            "processes train other models. Use mirror.MultiWorkerMirroredStrategy()."
        )


def _require_not_started(member: Membership) -> None:
    if started():
        cause = startup_cause("this call")
        raise RuntimeError(
            f"This is process {member.process_id} of {member.num_processes}, but JAX has already "
            f"started with the devices of this process alone. {cause} Create the strategy "
            "before that line, or call mirror.distributed.initialize() first."
        )


def require_same_settings(deadline: float) -> None:
    """Compares versions and numerical settings, before any device is used.

    Raises:
        RuntimeError: If they differ, or a process does not arrive by the deadline.
    """
    mine = {
        "mirror": __version__,
        **{name: version_of(name) or "not installed" for name in _PACKAGES},
        **{name: str(value) for name, value in numeric_options().items()},
    }
    _require_equal(
        gather("preflight", mine, deadline),
        "The processes have different versions or settings",
        "Install the same versions on all machines, and set the same options of jax.config.",
    )


def visible_devices(deadline: float) -> tuple[jax.Device, ...]:
    """Returns the visible devices of all processes, in the order of the processes.

    Raises:
        RuntimeError: If the processes differ in the number or type of devices, or a process does
            not arrive by the deadline.
    """
    local = backend.default_devices()
    kind = backend.type_of(local[0])
    mine = {"devices": f"{len(local)} x {kind}", "ids": [device.id for device in local]}
    each = gather("devices", mine, deadline)
    ids = [i for process in each for i in process.pop("ids")]
    _require_equal(
        each,
        "The processes have different devices",
        "Give every process the same number of devices of one type, for example with "
        "mirror launch --devices, or with CUDA_VISIBLE_DEVICES.",
    )
    devices = backend.devices_by_id(kind)
    return tuple(devices[i] for i in ids)


def _require_equal(each: Sequence[Mapping[str, Any]], what: str, fix: str) -> None:
    lines = []
    for name in each[0]:
        values: dict[Any, list[int]] = {}
        for i, process in enumerate(each):
            values.setdefault(process[name], []).append(i)
        if len(values) > 1:
            lines += [f"  {name}: {value} on {processes(ids)}" for value, ids in values.items()]
    if lines:
        text = "\n".join(lines)
        raise RuntimeError(f"{what}:\n{text}\n{fix}")


def processes(ids: Sequence[int]) -> str:
    """Returns `process 1` or `processes 1, 2`, of at most 8 processes."""
    shown = ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
    return f"process {shown}" if len(ids) == 1 else f"processes {shown}"
