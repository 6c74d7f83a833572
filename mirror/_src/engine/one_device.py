"""`ReductionToOneDevice`: cross-device ops that reduce on a single device."""

import functools
from collections.abc import Iterator
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import expected
from mirror._src.base.modules import set_module
from mirror._src.base.types import Array
from mirror._src.devices.backend import logical_name, type_of
from mirror._src.devices.names import DeviceSpec, LogicalDevice
from mirror._src.devices.resolve import DeviceLike, canonicalize_device
from mirror._src.devices.transfer import NoMesh, move
from mirror._src.engine.cross_device_ops import CrossDeviceOps, require_pack_bytes
from mirror._src.engine.reduce_op import ReduceOp, accumulator


@set_module("mirror")
@final
class ReductionToOneDevice(CrossDeviceOps):
    """Reduces on a single device (the host by default) and broadcasts the result.

    Works on devices without a common all-reduce: devices of several types, or GPUs on which NCCL
    fails. The replicas' values pass through host memory and are reduced in replica order, as they
    arrive.

    Args:
        device: Device to reduce on: a name, a `LogicalDevice` or a `jax.Device`.
        pack_bytes: Size in bytes up to which all-reduces are packed into one collective per dtype.
            0 disables packing. The default is 256 KiB.

    Raises:
        ValueError: If `device` is not a valid device name, or `pack_bytes` is negative.
        TypeError: If `device` is not a device, or `pack_bytes` is neither an int nor `None`.
        InvalidDeviceError: On first use, if the device does not exist.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"], ReductionToOneDevice())
    >>> strategy.reduce("max", mirror.PerReplica([1.0, 2.0]))
    Array(2., dtype=float32)
    """

    def __init__(self, device: DeviceLike = "/CPU:0", pack_bytes: int | None = None) -> None:
        if isinstance(device, str):
            DeviceSpec.parse(device)
        elif not isinstance(device, LogicalDevice | jax.Device):
            raise TypeError(
                expected("device", device, "a device", "Pass a name such as '/cpu:0', or omit it.")
            )
        self._device = device
        self.pack_bytes = require_pack_bytes(pack_bytes)

    @functools.cached_property
    def device(self) -> jax.Device:
        """The device on which values are reduced."""
        return canonicalize_device(self._device)

    def reduce_implementation(
        self, op: ReduceOp, values: Iterator[np.ndarray]
    ) -> Array | np.ndarray:
        """Reduces on `device`; see `CrossDeviceOps.reduce_implementation`."""
        if type_of(self.device) == "CPU":
            return super().reduce_implementation(op, values)
        total = move(next(values), self.device)
        dtype = total.dtype
        with NoMesh():  # the current mesh consists of the devices of all replicas
            total = total.astype(accumulator(dtype))
            for value in values:
                total = _ON_DEVICE[op](total, move(value, self.device))
            return total.astype(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._name, self.pack_bytes)

    @property
    def _name(self) -> str:
        if isinstance(self._device, jax.Device):
            return logical_name(self._device)
        return self._device if isinstance(self._device, str) else self._device.name

    def __repr__(self) -> str:
        return f"ReductionToOneDevice({self._name!r})"


_ON_DEVICE = {
    ReduceOp.SUM: jax.jit(jnp.add, donate_argnums=0),
    ReduceOp.MIN: jax.jit(jnp.minimum, donate_argnums=0),
    ReduceOp.MAX: jax.jit(jnp.maximum, donate_argnums=0),
}
