"""Which executor runs the replica programs of a strategy: the one place that chooses."""

import logging

import jax

from mirror.cross_device_ops import AllReduce, CrossDeviceOps, ReductionToOneDevice
from mirror.devices import backend
from mirror.devices.replicas import ReplicaDevices
from mirror.executors.executor import Executor
from mirror.executors.pmap import PmapExecutor
from mirror.executors.staged import StagedExecutor
from mirror.executors.vmap import VmapExecutor

_logger = logging.getLogger("mirror")


def choose(replicas: ReplicaDevices, ops: CrossDeviceOps) -> Executor:
    """The executor for steps whose replicas have one set of shapes."""
    if replicas.are_mixed:
        return _staged(replicas, ops, "the devices are of several types")
    if not isinstance(ops, AllReduce):
        return _staged(replicas, ops, f"cross_device_ops is {ops!r}")
    if replicas.replicas_per_device > 1:
        return _said(VmapExecutor(replicas), "there are several replicas on each device")
    return _said(PmapExecutor(replicas), "there is one replica on each device, all of one type")


def choose_for_unequal(replicas: ReplicaDevices, ops: CrossDeviceOps) -> Executor:
    """The executor for steps whose replicas differ in shape."""
    return _staged(replicas, ops, "the replicas' values differ in shape")


def _staged(replicas: ReplicaDevices, ops: CrossDeviceOps, reason: str) -> Executor:
    executor = _said(StagedExecutor(replicas, ops), reason)
    where = backend.logical_name(ops.device)
    _logger.info("Reduce to %s then broadcast to %s", where, backend.names(replicas.devices))
    return executor


def _said(executor: Executor, reason: str) -> Executor:
    _logger.info("Using %s: %s", type(executor).__name__, reason)
    return executor


def default_ops(devices: tuple[jax.Device, ...]) -> CrossDeviceOps:
    """Who carries the exchanges out among these devices, where the user does not say."""
    if len({backend.type_of(device) for device in devices}) > 1:
        return ReductionToOneDevice()
    return AllReduce()
