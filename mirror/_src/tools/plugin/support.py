"""Parts of the pytest plugin that need JAX: host devices, strategies, launches in flight."""

import contextlib
from collections.abc import Iterator, Sequence

import jax

from mirror._src.devices import backend, jax_options, launches
from mirror._src.devices.backend import startup_cause
from mirror._src.engine.all_reduce import ReductionToOneDevice
from mirror._src.inspection.stall_report import state_of_launches as state_of_launches
from mirror._src.strategy.mirrored import MirroredStrategy


def force_host_devices(count: int, requested_by: str) -> None:
    """Makes JAX start with `count` host devices. Never overwrites a number set by the user.

    Args:
        count: Number of host devices.
        requested_by: The option that requests them, for messages.

    Raises:
        RuntimeError: If another number is set, or JAX's backend has started.
    """
    fixed = jax_options.fixed_host_devices()
    if fixed is None and jax_options.force_host_devices(count) is not None:
        raise RuntimeError(
            f"{requested_by} has no effect because JAX's backend has started. {startup_cause()} "
            "Use JAX in fixtures and tests, not while conftest.py is imported, or set "
            f"JAX_NUM_CPU_DEVICES={count} before Python starts."
        )
    if fixed is not None and fixed[0] != count:
        number, fixed_by = fixed
        if fixed_by.startswith("jax_"):
            fixed_by += " (set in code, for example in a conftest.py)"
        message = jax_options.describe_conflict(count, number, fixed_by, f"request {number}")
        raise RuntimeError(f"{requested_by}: {message}")


def devices_for_tests(*, on_host: bool) -> tuple[jax.Device, ...]:
    """Returns the distinct devices that tests run on. Starts JAX's backend.

    Args:
        on_host: Whether to use host devices even if there are accelerators.
    """
    devices = backend.devices_of_type("CPU") if on_host else backend.default_devices()
    return tuple(dict.fromkeys(devices))


def make_strategy(
    executor: str, num_replicas: int | None, devices: Sequence[jax.Device]
) -> MirroredStrategy:
    """Returns a strategy with the given number of replicas and the given executor.

    Args:
        executor: `"pmap"`, `"vmap"` or `"staged"`.
        num_replicas: Number of replicas. Defaults to the number of devices.
        devices: Available devices: one for `"vmap"`, otherwise one per replica.
    """
    n = len(devices) if num_replicas is None else num_replicas
    if executor == "vmap":
        return MirroredStrategy(devices[:1], replicas_per_device=n)
    return MirroredStrategy(devices[:n], ReductionToOneDevice() if executor == "staged" else None)


@contextlib.contextmanager
def logged_launches() -> Iterator[None]:
    """Context manager that logs launches, for `state_of_launches`."""
    launches.start_log()
    try:
        yield
    finally:
        launches.stop_log()
