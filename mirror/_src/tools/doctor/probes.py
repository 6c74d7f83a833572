"""Checks that start JAX's backend. Any of them may crash, so they run in a subprocess."""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from mirror._src.base.errors import VerifyError, counted, first_line
from mirror._src.devices import backend
from mirror._src.devices.device_checks import all_reduce_fault, p2p_settings
from mirror._src.devices.jax_options import PLATFORMS, names_gpus
from mirror._src.devices.settings import get_num_cpu_threads
from mirror._src.strategy.mirrored import MirroredStrategy
from mirror._src.tools import devices as inventory
from mirror._src.tools.builtin_steps import make_builtin_step
from mirror._src.tools.common import NUM_HOST_DEVICES, force_host_devices
from mirror._src.tools.doctor.check import Check, Problem, State, run_steps

BACKEND, POOL, ALL_REDUCE, STEP = "JAX's backend", "host threads", "all-reduce", "training step"
_ALL_REDUCE_SECS = 30.0
_EXAMPLES_PER_REPLICA = 8
_RTOL = 1e-5


class BackendInfo(NamedTuple):
    """The started backend of JAX.

    Attributes:
        devices: The default devices.
        forced: Whether they are host devices that this check created.
    """

    devices: tuple[jax.Device, ...]
    forced: bool


def run(secs: float = 0.0) -> Iterator[dict[str, Any]]:
    """Runs the probes; yields the lines of `run_steps`. None of them waits for other processes."""
    del secs
    yield from run_steps(_steps())


def _steps() -> Iterator[tuple[str, Callable[[], Check | Iterable[Check]]]]:
    started: list[BackendInfo] = []

    def begin() -> Iterable[Check]:
        try:
            started.append(start())
            return list(check_backend(started[0]))
        except Exception as error:
            raise Problem(Check(BACKEND, "problem", first_line(error), "", _START)) from error

    yield BACKEND, begin
    for name, probe in PROBES.items():
        yield name, functools.partial(probe, started[0])


def start() -> BackendInfo:
    """Starts the backend as `mirror.MirroredStrategy()` does; without a GPU, on host devices."""
    fixed_by = force_host_devices(NUM_HOST_DEVICES)
    devices = backend.default_devices()
    return BackendInfo(devices, fixed_by is None and _on_host(devices))


def check_backend(info: BackendInfo) -> Iterator[Check]:
    """Reports the devices, and GPUs that JAX does not use."""
    how = " (created for this check)" if info.forced else ""
    names = backend.names(info.devices)
    yield Check(BACKEND, "ok", f"started with {names}{how}")
    for note in inventory.inventory()["notes"]:
        finding, _, fix = note.partition(". ")
        is_intended = PLATFORMS.value is not None and not names_gpus(PLATFORMS.value)
        is_usable = is_intended or backend.type_of(info.devices[0]) == "GPU"
        state: State = "warning" if is_usable else "problem"
        yield Check("GPUs", state, finding, "", fix or "unset JAX_PLATFORMS")


def check_pool(info: BackendInfo) -> Check:
    """Checks that the thread pool of the host devices is not wider than useful."""
    count, threads = len(backend.devices_of_type("CPU")), get_num_cpu_threads()
    users = f" for {counted(count, 'host device')}" if _on_host(info.devices) else ""
    finding = f"{threads}{users} on {os.cpu_count()} cores"
    if threads <= max(os.cpu_count() or 1, count):
        return Check(POOL, "ok", finding)
    return Check(
        POOL,
        "warning",
        f"{finding}, set by PJRT_NPROC or NPROC",
        "Every operation is split across all threads, which makes steps slower.",
        "unset NPROC PJRT_NPROC",
    )


def check_all_reduce(info: BackendInfo) -> Check:
    """Computes a known sum across the devices."""
    devices = tuple(dict.fromkeys(info.devices))
    if len(devices) == 1:
        return Check(ALL_REDUCE, "ok", "a single device, which needs no collectives")
    fault = all_reduce_fault(devices, _ALL_REDUCE_SECS)
    if fault is None:
        return Check(ALL_REDUCE, "ok", f"correct across {len(devices)} devices")
    on_host = _on_host(devices)
    meaning = (
        "A training step would fail or hang."
        if on_host
        else "mirror falls back to reduction on the host, which is slower."
    )
    no_p2p = f"export {' '.join(p2p_settings())}"
    return Check(ALL_REDUCE, "problem", fault, meaning, _REPORT if on_host else no_p2p)


def check_step(info: BackendInfo) -> Check:
    """Compares a training step on all replicas with one device on the whole batch."""
    strategy = MirroredStrategy(info.devices)
    batch_size = _EXAMPLES_PER_REPLICA * strategy.num_replicas_in_sync
    step, args = make_builtin_step("cnn", strategy, batch_size)
    try:
        report = strategy.verify(step, args, rtol=_RTOL)
    except VerifyError as error:
        meaning = "The replicas and one device compute different results."
        return Check(STEP, "problem", first_line(error), meaning, _REPORT)
    return Check(
        STEP,
        "ok",
        f"{counted(strategy.num_replicas_in_sync, 'replica')} and one device compute the same "
        f"(largest relative difference {report.largest:.1e})",
    )


def _on_host(devices: Sequence[jax.Device]) -> bool:
    return backend.type_of(devices[0]) == "CPU"


PROBES: dict[str, Callable[[BackendInfo], Check]] = {
    POOL: check_pool,
    ALL_REDUCE: check_all_reduce,
    STEP: check_step,
}
_START = "export JAX_PLATFORMS=cpu always works; mirror devices lists the settings."
_REPORT = "Report it with the output of mirror doctor --report."
