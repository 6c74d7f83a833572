"""Which executor runs the replica programs of a strategy: the one place that chooses."""

import logging
import warnings

import jax

from mirror._src.collectives.all_reduce import AllReduce
from mirror._src.collectives.cross_device_ops import CrossDeviceOps
from mirror._src.collectives.one_device import ReductionToOneDevice
from mirror._src.devices import backend
from mirror._src.devices.collective_check import all_reduce_fault, stuck
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.executors.executor import Executor
from mirror._src.executors.lone import LoneExecutor
from mirror._src.executors.pmap import PmapExecutor
from mirror._src.executors.sharded import ShardedExecutor
from mirror._src.executors.staged.executor import StagedExecutor
from mirror._src.executors.vmap import VmapExecutor

_logger = logging.getLogger("mirror")
_TEST_SECS = 30.0  # XLA itself ends the process when NCCL has not come up after some 40 s
_REMEDY = "Often NCCL_P2P_DISABLE=1, set before Python starts, is the remedy"


def choose(
    replicas: ReplicaDevices, ops: CrossDeviceOps, *, shard_update: bool = False
) -> Executor:
    """The executor for steps whose replicas have one set of shapes.

    Args:
        replicas: Devices of the replicas.
        ops: Implements the collectives.
        shard_update: Whether weight updates are to be sharded. Where they cannot be, every device
            stores all of the state, and the log says so.

    Raises:
        ValueError: an all-reduce among devices of several types.
    """
    if replicas.are_mixed and isinstance(ops, AllReduce):
        raise ValueError(
            f"AllReduce among {backend.names(replicas.devices)}: devices of several types have "
            "none. Leave cross_device_ops out, or pass mirror.ReductionToOneDevice()."
        )
    if shard_update:
        reason = _keeps_whole(replicas, ops)
        if not reason:
            pack_bytes = ops.packed_bytes(on_host=replicas.on_host)
            return _said(ShardedExecutor(replicas, pack_bytes=pack_bytes), "shard_update=True")
        _logger.info("shard_update=True has no effect: %s", reason)
    if replicas.are_mixed:
        return _staged(replicas, ops, "the devices are of several types")
    if not isinstance(ops, AllReduce):
        return _staged(replicas, ops, f"cross_device_ops is {ops!r}")
    if len(replicas) == 1:
        _logger.debug("Using LoneExecutor: there is one replica")
        return LoneExecutor(replicas)
    pack_bytes = ops.packed_bytes(on_host=replicas.on_host)
    if replicas.replicas_per_device > 1:
        executor = VmapExecutor(replicas, pack_bytes=pack_bytes)
        return _said(executor, "there are several replicas on each device")
    _logger.debug("Using PmapExecutor: there is one replica on each device, all of one type")
    return PmapExecutor(replicas, pack_bytes=pack_bytes)


def _keeps_whole(replicas: ReplicaDevices, ops: CrossDeviceOps) -> str:
    """Why weight updates are not sharded; empty if they are."""
    if replicas.are_mixed:
        return "the devices are of several types"
    if not isinstance(ops, AllReduce):
        return f"cross_device_ops is {ops!r}, which reduces on one device"
    if replicas.replicas_per_device > 1:
        return "there are several replicas on each device"
    return "there is one replica" if len(replicas) == 1 else ""


def choose_for_unequal(executor: Executor, ops: CrossDeviceOps) -> Executor:
    """The executor for steps whose replicas differ in shape, where this one is for all others."""
    if isinstance(executor, StagedExecutor):
        return executor
    return _staged(executor.replicas, ops, "the replicas' values differ in shape")


def _staged(replicas: ReplicaDevices, ops: CrossDeviceOps, reason: str) -> Executor:
    executor = _said(StagedExecutor(replicas, ops), reason)
    where = backend.logical_name(ops.device)
    _logger.info("Reduce to %s then broadcast to %s", where, backend.names(replicas.devices))
    return executor


def _said(executor: Executor, reason: str) -> Executor:
    _logger.info("Using %s: %s", type(executor).__name__, reason)
    return executor


def default_ops(devices: tuple[jax.Device, ...]) -> CrossDeviceOps:
    """Who carries the collectives out among these devices, where the user does not say.

    Raises:
        RuntimeError: the accelerators answer no more after a test of their all-reduce.
    """
    distinct = tuple(dict.fromkeys(devices))
    kinds = {backend.type_of(device) for device in distinct}
    if len(kinds) > 1:
        return ReductionToOneDevice()
    if kinds == {"CPU"} or len(distinct) == 1:
        return AllReduce()
    fault = all_reduce_fault(distinct, _TEST_SECS)
    if fault is None:
        return AllReduce()
    lost = stuck(distinct)
    if lost:
        raise RuntimeError(
            f"The all-reduce among {backend.names(distinct)} does not work: {fault}. Since that "
            f"test {backend.names(lost)} do not answer. {_REMEDY}, or leave them out."
        )
    warnings.warn(
        f"The all-reduce among {backend.names(distinct)} does not work: {fault}. Collectives are "
        f"reduced on the host instead, which is slower. {_REMEDY}.",
        stacklevel=3,
    )
    return ReductionToOneDevice()


def reduce_device(ops: object) -> jax.Device | None:
    """Where ops reduce, if that is on one device."""
    if not isinstance(ops, CrossDeviceOps) or isinstance(ops, AllReduce):
        return None
    return ops.device
