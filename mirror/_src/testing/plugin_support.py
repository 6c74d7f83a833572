"""The part of the pytest plugin that needs JAX: host devices, strategies, launches in flight."""

import os
from collections.abc import Sequence

import jax

from mirror._src.collectives.one_device import ReductionToOneDevice
from mirror._src.devices import backend, launch
from mirror._src.devices.jax_options import HOST_DEVICES
from mirror._src.devices.startup import (
    HOST_DEVICES_FLAG,
    forced_host_devices,
    started,
    startup_cause,
)
from mirror._src.strategy.mirrored import MirroredStrategy


def force_host_devices(count: int, asked_by: str) -> None:
    """Makes JAX start with so many host devices; what the user has set is left as it is.

    Args:
        count: how many.
        asked_by: who asks, for messages.

    Raises:
        RuntimeError: somebody has said another number, or JAX's backend has started.
    """
    known, forced = HOST_DEVICES.value, forced_host_devices()
    number = forced if known is None else known  # JAX's own option wins over XLA's flag
    if number == count:
        return
    if number is not None:
        who = f"XLA_FLAGS={HOST_DEVICES_FLAG}={forced}" if known is None else _who_says(known)
        raise RuntimeError(
            f"{asked_by} asks for {count} host devices, and {who} says {number}, which is left as "
            "it is. Take one of the two out, or let them say the same number."
        )
    if started():
        raise RuntimeError(
            f"{asked_by} comes too late: JAX's backend has started, which fixes the number of host "
            f"devices. {startup_cause()} Use JAX in fixtures and tests, not while conftest.py is "
            f"imported, or set JAX_NUM_CPU_DEVICES={count} before Python starts."
        )
    jax.config.update("jax_num_cpu_devices", count)


def _who_says(number: int) -> str:
    if os.environ.get("JAX_NUM_CPU_DEVICES") == str(number):
        return f"JAX_NUM_CPU_DEVICES={number}"
    return f"{HOST_DEVICES}, which was set in code (a conftest.py, say),"


def devices_for_tests(*, on_host: bool) -> tuple[jax.Device, ...]:
    """The distinct devices that tests run on. Starts JAX's backend.

    Args:
        on_host: host devices, also where there are accelerators.
    """
    found = backend.devices_of_type("CPU") if on_host else backend.default_devices()
    return tuple(dict.fromkeys(found))


def make_strategy(
    executor: str, num_replicas: int | None, devices: Sequence[jax.Device]
) -> MirroredStrategy:
    """A strategy that runs on so many replicas, by that executor.

    Args:
        executor: `"pmap"`, `"vmap"`, which needs one device, or `"staged"`.
        num_replicas: `None`: as many as there are devices.
        devices: at least as many as replicas, for the others.
    """
    n = len(devices) if num_replicas is None else num_replicas
    if executor == "vmap":
        return MirroredStrategy(devices[:1], replicas_per_device=n)
    return MirroredStrategy(devices[:n], ReductionToOneDevice() if executor == "staged" else None)


def launches_under_way() -> list[str]:
    """A line for each launch on host devices that has not ended, oldest first; waits for none."""
    lines = []
    for token in launch.under_way():
        parts = [(shard.device, shard.data.is_ready()) for shard in token.addressable_shards]
        ended = [device for device, ready in parts if ready]
        waiting = [device for device, ready in parts if not ready]
        if waiting:
            also = f", ended on {backend.names(ended)}" if ended else ", ended on no device"
            lines.append(f"under way on {backend.names(waiting)}{also}")
    return lines
