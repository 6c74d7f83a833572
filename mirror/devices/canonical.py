"""From what a user names a device by to `jax.Device`s: one function for all of `mirror`."""

from collections.abc import Iterable
from typing import TypeAlias

import jax

from mirror._errors import InvalidDeviceError, describe
from mirror.devices.backend import (
    default_devices,
    find_device,
    names,
    physical_of,
    require_logical,
    spec_of,
    type_of,
)
from mirror.devices.spec import SPELLINGS, DeviceSpec, LogicalDevice, PhysicalDevice

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

    Raises:
        ValueError: none, a repeated, an unknown device, devices of several types, or several parts
            of one GPU.
    """
    if devices is None:
        found = default_devices()
        _require_apart(found, "The default devices")
        return found
    if isinstance(devices, str | LogicalDevice | jax.Device):
        shown = str(devices) if isinstance(devices, jax.Device) else repr(devices)
        raise ValueError(
            f"devices={shown} is one device. Pass a list: MirroredStrategy([{shown}])."
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
    _require_apart(found, f"devices={asked!r}")
    if len({type_of(device) for device in found}) > 1:
        raise ValueError(
            f"devices={asked!r} are of several types: {names(found)}. All replicas must run on "
            "devices of one type."
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


def _require_apart(found: tuple[jax.Device, ...], asked: str) -> None:
    """Refuses several replicas on one GPU."""
    shared = {physical_of(device) for device in found if found.count(device) > 1}
    if shared:
        names_of = ", ".join(str(device and device.name) for device in shared)
        raise ValueError(
            f"{asked} are several logical devices on {names_of}. Several replicas on one GPU are "
            "not supported yet. Name one logical device of each, or do not split the GPU."
        )
