"""From what a user names a device by to `jax.Device`s: one function for all of `mirror`."""

from collections.abc import Iterable
from typing import TypeAlias

import jax

from mirror._src.devices.backend import (
    default_devices,
    find_device,
    names,
    require_logical,
    spec_of,
)
from mirror._src.devices.names import SPELLINGS, DeviceSpec, LogicalDevice, PhysicalDevice
from mirror._src.utils.errors import InvalidDeviceError, describe

DeviceLike: TypeAlias = str | LogicalDevice | jax.Device


def canonicalize_device(device: DeviceLike) -> jax.Device:
    """The `jax.Device` that is meant by a name, a `LogicalDevice` or a `jax.Device`.

    A name without index means the first of its type.

    Raises:
        TypeError: none of those.
        ValueError: a string that is no device name.
        InvalidDeviceError: no such device, or one that is hidden.
    """
    return _resolve(device)[1]


def canonicalize_replica_devices(devices: Iterable[DeviceLike] | None) -> tuple[jax.Device, ...]:
    """The devices of the replicas, in replica order; `None` means all accelerators, else all CPUs.

    Logical devices that are parts of one GPU are that GPU, as often as there are parts.

    Raises:
        TypeError: no list, or something in it that is no device.
        ValueError: none, a repeated or an unknown device.
    """
    if devices is None:
        return default_devices()
    if isinstance(devices, str | LogicalDevice | jax.Device):
        shown = str(devices) if isinstance(devices, jax.Device) else repr(devices)
        raise ValueError(
            f"devices={shown} is one device. Pass a list: MirroredStrategy([{shown}])."
        )
    if not isinstance(devices, Iterable):
        raise TypeError(
            f"devices={describe(devices)} is no list of devices. Pass e.g. ['/gpu:0', '/gpu:1'], "
            "or None for all."
        )
    asked = list(devices)
    try:
        resolved = [_resolve(device) for device in asked]
    except InvalidDeviceError as error:
        raise ValueError(f"devices={asked!r}: {error}") from error
    found = tuple(device for _, device in resolved)
    if not found:
        raise ValueError("devices=[] is empty. Name at least one, or pass None for all devices.")
    if len({spec for spec, _ in resolved}) < len(resolved):
        raise ValueError(
            f"devices={asked!r} repeats a device: {names(found)}. Name each device once."
        )
    return found


def _resolve(device: DeviceLike) -> tuple[DeviceSpec, jax.Device]:
    """The logical device's name, and the JAX device it is on."""
    if isinstance(device, jax.Device):
        return spec_of(require_logical(device)), device
    if not isinstance(device, str | LogicalDevice):
        physical = isinstance(device, PhysicalDevice)
        hint = " That is a physical device; computations are placed on logical ones."
        raise TypeError(
            f"{describe(device)} is not a device.{hint if physical else ''} Pass one of "
            f"mirror.config.list_logical_devices(), a jax.Device, or a name such as {SPELLINGS}."
        )
    named = DeviceSpec.parse(device if isinstance(device, str) else device.name)
    spec = DeviceSpec(index=0).make_merged_spec(named)
    return spec, find_device(spec)
