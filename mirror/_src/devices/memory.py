"""How much memory a device has, and how much of it is taken."""

from collections.abc import Mapping
from typing import Any

from mirror._src.devices.backend import logical_name
from mirror._src.devices.resolve import DeviceLike, canonicalize_device


def get_memory_info(device: DeviceLike) -> dict[str, int]:
    """What JAX has allocated on a device. Starts JAX's backend.

    Parts of one GPU share its memory, and so have the same figures. JAX cannot reset the peak.

    Args:
        device: a name such as `"GPU:0"`, a `LogicalDevice` or a `jax.Device`.

    Returns:
        In bytes `"current"`, `"peak"` since the start, and `"limit"`: what JAX may allocate.

    Raises:
        ValueError: the device keeps no such figures, as the CPU; or no device name.
        InvalidDeviceError: there is no such device.

    >>> peaks = [get_memory_info(gpu)["peak"] for gpu in mirror.config.list_logical_devices("GPU")]
    """
    found = canonicalize_device(device)
    info = memory_info(found.memory_stats())
    if info is None:
        raise ValueError(
            f"{logical_name(found)} keeps no figures of its memory; GPUs do. For the arrays on "
            "it, print mirror.debugging.visualize_placement(tree)."
        )
    return info


def memory_info(stats: Mapping[str, Any] | None) -> dict[str, int] | None:
    """JAX's figures of a device under the names of `get_memory_info`; `None` where it has none."""
    if not stats or "bytes_limit" not in stats:
        return None
    current = stats["bytes_in_use"]
    return {
        "current": current,
        "peak": stats.get("peak_bytes_in_use", current),
        "limit": stats["bytes_limit"],
    }
