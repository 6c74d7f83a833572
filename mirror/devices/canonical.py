"""From what a user names a device by to `jax.Device`s: one function for all of `mirror`."""

from collections.abc import Iterable
from typing import TypeAlias

import jax

from mirror._errors import InvalidDeviceError
from mirror.devices.backend import default_devices, device_type, find_device, names
from mirror.devices.spec import SPELLINGS, DeviceSpec

DeviceLike: TypeAlias = str | jax.Device


def canonicalize_device(device: DeviceLike) -> jax.Device:
    """The `jax.Device` that is meant by a name or a `jax.Device`.

    Raises:
        TypeError: neither a string nor a `jax.Device`.
        ValueError: a string that is no device name.
        InvalidDeviceError: no such device.
    """
    if isinstance(device, jax.Device):
        return device
    if isinstance(device, str):
        return find_device(DeviceSpec.parse(device))
    raise TypeError(
        f"{device!r} ({type(device).__name__}) is not a device. Pass a jax.Device or a name such "
        f"as {SPELLINGS}."
    )


def canonicalize_replica_devices(devices: Iterable[DeviceLike] | None) -> tuple[jax.Device, ...]:
    """The devices of the replicas, in replica order; `None` means all accelerators, else all CPUs.

    Raises:
        ValueError: none, a repeated, an unknown device, or devices of several types.
    """
    if devices is None:
        return default_devices()
    if isinstance(devices, str | jax.Device):
        raise ValueError(
            f"devices={devices!r} is one device. Pass a list: MirroredStrategy([{devices!r}])."
        )
    asked = list(devices)
    try:
        found = tuple(canonicalize_device(device) for device in asked)
    except InvalidDeviceError as error:
        raise ValueError(f"devices={asked!r}: {error}") from error
    if not found:
        raise ValueError("devices=[] is empty. Name at least one, or pass None for all devices.")
    if len(set(found)) < len(found):
        raise ValueError(
            f"devices={asked!r} repeats a device: {names(found)}. Name each device once."
        )
    if len({device_type(device) for device in found}) > 1:
        raise ValueError(
            f"devices={asked!r} are of several types: {names(found)}. All replicas must run on "
            "devices of one type."
        )
    return found
