"""Selects the executor for a strategy."""

import logging
import warnings

import jax

from mirror._src.base.naming import depth_of_user
from mirror._src.devices import backend
from mirror._src.devices.collective_check import (
    all_reduce_fault,
    p2p_settings,
    unresponsive_devices,
)
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.all_reduce import AllReduce
from mirror._src.engine.cross_device_ops import CrossDeviceOps
from mirror._src.engine.executor import Executor, uses_gloo
from mirror._src.engine.lone import LoneExecutor
from mirror._src.engine.one_device import ReductionToOneDevice
from mirror._src.engine.pmap import PmapExecutor
from mirror._src.engine.shard_map import ShardMapExecutor
from mirror._src.engine.sharded import ShardedExecutor
from mirror._src.engine.staged.executor import StagedExecutor
from mirror._src.engine.vmap import VmapExecutor

_logger = logging.getLogger("mirror")
_TEST_SECS = 30.0  # XLA itself ends the process if NCCL has not started after about 40 s


def choose(
    replicas: ReplicaDevices, ops: CrossDeviceOps, *, shard_update: bool = False
) -> Executor:
    """Returns the executor for the steps of a strategy.

    Args:
        replicas: Devices of the replicas.
        ops: Implements the collectives.
        shard_update: Whether to shard weight updates. If they cannot be sharded, every device
            stores the whole state, and the reason is logged.

    Raises:
        ValueError: If `ops` is `AllReduce` and the devices are of several types.
        NotImplementedError: If the devices belong to several processes, and the collectives cannot
            be XLA's.
    """
    if replicas.spans_processes:
        return _choose_spanning(replicas, ops, shard_update=shard_update)
    if replicas.are_mixed and isinstance(ops, AllReduce):
        raise ValueError(
            f"AllReduce cannot connect {backend.names(replicas.devices)}, which are devices of "
            "several types. Omit cross_device_ops, or pass mirror.ReductionToOneDevice()."
        )
    if shard_update:
        reason = _reason_not_to_shard(replicas, ops)
        if not reason:
            pack_bytes = ops._packed_bytes(on_host=replicas.on_host)
            return _log_choice(
                ShardedExecutor(replicas, pack_bytes=pack_bytes), "shard_update=True"
            )
        _logger.info("shard_update=True has no effect: %s", reason)
    if replicas.are_mixed:
        return _staged(replicas, ops, "the devices are of several types")
    if not isinstance(ops, AllReduce):
        return _staged(replicas, ops, f"cross_device_ops is {ops!r}")
    if len(replicas) == 1:
        _logger.debug("Using LoneExecutor: single replica")
        return LoneExecutor(replicas)
    pack_bytes = ops._packed_bytes(on_host=replicas.on_host)
    if replicas.replicas_per_device > 1:
        executor = VmapExecutor(replicas, pack_bytes=pack_bytes)
        return _log_choice(executor, "several replicas per device")
    _logger.debug("Using PmapExecutor: one replica per device, devices of one type")
    return PmapExecutor(replicas, pack_bytes=pack_bytes)


def _choose_spanning(
    replicas: ReplicaDevices, ops: CrossDeviceOps, *, shard_update: bool
) -> Executor:
    """Returns the executor for devices of several processes."""
    if replicas.are_mixed or not isinstance(ops, AllReduce):
        found = f"cross_device_ops={ops!r} reduces on the host of one process"
        if replicas.are_mixed:
            found = f"{backend.names(replicas.devices)} are devices of several types"
        raise NotImplementedError(
            f"{found}, but the replicas are in several processes, which only XLA's collectives "
            "connect. Omit cross_device_ops, and use devices of one type."
        )
    if shard_update:
        # See `_reason_not_to_shard`: jax#40830.
        _logger.info("shard_update=True has no effect: the replicas are in several processes")
    pack_bytes = ops._packed_bytes(on_host=replicas.on_host, spans_processes=True)
    if replicas.replicas_per_device > 1:
        executor = VmapExecutor(replicas, pack_bytes=pack_bytes)
        return _log_choice(executor, "several replicas per device")
    return _log_choice(ShardMapExecutor(replicas, pack_bytes=pack_bytes), "several processes")


def _reason_not_to_shard(replicas: ReplicaDevices, ops: CrossDeviceOps) -> str:
    """Returns why weight updates cannot be sharded; empty if they can."""
    if replicas.are_mixed:
        return "the devices are of several types"
    if not isinstance(ops, AllReduce):
        return f"cross_device_ops is {ops!r}, which reduces on one device"
    if replicas.replicas_per_device > 1:
        return "several replicas per device"
    if len(replicas) > 1 and uses_gloo(replicas):
        return "the reduce-scatter of gloo, which JAX uses in a job, returns wrong values"
    return "single replica" if len(replicas) == 1 else ""


def _staged(replicas: ReplicaDevices, ops: CrossDeviceOps, reason: str) -> Executor:
    executor = _log_choice(StagedExecutor(replicas, ops), reason)
    device = backend.logical_name(ops.device)
    _logger.info("Reduce to %s then broadcast to %s", device, backend.names(replicas.devices))
    return executor


def _log_choice(executor: Executor, reason: str) -> Executor:
    _logger.info("Using %s: %s", type(executor).__name__, reason)
    return executor


def default_ops(devices: tuple[jax.Device, ...]) -> CrossDeviceOps:
    """Returns the default cross-device ops for these devices. Tests the all-reduce of accelerators.

    Raises:
        RuntimeError: If accelerators stop responding during the test.
    """
    distinct = tuple(dict.fromkeys(devices))
    kinds = {backend.type_of(device) for device in distinct}
    if len(kinds) > 1:
        return ReductionToOneDevice()
    # Across processes there is nothing to fall back to, and JAX itself reports a failure.
    spans_processes = len({device.process_index for device in distinct}) > 1
    if kinds == {"CPU"} or len(distinct) == 1 or spans_processes:
        return AllReduce()
    fault = all_reduce_fault(distinct, _TEST_SECS)
    if fault is None:
        return AllReduce()
    settings = " and ".join(p2p_settings())
    fix = f"If direct GPU transfers fail, set {settings} before starting Python."
    lost = unresponsive_devices(distinct)
    if lost:
        raise RuntimeError(
            f"The all-reduce across {backend.names(distinct)} failed its startup test: {fault}. "
            f"{backend.names(lost)} stopped responding. {fix} Otherwise omit these devices."
        )
    warnings.warn(
        f"The all-reduce across {backend.names(distinct)} failed its startup test: {fault}. "
        f"Falling back to reduction on the host, which is slower. {fix}",
        stacklevel=depth_of_user(),
    )
    return ReductionToOneDevice()


def reduce_device(ops: object) -> jax.Device | None:
    """Returns the device on which `ops` reduces; `None` if it reduces across devices."""
    if not isinstance(ops, CrossDeviceOps) or isinstance(ops, AllReduce):
        return None
    return ops.device
