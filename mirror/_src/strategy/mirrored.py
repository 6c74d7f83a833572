"""The strategies a user makes, and the one there is when nobody made any."""

import functools
import logging
from collections.abc import Sequence
from typing import final

from mirror._src.collectives.all_reduce import AllReduce
from mirror._src.collectives.cross_device_ops import CrossDeviceOps
from mirror._src.collectives.one_device import ReductionToOneDevice
from mirror._src.context.replica_context import ReplicaContext
from mirror._src.context.scopes import current_frame
from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.resolve import (
    DeviceLike,
    canonicalize_device,
    canonicalize_replica_devices,
)
from mirror._src.executors.choice import default_ops, reduce_device
from mirror._src.strategy.strategy import Strategy
from mirror._src.utils.errors import describe
from mirror._src.utils.modules import set_module
from mirror._src.utils.types import REPLICA_AXIS

_logger = logging.getLogger("mirror")


@set_module("mirror")
@final
class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine: one replica on each, or several.

    Devices of one type run a step as one program. Others, a GPU and the CPU, say, run it in stages;
    their collectives are reduced on the host. The log says which it is and why.

    Args:
        devices: in replica order, `jax.Device`s or names such as `"/gpu:1"`. `None`: all
            accelerators, or all host devices where there are none.
        cross_device_ops: who carries the collectives out. `None` chooses: `AllReduce()`, or
            `ReductionToOneDevice()` where the devices are of several types, or are accelerators
            whose all-reduce fails a test (a known sum, once in a process); a warning says so.
        replicas_per_device: so many replicas on each device: eight on a laptop or on one GPU, to
            try what eight GPUs will do. Replica ids count through one device, then the next.
        axis_name: The name of the replica axis inside steps. A model with
            `nn.BatchNorm(axis_name="batch")`, or a step with `jax.lax.pmean(x, "batch")`, runs
            unchanged under `axis_name="batch"`.
        shard_update: Shard the weight update: each device stores 1/n of the optimizer's state and
            updates 1/n of each weight, and the new weights are gathered. The step stays as it is.
            State that cannot be sharded exactly stays mirrored; `strategy.inspect` says why. No
            effect, but a log entry, with one replica, with several on a device, and where
            collectives are reduced on one device.

    Raises:
        ValueError: empty, repeated or unknown devices, `replicas_per_device` below 1, an empty
            `axis_name`, or `AllReduce` over devices of several types.
        TypeError: something that is no device, no `CrossDeviceOps`, no int, or no string.
        RuntimeError: the test of the all-reduce has stalled, and the accelerators with it.

    >>> import jax
    >>> strategy = MirroredStrategy(jax.devices()[:2])
    >>> strategy.num_replicas_in_sync
    2
    """

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        replicas_per_device: int = 1,
        axis_name: str = REPLICA_AXIS,
        shard_update: bool = False,
    ) -> None:
        if not isinstance(shard_update, bool):
            raise TypeError(
                f"`shard_update` must be True or False, got {describe(shard_update)}. Pass "
                "shard_update=True to store 1/n of the optimizer's state on each device."
            )
        if isinstance(replicas_per_device, bool) or not isinstance(replicas_per_device, int):
            raise TypeError(f"replicas_per_device={describe(replicas_per_device)} is no int.")
        if replicas_per_device < 1:
            raise ValueError(
                f"replicas_per_device={replicas_per_device}: each device needs a replica at least."
            )
        _require_axis_name(axis_name)
        on_each = canonicalize_replica_devices(devices)
        found = tuple(device for device in on_each for _ in range(replicas_per_device))
        replicas = ReplicaDevices(found, axis_name=axis_name)
        ops = default_ops(found) if cross_device_ops is None else cross_device_ops
        if replicas.are_mixed:
            replicas = ReplicaDevices(found, reduce_device(ops), axis_name)
        super().__init__(replicas, ops, shard_update=shard_update)
        _logger.info("Using MirroredStrategy with devices %s", backend.names(found))

    def _alone(self) -> Strategy:
        return OneDeviceStrategy(self.devices[0], axis_name=self._replicas.axis_name)

    def _one_on_each(self) -> Strategy:
        ops = self._cross_device_ops
        exact = isinstance(ops, AllReduce | ReductionToOneDevice)  # another may hide a difference
        if exact and self._replicas.replicas_per_device == 1:
            return self
        ops = ops if exact else ReductionToOneDevice()
        name = self._replicas.axis_name
        sharded = self._shard_update
        return MirroredStrategy(self._replicas.distinct, ops, axis_name=name, shard_update=sharded)


@set_module("mirror")
@final
class OneDeviceStrategy(Strategy):
    """One replica on one device: the same laws with n = 1, and the same types.

    Args:
        device: a `jax.Device` or a name such as `"/gpu:0"`.
        axis_name: The name of the replica axis inside steps, as of `MirroredStrategy`.

    Raises:
        ValueError: no device name, or an empty `axis_name`.
        InvalidDeviceError: no such device.

    >>> OneDeviceStrategy("/cpu:1").devices
    (CpuDevice(id=1),)
    """

    def __init__(self, device: DeviceLike, *, axis_name: str = REPLICA_AXIS) -> None:
        _require_axis_name(axis_name)
        replicas = ReplicaDevices((canonicalize_device(device),), axis_name=axis_name)
        super().__init__(replicas, AllReduce())

    def _alone(self) -> Strategy:
        return OneDeviceStrategy(self.devices[0], axis_name=self._replicas.axis_name)

    def _one_on_each(self) -> Strategy:
        return self


def _require_axis_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f"`axis_name` must be a string, got {describe(name)}. Pass the name that collectives "
            "in the step use, e.g. axis_name='batch'."
        )
    if not name:
        raise ValueError("`axis_name` must not be empty. Pass a name, e.g. axis_name='batch'.")


@functools.cache
def _default_strategy() -> Strategy:
    """One replica on JAX's default device."""
    return OneDeviceStrategy(backend.default_devices()[0])


def get_strategy() -> Strategy:
    """The strategy whose scope or replica the caller stands in, else one on the default device.

    >>> strategy = OneDeviceStrategy("/cpu:0")
    >>> with strategy.scope():
    ...     get_strategy() is strategy
    True
    """
    frame = current_frame()
    if frame is None:
        return _default_strategy()
    assert isinstance(frame.strategy, Strategy)
    return frame.strategy


def get_replica_context() -> ReplicaContext | None:
    """The context of the replica the caller stands in.

    Inside `strategy.scope()` but outside `run`, in cross-replica context, it is `None`. Outside
    every scope it is that of a lone replica: id 0 of 1, collectives that change nothing. So a step
    also works when it is called by hand.

    >>> get_replica_context().num_replicas_in_sync
    1
    >>> with OneDeviceStrategy("/cpu:0").scope():
    ...     print(get_replica_context())
    None
    """
    frame = current_frame()
    if frame is None:
        return ReplicaContext(_default_strategy(), in_step=False)
    return frame.replica
