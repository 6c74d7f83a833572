"""The memory of a device, and of the machine."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mirror._src.devices import backend
from mirror._src.devices.resolve import DeviceLike, canonicalize_device

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int | None:
    """Returns the bytes of memory of the machine, or of the container; `None` if unknown."""
    limits = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not on Windows
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for file in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max"
            limits.append(int(Path(file).read_text(encoding="utf-8")))
    return min(limits, default=None)


_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"


def get_memory_info(device: DeviceLike) -> dict[str, int]:
    """Returns the memory that JAX has allocated on a device. Starts JAX's backend.

    Logical devices on one GPU share its memory and report the same numbers. JAX cannot reset the
    peak.

    Args:
        device: A name such as `"GPU:0"`, a `LogicalDevice`, or a `jax.Device`.

    Returns:
        A dict with the bytes allocated (`"current"`), the maximum since the start (`"peak"`), and
        the number of bytes that JAX may allocate (`"limit"`).

    Raises:
        ValueError: If the device does not report memory statistics (the CPU does not), or the name
            is not a device name.
        InvalidDeviceError: If the device does not exist.

    >>> peaks = [get_memory_info(gpu)["peak"] for gpu in mirror.config.list_logical_devices("GPU")]
    """
    jax_device = canonicalize_device(device)
    info = memory_info(jax_device.memory_stats())
    if info is None:
        why = "; only accelerators do. "
        if backend.type_of(jax_device) != "CPU":
            allocator = os.environ.get(_ALLOCATOR)
            cause = f", with {_ALLOCATOR}={allocator}" if allocator else ""
            why = f"{cause}. JAX's default allocator does: unset {_ALLOCATOR}. "
        raise ValueError(
            f"{backend.logical_name(jax_device)} does not report memory statistics{why}To list the "
            "arrays on it, use mirror.debugging.visualize_placement(tree)."
        )
    return info


def memory_info(stats: Mapping[str, Any] | None) -> dict[str, int] | None:
    """Renames JAX's statistics for `get_memory_info`; returns None without statistics."""
    if not stats or "bytes_limit" not in stats:
        return None
    current = stats["bytes_in_use"]
    return {
        "current": current,
        "peak": stats.get("peak_bytes_in_use", current),
        "limit": stats["bytes_limit"],
    }
