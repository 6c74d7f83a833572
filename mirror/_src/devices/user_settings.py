"""What the user has set outside mirror, and which setting wins where the two differ."""

import logging
from collections.abc import Sequence

from mirror._src.devices import state
from mirror._src.devices.jax_options import HOST_DEVICES, PLATFORMS, VISIBLE_GPUS, names_gpus
from mirror._src.devices.names import PhysicalDevice
from mirror._src.devices.startup import HOST_DEVICES_FLAG, forced_host_devices

_logger = logging.getLogger("mirror")


def require_within_users(
    every: Sequence[PhysicalDevice], visible: Sequence[PhysicalDevice]
) -> None:
    """Says what wins where the user has chosen GPUs or platforms by other means.

    Raises:
        RuntimeError: the user's choice leaves out what is asked for.
    """
    allowed = [every[i] for i in state.ordinals_of_user(len(every))]
    hidden = [gpu.name for gpu in visible if gpu not in allowed]
    if hidden:
        raise RuntimeError(
            f"{VISIBLE_GPUS} is set, and leaves out {', '.join(hidden)}. Take it back, or choose "
            f"among {', '.join(gpu.name for gpu in allowed) or 'none'}."
        )
    platforms = PLATFORMS.of_user
    on_gpu = platforms is None or names_gpus(platforms)
    if visible and not on_gpu:
        _logger.warning("%s is set, and wins: JAX has no GPU.", PLATFORMS)
    elif visible and len(visible) < len(allowed) < len(every):
        _logger.warning(
            "%s is set, and wins: JAX has those GPUs; mirror uses %s of them.",
            VISIBLE_GPUS,
            ", ".join(gpu.name for gpu in visible),
        )
    elif not visible and platforms is not None and on_gpu:
        _logger.warning("%s is set, and wins: JAX has GPUs; mirror uses none.", PLATFORMS)


def require_host_devices(count: int) -> None:
    """Says what wins where the user has forced host devices by other means.

    Raises:
        RuntimeError: there are fewer than are asked for.
    """
    found = host_devices_of_user()
    if found is None:
        return
    forced, by = found
    if forced < count:
        raise RuntimeError(
            f"{by} is set, and wins: there are {forced} host devices, fewer than the {count} asked "
            f"for. Take it back, or split the CPU in {forced}."
        )
    if forced > count:
        _logger.warning(
            "%s is set, and wins: JAX has %d host devices; mirror uses the first %d.",
            by,
            forced,
            count,
        )


def host_devices_of_user() -> tuple[int, str] | None:
    """How many host devices the user has forced by other means, and by which; the option wins."""
    if HOST_DEVICES.of_user is not None:
        return HOST_DEVICES.of_user, str(HOST_DEVICES)
    flags = forced_host_devices()
    if flags is None or HOST_DEVICES.value is not None:
        return None
    return flags, f"XLA_FLAGS={HOST_DEVICES_FLAG}={flags}"
