"""Cross-device ops: `AllReduce`, by XLA across the devices, and `ReductionToOneDevice`."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import expected
from mirror._src.base.public_names import set_module
from mirror._src.base.types import Array, accumulator
from mirror._src.devices.backend import logical_name, type_of
from mirror._src.devices.launch import is_needed, launch
from mirror._src.devices.launches import Described, Site
from mirror._src.devices.names import DeviceSpec, LogicalDevice
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.resolve import DeviceLike, canonicalize_device
from mirror._src.devices.transfer import NoMesh, move
from mirror._src.engine.cross_device_ops import CrossDeviceOps, devices_of, require_pack_bytes
from mirror._src.engine.per_replica import PerReplica
from mirror._src.engine.reduce_op import ReduceOp, prepare


@set_module("mirror")
@final
class AllReduce(CrossDeviceOps):
    """Cross-device ops that use XLA's all-reduce, which is NCCL's on GPUs.

    Requires devices of a single type.

    Args:
        pack_bytes: Size in bytes up to which all-reduces are packed into one collective per dtype.
            0 disables packing. The default is 32 KiB on host devices, where every all-reduce
            has a fixed cost, and 0 on accelerators, where XLA combines collectives. On GPUs with
            JAX 0.12 or later, 2**20 lets XLA use its low-latency kernel for gradients of at most
            4 MiB in total, which is compiled but not measured on several GPUs.
        narrow: Whether the all-reduces of steps exchange half-precision values in their own dtype.
            They send half the bytes, but accelerators then round every partial sum. By default,
            half precision is converted to float32 and summed there.

    Raises:
        ValueError: If `pack_bytes` is negative.
        TypeError: If `pack_bytes` is neither an int nor `None`, or `narrow` is not a bool.

    >>> AllReduce().reduce("sum", mirror.PerReplica([1.0, 2.0]))
    Array(3., dtype=float32)
    >>> mirror.MirroredStrategy(["/cpu:0", "/cpu:1"], AllReduce(pack_bytes=0)).cross_device_ops
    AllReduce(pack_bytes=0)
    """

    def __init__(self, pack_bytes: int | None = None, *, narrow: bool = False) -> None:
        self.pack_bytes = require_pack_bytes(pack_bytes)
        if not isinstance(narrow, bool):
            raise TypeError(expected("narrow", narrow, "a bool", "Pass narrow=True, or omit it."))
        self._narrow = narrow

    @classmethod
    def _is_compiled(cls) -> bool:
        return True

    def _reduced(self, op: ReduceOp, value: PerReplica) -> Array:
        devices = devices_of(value)
        if devices is None or devices.are_mixed or len(devices.distinct) == 1:
            return super()._reduced(op, value)
        outputs: list[Array] = []
        leaves = [value.stacked if isinstance(value.stacked, jax.Array) else np.stack(value.values)]
        program = _all_reduce_program(op, devices.devices)
        name, ids = f"the reduction {op.value!r}", range(len(devices))
        sites = [Site("all-reduce", name)]
        spans = devices.spans_processes
        described = Described(name, "", devices.devices, ids, lambda: sites, spans)
        with NoMesh():  # the mesh of an open scope may consist of other devices
            bounded = devices.on_host and is_needed()
            launch(program, leaves, outputs, described, bounded=bounded)
        return outputs[0]

    def __repr__(self) -> str:
        narrow = ", narrow=True" if self._narrow else ""
        return f"AllReduce(pack_bytes={self.pack_bytes}{narrow})"


@functools.lru_cache(64)
def _all_reduce_program(
    op: ReduceOp, devices: tuple[jax.Device, ...]
) -> Callable[..., list[Array]]:
    """Returns a program that reduces the rows of a stacked array, by an all-reduce of XLA."""
    replicas = ReplicaDevices(devices)

    def all_reduce(stacked: Array) -> list[Array]:
        ready = prepare(op, stacked)
        if op in (ReduceOp.SUM, ReduceOp.MEAN):
            total = jnp.sum if op is ReduceOp.SUM else jnp.mean
            return [total(ready, 0, dtype=accumulator(ready.dtype)).astype(ready.dtype)]
        extreme = (jnp.min if op is ReduceOp.MIN else jnp.max)(ready, 0)
        if not jnp.issubdtype(ready.dtype, jnp.inexact):
            return [extreme]
        # XLA's min and max collectives may or may not propagate a NaN of one replica.
        return [jnp.where(jnp.isnan(ready).any(0), jnp.asarray(jnp.nan, ready.dtype), extreme)]

    return jax.jit(all_reduce, in_shardings=replicas.stacked, out_shardings=replicas.mirrored)


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
