"""Settings that the user made outside `mirror.config`, and which setting takes precedence."""

import logging
from collections.abc import Sequence

from mirror._src.devices import state
from mirror._src.devices.host_devices import describe_conflict, fixed_host_devices
from mirror._src.devices.jax_options import HOST_DEVICES, PLATFORMS, VISIBLE_GPUS, names_gpus
from mirror._src.devices.names import PhysicalDevice

_logger = logging.getLogger("mirror")


def require_within_users(gpus: Sequence[PhysicalDevice], visible: Sequence[PhysicalDevice]) -> None:
    """Checks the visible GPUs against the user's own choice of GPUs and platforms.

    Raises:
        RuntimeError: If the user's choice excludes a GPU in `visible`.
    """
    allowed = [gpus[i] for i in state.ordinals_of_user(len(gpus))]
    hidden = [gpu.name for gpu in visible if gpu not in allowed]
    if hidden:
        raise RuntimeError(
            f"{', '.join(hidden)} cannot be made visible: {VISIBLE_GPUS} takes precedence. Unset "
            f"it, or choose among {', '.join(gpu.name for gpu in allowed) or 'no GPUs'}."
        )
    platforms = PLATFORMS.of_user
    allows_gpus = platforms is None or names_gpus(platforms)
    if visible and not allows_gpus:
        _logger.warning("%s takes precedence: JAX uses no GPU.", PLATFORMS)
    elif visible and len(visible) < len(allowed) < len(gpus):
        _logger.warning(
            "%s takes precedence: JAX uses these GPUs; mirror uses %s of them.",
            VISIBLE_GPUS,
            ", ".join(gpu.name for gpu in visible),
        )
    elif not visible and platforms is not None and allows_gpus:
        _logger.warning("%s takes precedence: JAX uses GPUs; mirror uses none.", PLATFORMS)


def require_host_devices(count: int) -> None:
    """Checks that the user's own number of host devices is at least `count`.

    Raises:
        RuntimeError: If the user has set fewer.
    """
    fixed = host_devices_of_user()
    if fixed is None:
        return
    fixed_count, fixed_by = fixed
    if fixed_count < count:
        fix = f"split the CPU into {fixed_count}"
        raise RuntimeError(describe_conflict(count, fixed_count, fixed_by, fix))
    if fixed_count > count:
        _logger.warning(
            "%s takes precedence: JAX has %d host devices; mirror uses the first %d.",
            fixed_by,
            fixed_count,
            count,
        )


def host_devices_of_user() -> tuple[int, str] | None:
    """Returns the number of host devices that the user set, and the setting; None if not set."""
    is_set_by_mirror = HOST_DEVICES.value is not None and HOST_DEVICES.of_user is None
    return None if is_set_by_mirror else fixed_host_devices()
