"""`MultiWorkerMirroredStrategy`: one program on the devices of several processes."""

import functools
import logging
import time
from collections.abc import Sequence
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import counted, first_line, require_int
from mirror._src.base.modules import set_module
from mirror._src.base.tracebacks import api_boundary
from mirror._src.base.types import REPLICA_AXIS
from mirror._src.cluster import start, store
from mirror._src.cluster.resolvers import ClusterResolver
from mirror._src.cluster.start import visible_devices
from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.all_reduce import AllReduce
from mirror._src.engine.choice import default_ops
from mirror._src.engine.cross_device_ops import CrossDeviceOps
from mirror._src.strategy.mirrored import (
    OneDeviceStrategy,
    require_alike,
    require_axis_name,
    require_can_fix,
)
from mirror._src.strategy.strategy import Strategy

_logger = logging.getLogger("mirror")


@set_module("mirror")
@final
class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on the devices of several processes, on one or several machines.

    Every process runs the same program, and creates the strategy first, before any array: it calls
    `mirror.distributed.initialize`. Without a cluster, the strategy has the devices of this
    process, as `MirroredStrategy()` has.

    Every process makes the same calls of `run`, `reduce`, `gather`, `check_mirrored` and `verify`,
    and of the methods of a `mirror.Trainer`, in the same order. Results that are mirrored can be
    read on every process. Of a `PerReplica`, a process can read the values of its own replicas;
    `x.values`, `strategy.local_results(x)` and `print` never wait for other processes.

    Before a step first runs, the processes compare what was proved about it, and the state that it
    receives. If they differ, all of them raise a `mirror.ProgramMismatchError` or a
    `mirror.ReplicaDivergenceError`, and nothing runs.

    Args:
        cluster_resolver: Finds the addresses of the processes; see `mirror.distributed.initialize`.
        cross_device_ops: Implementation of the collectives; `AllReduce()` by default. One of your
            own must override `reduce_stacked`.
        replicas: Number of replicas, a multiple of the number of devices of all processes; see
            `MirroredStrategy`.
        replicas_per_device: Number of replicas on each device; see `MirroredStrategy`.
        axis_name: Name of the replica axis inside steps; see `MirroredStrategy`.

    Raises:
        RuntimeError: If JAX's backend has already started, if the processes cannot reach each
            other, or if they differ in versions, settings or number of devices.
        NotImplementedError: If `cross_device_ops` reduces on the host, and there are several
            processes.
        ValueError: If the cluster does not have this process, `replicas` or `replicas_per_device`
            is below 1, the devices do not divide `replicas`, or `axis_name` is empty.
        TypeError: If an argument has the wrong type.

    >>> strategy = mirror.MultiWorkerMirroredStrategy()  # without TF_CONFIG: one process
    >>> strategy.is_chief, strategy.num_workers
    (True, 1)
    """

    @api_boundary
    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        replicas: int | None = None,
        replicas_per_device: int = 1,
        axis_name: str = REPLICA_AXIS,
    ) -> None:
        require_int("replicas_per_device", replicas_per_device)
        require_axis_name(axis_name)
        if replicas is not None:
            require_can_fix(replicas, replicas_per_device, cross_device_ops)
        start.initialize(cluster_resolver)
        distinct = _devices()
        if replicas is not None:
            replicas_per_device = _turns(replicas, distinct)
        devices = tuple(d for d in distinct for _ in range(replicas_per_device))
        placed = ReplicaDevices(devices, axis_name=axis_name, in_turn=replicas is not None)
        ops = default_ops(devices) if cross_device_ops is None else cross_device_ops
        super().__init__(placed, ops)
        _logger.info(
            "Using MultiWorkerMirroredStrategy on process %s of %s with devices %s",
            store.process_index(),
            store.process_count(),
            backend.names(devices),
        )

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that found the cluster; None without a cluster, or if JAX found it."""
        return start.job_resolver()

    @property
    def num_workers(self) -> int:
        """Number of processes."""
        return len({device.process_index for device in self.devices})

    def _make_single_replica(self) -> Strategy:
        return OneDeviceStrategy(self.local_devices[0], axis_name=self._replicas.axis_name)

    def _make_one_per_device(self) -> Strategy:
        # Another implementation may not be exact, so that it could hide a difference.
        is_exact = isinstance(self._cross_device_ops, AllReduce)
        if is_exact and self._replicas.replicas_per_device == 1:
            return self
        return MultiWorkerMirroredStrategy(None, AllReduce(), axis_name=self._replicas.axis_name)


def _turns(replicas: int, devices: Sequence[jax.Device]) -> int:
    """Returns the number of replicas on each device of a job.

    Raises:
        ValueError: If the devices do not divide the replicas: no process may be without any. If
            they are of several types.
    """
    require_alike(replicas, devices)
    num_devices = len(devices)
    if replicas % num_devices:
        most = num_devices * -(-replicas // num_devices)
        raise ValueError(
            f"The processes have {counted(num_devices, 'device')} together, which do not divide "
            f"replicas={replicas}. Pass a multiple, such as replicas={most}, or start processes "
            "with other numbers of devices."
        )
    return replicas // num_devices


@functools.cache
def _devices_of_job() -> tuple[jax.Device, ...]:
    devices = visible_devices(time.monotonic() + start.agreement_secs())
    replicas = ReplicaDevices(devices)
    if replicas.on_host:
        _connect(replicas)
    return devices


def _connect(replicas: ReplicaDevices) -> None:
    """Opens the connections of gloo between all devices.

    XLA opens them in the first program, which fails if another process comes to it 30 s later (JAX
    0.10.2, 0.12.0.1). Here, all processes come at the same time. Before the first step, one of them
    may compile longer than the others.

    Raises:
        RuntimeError: If the devices cannot be connected.
    """
    add = jax.jit(jnp.sum, in_shardings=replicas.stacked, out_shardings=replicas.mirrored)
    try:
        jax.block_until_ready(add(replicas.stack(np.ones(len(replicas), np.int32))))
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"Process {store.process_index()} reached the coordinator, but its devices could not "
            f"be connected to the devices of the other processes: {first_line(error)}. Every "
            "machine must reach the others at the address of their host names; look at "
            "/etc/hosts, firewalls, and at the output of the other processes."
        ) from error


def _devices() -> tuple[jax.Device, ...]:
    """Returns the visible devices of all processes."""
    return backend.default_devices() if store.process_count() == 1 else _devices_of_job()
