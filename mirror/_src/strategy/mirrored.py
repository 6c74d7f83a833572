"""`MirroredStrategy`, `OneDeviceStrategy`, and the default strategy."""

import functools
import logging
import warnings
from collections.abc import Sequence
from typing import final

import numpy as np

from mirror._src.base.errors import counted, expected, require_int
from mirror._src.base.modules import set_module
from mirror._src.base.naming import depth_of_user
from mirror._src.base.tracebacks import api_boundary
from mirror._src.base.types import REPLICA_AXIS
from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.resolve import (
    DeviceLike,
    canonicalize_device,
    canonicalize_replica_devices,
)
from mirror._src.devices.settings import first_devices
from mirror._src.engine.all_reduce import AllReduce
from mirror._src.engine.choice import default_ops, reduce_device
from mirror._src.engine.cross_device_ops import CrossDeviceOps
from mirror._src.engine.one_device import ReductionToOneDevice
from mirror._src.engine.replica_context import ReplicaContext
from mirror._src.engine.scopes import current_frame
from mirror._src.strategy.strategy import Strategy, strategies

_logger = logging.getLogger("mirror")


@set_module("mirror")
@final
class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine, with one or more replicas per device.

    Devices of a single type run a step as one program. Devices of several types, such as a GPU and
    the CPU, run it in stages, and their collectives are reduced on the host. The log states which
    executor is used and why.

    Args:
        devices: Devices in replica order: `jax.Device`s or names such as `"/gpu:1"`. A number
            selects the first GPUs, or on a machine without GPUs host devices, which are created if
            JAX has not started, as by `mirror launch --devices`. Defaults to all accelerators, or
            to all host devices on a machine without accelerators.
        cross_device_ops: Implementation of the collectives. Defaults to `AllReduce()`. For devices
            of several types, or for accelerators whose all-reduce fails a startup test (a known
            sum, once per process), the default is `ReductionToOneDevice()`; a warning reports the
            failed test.
        replicas_per_device: Number of replicas on each device. With eight replicas on a laptop or
            on one GPU, you can try a step as it will run on eight GPUs. Replica ids enumerate the
            replicas of the first device first, then the replicas of the second, etc.
        axis_name: Name of the replica axis inside steps. A model with
            `nn.BatchNorm(axis_name="batch")`, or a step with `jax.lax.pmean(x, "batch")`, runs
            unchanged with `axis_name="batch"`.
        shard_update: Whether to shard the weight update: each device stores 1/n of the optimizer
            state and updates 1/n of every weight, and the new weights are gathered. The step does
            not change. State that cannot be sharded exactly stays mirrored; `strategy.inspect`
            gives the reasons. With one replica, with several replicas per device, or with
            collectives that are reduced on one device, it has no effect except a log entry.

    Raises:
        ValueError: If devices are empty or repeated, if their number or `replicas_per_device` is
            below 1, if `axis_name` is empty, or if `AllReduce` is used with devices of several
            types.
        InvalidDeviceError: If the machine does not have a device, or as many devices; the number of
            host devices cannot change after JAX has started.
        TypeError: If an argument has the wrong type.
        RuntimeError: If the startup test of the all-reduce stalled, so that the accelerators do not
            respond.

    >>> MirroredStrategy(2).devices
    (CpuDevice(id=0), CpuDevice(id=1))
    >>> MirroredStrategy(["/cpu:1", "/cpu:3"]).num_replicas_in_sync
    2
    """

    @api_boundary
    def __init__(
        self,
        devices: Sequence[DeviceLike] | int | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        replicas_per_device: int = 1,
        axis_name: str = REPLICA_AXIS,
        shard_update: bool = False,
    ) -> None:
        if not isinstance(shard_update, bool):
            fix = "Pass shard_update=True to store 1/n of the optimizer state on each device."
            raise TypeError(expected("shard_update", shard_update, "True or False", fix))
        require_int("replicas_per_device", replicas_per_device)
        require_axis_name(axis_name)
        if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
            distinct = first_devices(int(devices))
        else:
            distinct = canonicalize_replica_devices(devices)
        replica_devices = tuple(d for d in distinct for _ in range(replicas_per_device))
        replicas = ReplicaDevices(replica_devices, axis_name=axis_name)
        ops = default_ops(replica_devices) if cross_device_ops is None else cross_device_ops
        if replicas.are_mixed:
            replicas = ReplicaDevices(replica_devices, reduce_device(ops), axis_name)
        super().__init__(replicas, ops, shard_update=shard_update)
        _logger.info("Using MirroredStrategy with devices %s", backend.names(replica_devices))

    def _make_single_replica(self) -> Strategy:
        return OneDeviceStrategy(self.devices[0], axis_name=self._replicas.axis_name)

    def _make_one_per_device(self) -> Strategy:
        ops = self._cross_device_ops
        # Other implementations may not be exact, so that they could hide a difference.
        is_exact = isinstance(ops, AllReduce | ReductionToOneDevice)
        if is_exact and self._replicas.replicas_per_device == 1:
            return self
        return MirroredStrategy(
            self._replicas.distinct,
            ops if is_exact else ReductionToOneDevice(),
            axis_name=self._replicas.axis_name,
            shard_update=self._shard_update,
        )


@set_module("mirror")
@final
class OneDeviceStrategy(Strategy):
    """Strategy with one replica on one device; values have the same types as with n replicas.

    Args:
        device: A `jax.Device`, or a name such as `"/gpu:0"`.
        axis_name: Name of the replica axis inside steps; see `MirroredStrategy`.

    Raises:
        ValueError: If `device` is not a device name, or `axis_name` is empty.
        InvalidDeviceError: If the machine does not have the device.

    >>> OneDeviceStrategy("/cpu:1").devices
    (CpuDevice(id=1),)
    """

    @api_boundary
    def __init__(self, device: DeviceLike, *, axis_name: str = REPLICA_AXIS) -> None:
        require_axis_name(axis_name)
        replicas = ReplicaDevices((canonicalize_device(device),), axis_name=axis_name)
        super().__init__(replicas, AllReduce())

    def _make_single_replica(self) -> Strategy:
        return OneDeviceStrategy(self.devices[0], axis_name=self._replicas.axis_name)

    def _make_one_per_device(self) -> Strategy:
        return self


def require_axis_name(name: object) -> None:
    """Rejects an `axis_name` that is not a non-empty string."""
    if not isinstance(name, str):
        fix = "Pass the name that collectives in the step use, e.g. axis_name='batch'."
        raise TypeError(expected("axis_name", name, "a string", fix))
    if not name:
        raise ValueError("`axis_name` must not be empty. Pass a name, e.g. axis_name='batch'.")


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
    if frame.shown_as is not None:
        shown: Strategy = frame.shown_as
        return shown
    assert isinstance(frame.strategy, Strategy)
    return frame.strategy


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
    warnings.warn(
        f"mirror.Trainer was created outside strategy.scope(), and trains on 1 device, {device}, "
        f"while {idle}. Create it inside the scope, or pass mirror.Trainer(..., {fix}). For one "
        "device, pass strategy=mirror.get_strategy().",
        stacklevel=depth_of_user(),
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
