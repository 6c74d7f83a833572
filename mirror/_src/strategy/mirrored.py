"""`MirroredStrategy`, also for several processes, and the default strategy."""

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any, final, get_args

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import counted, expected, first_line, require_int
from mirror._src.base.naming import warn_user
from mirror._src.base.public_names import set_module
from mirror._src.base.tracebacks import api_boundary
from mirror._src.base.types import MOST_REPLICAS, REPLICA_AXIS, Shard
from mirror._src.cluster import start, store
from mirror._src.cluster.resolvers import ClusterResolver
from mirror._src.cluster.start import visible_devices
from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.resolve import DeviceLike, canonicalize_replica_devices
from mirror._src.devices.settings import first_devices, raise_num_cpu_threads, warn_about_threads
from mirror._src.engine.all_reduce import AllReduce
from mirror._src.engine.choice import default_ops, reduce_device, slice_bytes
from mirror._src.engine.cross_device_ops import CrossDeviceOps
from mirror._src.engine.replica_context import ReplicaContext, current_frame
from mirror._src.strategy.strategy import OneDeviceStrategy, Strategy, require_axis_name, strategies

_logger = logging.getLogger("mirror")
_SHARDS = " or ".join(map(repr, get_args(Shard)))


@set_module("mirror")
@final
class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine, with one or more replicas per device.

    Devices of a single type run a step as one program. Devices of several types, such as a GPU and
    the CPU, run it in stages, and their collectives are reduced on the host. The log states which
    executor is used and why.

    With `replicas=`, a training ends with the same bits on any number of devices of one type, in
    any number of processes, also if it stops and continues on another number. It must run with the
    same version of JAX and, on host devices, the same `mirror.config.set_num_cpu_threads`. Host
    callbacks are excepted; `strategy.inspect` names them. On GPUs, this has not been run.

    Args:
        devices: Devices in replica order: `jax.Device`s or names such as `"/gpu:1"`. A number
            selects the first GPUs, or on a machine without GPUs host devices, which are created if
            JAX has not started, as by `mirror launch --devices`. Defaults to all accelerators, or
            to all host devices on a machine without accelerators.
        cross_device_ops: Implementation of the collectives. Defaults to `AllReduce()`. For devices
            of several types, or for accelerators whose all-reduce fails a startup test (a known
            sum, once per process), the default is `ReductionToOneDevice()`; a warning reports the
            failed test.
        replicas: Number of replicas, whatever the number of devices is: each device runs its
            replicas in turn, and sums have one order. If the devices do not divide it, the largest
            number of them that does is used. Defaults to one replica per device, or
            `replicas_per_device`, which is faster and rounds sums differently on other devices.
        replicas_per_device: Number of replicas on each device. With eight replicas on a laptop or
            on one GPU, you can try a step as it will run on eight GPUs. Replica ids enumerate the
            replicas of the first device first, then the replicas of the second, etc.
        axis_name: Name of the replica axis inside steps. A model with
            `nn.BatchNorm(axis_name="batch")`, or a step with `jax.lax.pmean(x, "batch")`, runs
            unchanged with `axis_name="batch"`.
        shard: What each device stores 1/n of, while the step does not change. `"optimizer"`: the
            optimizer state; each device updates 1/n of every weight, and the new weights are
            gathered. `"model"`: the weights of at least 64 KiB, too; each is gathered for the
            operations that need it, forward and backward, so that a model may be larger than a
            device. `"none"`: nothing. `"auto"`: the first of `"none"`, `"optimizer"` and `"model"`
            with which the first step that changes state fits in 90 % of a device's memory; then as
            many gathered weights are kept as fit. The log and `strategy.inspect` say which, and
            why; the step is compiled up to four times. State that cannot be sharded exactly stays
            mirrored; `strategy.inspect` gives the reasons. It has no effect with one device and, as
            a warning says, with several replicas per device, `replicas`, or other
            `cross_device_ops` than `AllReduce`.

    Raises:
        ValueError: If devices are empty or repeated, if their number, `replicas` or
            `replicas_per_device` is below 1 or above 4096, if `axis_name` is empty, or if
            `AllReduce` or `replicas` is used with devices of several types. If `replicas` is used
            with `replicas_per_device`, or with other collectives than `AllReduce`.
        InvalidDeviceError: If the machine does not have a device, or as many devices; the number of
            host devices cannot change after JAX has started.
        TypeError: If an argument has the wrong type.
        RuntimeError: If the startup test of the all-reduce stalled, so that the accelerators do not
            respond.

    >>> MirroredStrategy(2).devices
    (CpuDevice(id=0), CpuDevice(id=1))
    >>> MirroredStrategy(["/cpu:1", "/cpu:3"]).num_replicas_in_sync
    2
    >>> MirroredStrategy(["/cpu:1"], replicas=8).num_replicas_in_sync
    8
    """

    def __init__(
        self,
        devices: Sequence[DeviceLike] | int | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        replicas: int | None = None,
        replicas_per_device: int = 1,
        axis_name: str = REPLICA_AXIS,
        shard: Shard = "none",
    ) -> None:
        if shard not in get_args(Shard):
            fix = 'Pass shard="optimizer" to store 1/n of the optimizer state on each device.'
            raise ValueError(expected("shard", shard, _SHARDS, fix))
        require_replicas(replicas, replicas_per_device, axis_name, cross_device_ops)
        if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
            distinct = first_devices(int(devices))
        else:
            distinct = canonicalize_replica_devices(devices)
        if replicas is not None:
            distinct, replicas_per_device = _spread(replicas, distinct)
        replica_devices = tuple(d for d in distinct for _ in range(replicas_per_device))
        placed = ReplicaDevices(replica_devices, axis_name=axis_name, in_turn=replicas is not None)
        ops = default_ops(replica_devices) if cross_device_ops is None else cross_device_ops
        if placed.are_mixed:
            placed = ReplicaDevices(replica_devices, reduce_device(ops), axis_name)
        placed.slice_bytes = slice_bytes(placed, ops, shard)
        super().__init__(placed, ops, shard=shard)
        start.warn_if_alone()
        _logger.info("Using MirroredStrategy with devices %s", backend.names(replica_devices))

    @api_boundary
    def resize(self, devices: Sequence[DeviceLike] | int) -> "MirroredStrategy":
        """Returns a strategy that runs the same replicas on other devices, with the same bits.

        Between two steps, continue with the new strategy: its `run` moves the state. Distribute
        the dataset with it again.

        Args:
            devices: The devices, or their number; see `MirroredStrategy`.

        Raises:
            ValueError: If the strategy was created without `replicas=`: its number of replicas is
                the number of devices, and other devices would cut the batch otherwise.

        >>> strategy = mirror.MirroredStrategy(2, replicas=2)
        >>> strategy.resize(1).num_replicas_in_sync
        2
        """
        if not self._replicas.in_turn:
            n = self.num_replicas_in_sync
            raise ValueError(
                "resize keeps the number of replicas, but this strategy has one replica per "
                f"device. Create it with mirror.MirroredStrategy(devices, replicas={n})."
            )
        return MirroredStrategy(
            devices,
            self._cross_device_ops,
            replicas=self.num_replicas_in_sync,
            axis_name=self._replicas.axis_name,
        )


def require_replicas(
    replicas: int | None, per_device: int, axis_name: object, ops: CrossDeviceOps | None
) -> None:
    """Rejects wrong numbers of replicas; prepares the threads for a fixed number of them."""
    require_int("replicas_per_device", per_device, most=MOST_REPLICAS)
    require_axis_name(axis_name)
    if replicas is None:
        return
    require_int("replicas", replicas, most=MOST_REPLICAS)
    if per_device != 1:
        raise ValueError(
            f"Pass replicas={replicas} or replicas_per_device={per_device}, not both: the first "
            "fixes the number of replicas, whatever the number of devices is."
        )
    if ops is not None and not isinstance(ops, AllReduce):
        raise ValueError(
            f"replicas={replicas} adds values in an order of its own, so that the number of "
            f"devices does not change the results, but cross_device_ops is {ops!r}. Omit one of "
            "them."
        )
    raise_num_cpu_threads(replicas)


def require_alike(replicas: int, devices: Sequence[jax.Device]) -> None:
    """Rejects devices that compute different bits for a fixed number of replicas.

    Raises:
        ValueError: If they are of several types, or models.
    """
    kinds = {f"{backend.type_of(device)} {device.device_kind}" for device in devices}
    if len(kinds) > 1:
        raise ValueError(
            f"replicas={replicas} gives the same bits on any number of devices of one type, but "
            f"{backend.names(devices)} are of several types: {', '.join(sorted(kinds))}. Pass "
            "devices of one type."
        )
    if backend.type_of(devices[0]) == "CPU":
        warn_about_threads(replicas)


def _spread(replicas: int, devices: tuple[jax.Device, ...]) -> tuple[tuple[jax.Device, ...], int]:
    """Returns the devices that run a fixed number of replicas, and the number on each of them."""
    require_alike(replicas, devices)
    count = max(n for n in range(1, len(devices) + 1) if replicas % n == 0)
    if count < len(devices):
        many = counted(replicas, "replica")
        text = (
            f"{many} on {counted(len(devices), 'device')}: {counted(count, 'device')} will be "
            f"used, the largest number that divides {replicas}."
        )
        turns = -(-replicas // len(devices))
        if turns < replicas // count or replicas < len(devices):
            fix = f"Pass replicas={len(devices) * turns} to use all."
            warn_user(f"{text} {fix}")
        else:  # which takes no longer
            _logger.info("%s", text)
    return devices[:count], replicas // count


@functools.cache
def _default_strategy() -> Strategy:
    """Returns a strategy with one replica on JAX's default device."""
    return OneDeviceStrategy(backend.default_devices()[0])


def get_strategy() -> Strategy:
    """Returns the current strategy; outside every scope, one replica on the default device.

    >>> strategy = OneDeviceStrategy("/cpu:0")
    >>> with strategy.scope():
    ...     get_strategy() is strategy
    True
    """
    frame = current_frame()
    if frame is None:
        return _default_strategy()
    strategy: Any = frame.strategy if frame.shown_as is None else frame.shown_as
    return strategy


def strategy_of_trainer(given: Strategy | None) -> Strategy:
    """Returns the strategy of a `Trainer`: the one passed, or else the current one.

    Warns if it is the default strategy, and the program has created another one with more devices,
    or JAX has more accelerators.
    """
    if given is not None or current_frame() is not None:
        return get_strategy() if given is None else given
    default = _default_strategy()
    others = [s for s in list(strategies) if len(set(s.devices)) > 1]
    others.sort(key=lambda s: len(set(s.devices)))
    num_accelerators = len(backend.default_devices()) if default.devices[0].platform != "cpu" else 0
    if not others and num_accelerators <= 1:
        return default
    device = default.devices[0]
    idle = f"JAX has {num_accelerators} devices"
    fix = "strategy=mirror.MirroredStrategy()"
    if others:
        count = counted(len(set(others[-1].devices)), "device")
        idle = f"this program has created a {type(others[-1]).__name__} with {count}"
        fix = "strategy=strategy"
    warn_user(
        f"mirror.Trainer was created outside strategy.scope(), and trains on 1 device, {device}, "
        f"while {idle}. Create it inside the scope, or pass mirror.Trainer(..., {fix}). For one "
        "device, pass strategy=mirror.get_strategy()."
    )
    return default


def get_replica_context() -> ReplicaContext:
    """Returns the context of the current replica.

    Outside every scope, it is the context of a lone replica: id 0 of 1, with collectives that
    return their operand. So a step also works when it is called directly.

    Raises:
        RuntimeError: If called in cross-replica context: inside `strategy.scope()`, but outside a
            step. To check, call `in_cross_replica_context()`.

    >>> get_replica_context().num_replicas_in_sync
    1
    """
    frame = current_frame()
    if frame is None:
        return ReplicaContext(_default_strategy(), in_step=False)
    if frame.replica is None:
        raise RuntimeError(
            "mirror.get_replica_context() was called inside strategy.scope(), but outside a step, "
            "where no replica is current. Call it in the function that you pass to strategy.run. "
            "To check the context first, call mirror.in_cross_replica_context()."
        )
    return frame.replica


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
            is below 1 or above 4096, the devices do not divide `replicas`, or `axis_name` is empty.
        TypeError: If an argument has the wrong type.

    >>> strategy = mirror.MultiWorkerMirroredStrategy()  # without TF_CONFIG: one process
    >>> strategy.is_chief, strategy.num_workers
    (True, 1)
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        replicas: int | None = None,
        replicas_per_device: int = 1,
        axis_name: str = REPLICA_AXIS,
    ) -> None:
        require_replicas(replicas, replicas_per_device, axis_name, cross_device_ops)
        start.initialize(cluster_resolver)
        is_alone = store.process_count() == 1
        distinct = backend.default_devices() if is_alone else _devices_of_job()
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
    """Returns the visible devices of all processes."""
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
