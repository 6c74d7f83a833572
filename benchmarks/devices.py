"""The devices that this process measures: host devices or, for the suite `gpu`, JAX's default ones.

Does not import mirror.
"""

import jax

_on_host = True


def use_default() -> None:
    """Measures JAX's default devices: GPUs, or the CPU if JAX has no GPU."""
    global _on_host
    _on_host = False


def is_on_host() -> bool:
    """Whether the suite measures host devices."""
    return _on_host


def first_devices(num_devices: int) -> list[jax.Device]:
    """Returns the first devices.

    Raises:
        RuntimeError: If there are fewer than `num_devices`.
    """
    devices = jax.devices("cpu" if _on_host else None)
    if len(devices) < num_devices:
        kind = "host devices" if _on_host else "devices"
        raise RuntimeError(f"{num_devices} {kind} requested, {len(devices)} exist.")
    return devices[:num_devices]


def names_of(num_devices: int) -> list[str] | int:
    """Returns the first devices as an argument of `MirroredStrategy`, without starting JAX."""
    return [f"/cpu:{i}" for i in range(num_devices)] if _on_host else num_devices
