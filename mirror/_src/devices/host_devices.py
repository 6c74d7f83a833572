"""The number of host devices: the setting that fixes it, and creating more before JAX starts."""

import os
import re

import jax

from mirror._src.devices.jax_options import HOST_DEVICES

HOST_DEVICES_FLAG = "--xla_force_host_platform_device_count"


def host_devices_of_flags() -> int | None:
    """Returns the number of host devices in `XLA_FLAGS`; as in XLA, the last flag counts."""
    counts = re.findall(rf"{HOST_DEVICES_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else None


def fixed_host_devices() -> tuple[int, str] | None:
    """Returns the number of host devices and the setting that fixes it, or None.

    The option of JAX takes precedence over the flag of XLA.
    """
    count = HOST_DEVICES.value
    if count is not None:
        is_environment = os.environ.get("JAX_NUM_CPU_DEVICES") == str(count)
        return count, f"JAX_NUM_CPU_DEVICES={count}" if is_environment else str(HOST_DEVICES)
    count = host_devices_of_flags()
    return None if count is None else (count, f"XLA_FLAGS={HOST_DEVICES_FLAG}={count}")


def force_host_devices(count: int) -> str | None:
    """Creates host devices, unless their number is fixed.

    Call it before JAX's backend starts, because the number of host devices cannot change
    afterwards. Only a started backend knows whether there are GPUs, so host devices are created on
    machines with GPUs too, where the GPUs remain the default devices.

    Returns:
        What fixes their number, or None if `count` host devices were created.
    """
    fixed = fixed_host_devices()
    if fixed is not None:
        return fixed[1]
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return "a JAX backend that was already running"
    return None


def describe_conflict(count: int, fixed_count: int, fixed_by: str, fix: str) -> str:
    """Returns the message for a number of host devices that contradicts the fixed number."""
    return (
        f"Cannot create {count} host devices: {fixed_by} takes precedence and sets {fixed_count}. "
        f"Unset it, or {fix}."
    )
