"""Which values and devices `reduce` and `broadcast` take outside a step."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.resolve import DeviceLike, canonicalize_replica_devices
from mirror._src.devices.transfer import any_deleted
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.utils.errors import describe
from mirror._src.utils.types import Array, ArrayLike
from mirror._src.values.per_replica import PerReplica, held_by, is_numeric


def require_array(value: ArrayLike) -> Array | np.ndarray:
    """The value as an array; refuses a deleted one and what is no array and no number."""
    number = np.ndarray | np.generic | int | float | complex
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise ValueError(
                f"broadcast of {describe(value)}, which has been deleted: a step gave up its "
                "buffer. Use the array that the step returned."
            )
        return value
    if not isinstance(value, number) or not is_numeric(np.asarray(value).dtype):
        raise TypeError(
            f"broadcast of {describe(value)}: it is no array and no number. Pass one; of a tree, "
            "each leaf by itself."
        )
    return np.array(value, jnp.result_type(value))


def require_reducible(value: PerReplica) -> PerReplica:
    """The value itself; refuses values of unequal shapes and deleted ones."""
    if len(set(value.shapes)) > 1:
        raise ValueError(
            f"{value!r}: the values differ in shape, {', '.join(map(str, value.shapes))}. Reduce "
            "each over its own axis first: strategy.reduce(op, x, axis=0)."
        )
    held = held_by(value)
    parts = held.arrays if isinstance(held, UnstackedArrays) else [held]
    if any_deleted([part for part in parts if isinstance(part, jax.Array)]):
        raise ValueError(
            f"reduce of {value!r}: a step gave up its buffer. Use what the step returned."
        )
    return value


def replica_devices(devices: DeviceLike | Sequence[DeviceLike]) -> ReplicaDevices:
    """The devices that names, or one name, stand for."""
    several = list(devices) if isinstance(devices, list | tuple) else [devices]
    return ReplicaDevices(canonicalize_replica_devices(several))


def devices_of(value: PerReplica) -> ReplicaDevices | None:
    """The devices a value is on; `None`: on the host, or all on one device."""
    parts = value.values
    arrays = [part for part in parts if isinstance(part, jax.Array) and len(part.devices()) == 1]
    if len(arrays) < len(parts):
        return None
    devices = tuple(device for array in arrays for device in array.devices())
    return ReplicaDevices(devices) if len(set(devices)) in (1, len(devices)) else None
