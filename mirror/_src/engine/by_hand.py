"""Argument checks of `reduce` and `broadcast` outside a step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.dtypes import is_numeric
from mirror._src.base.errors import describe
from mirror._src.base.types import ARRAY_LIKE, Array, ArrayLike
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.resolve import DeviceLike, canonicalize_replica_devices
from mirror._src.devices.transfer import any_deleted
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.engine.per_replica import PerReplica, held_by, spans_processes

_DONATED = "its buffer was donated to an earlier `run`. Use the array that `run` returned."


def require_array(value: ArrayLike) -> Array | np.ndarray:
    """Returns the operand of `broadcast` as an array.

    Raises:
        ValueError: If `value` is a deleted array.
        TypeError: If `value` is neither an array nor a number.
    """
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise ValueError(f"Cannot broadcast a deleted array, {describe(value)}: {_DONATED}")
        return value
    if not isinstance(value, ARRAY_LIKE) or not is_numeric(np.asarray(value).dtype):
        raise TypeError(
            f"broadcast expects an array or a number, got {describe(value)}. For a pytree, "
            "broadcast each leaf with jax.tree.map."
        )
    return np.array(value, jnp.result_type(value))


def require_reducible(value: PerReplica) -> PerReplica:
    """Returns the operand of `reduce` unchanged.

    Raises:
        ValueError: If the replicas' values differ in shape or have been deleted.
    """
    if len(set(value.shapes)) > 1:
        raise ValueError(
            f"Cannot reduce {value!r}: its values differ in shape "
            f"({', '.join(map(str, value.shapes))}). Reduce each value over its own axis first: "
            "strategy.reduce(op, x, axis=0)."
        )
    held = held_by(value)
    arrays = held.arrays if isinstance(held, UnstackedArrays) else [held]
    if any_deleted([array for array in arrays if isinstance(array, jax.Array)]):
        raise ValueError(f"Cannot reduce {value!r}: {_DONATED}")
    return value


def replica_devices(devices: DeviceLike | Sequence[DeviceLike]) -> ReplicaDevices:
    """Returns the devices that one name or a list of names identifies."""
    several = list(devices) if isinstance(devices, list | tuple) else [devices]
    return ReplicaDevices(canonicalize_replica_devices(several))


def devices_of(value: PerReplica) -> ReplicaDevices | None:
    """Returns the devices of a value with one array per device, or with all arrays on one device.

    Returns `None` for any other value, such as one that is on the host.
    """
    if spans_processes(value):
        array: Any = held_by(value)
        return ReplicaDevices(tuple(array.sharding.mesh.devices.flat))
    values = value.values
    arrays = [array for array in values if isinstance(array, jax.Array)]
    devices = tuple(device for array in arrays for device in array.devices())
    if not len(arrays) == len(devices) == len(values):
        return None
    return ReplicaDevices(devices) if len(set(devices)) in (1, len(devices)) else None
