"""What only a started backend tells. Any of it may end the process, so it has one of its own."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import NamedTuple

import jax

from mirror._src.cli import devices as inventory
from mirror._src.cli.bench.named import make_named
from mirror._src.cli.doctor.check import Check, State
from mirror._src.cli.host_devices import force_host_devices
from mirror._src.devices import backend
from mirror._src.devices.collective_check import all_reduce_fault
from mirror._src.devices.jax_options import PLATFORMS, names_gpus
from mirror._src.devices.startup import starting
from mirror._src.strategy.mirrored import MirroredStrategy
from mirror._src.utils.errors import ReplicaMismatchError

NUM_HOST_DEVICES = 4
BACKEND, POOL, ALL_REDUCE, STEP = "JAX's backend", "host threads", "all-reduce", "training step"
_ALL_REDUCE_SECS = 30.0
_EXAMPLES_ON_EACH = 8
_RTOL = 1e-5
_NO_P2P = "export NCCL_P2P_DISABLE=1"


class BackendInfo(NamedTuple):
    """JAX's backend.

    Attributes:
        devices: the default ones.
        forced: whether the host devices among them were forced here.
        num_threads: how many threads all host devices share.
    """

    devices: tuple[jax.Device, ...]
    forced: bool
    num_threads: int


def main() -> None:
    """Prints for each probe its name as it begins, and its check as it ends, as JSON lines."""
    for line in run():
        print(json.dumps(line), flush=True)


def run() -> Iterator[dict[str, object]]:
    """The lines that `main` prints; the probes run while they are taken."""
    yield {"begins": BACKEND}
    try:
        started = start()
        for check in check_backend(started):
            yield asdict(check)
    except Exception as error:
        yield asdict(Check(BACKEND, "problem", _first_line(error), "", _START))
        return
    for name, probe in PROBES.items():
        yield {"begins": name}
        try:
            yield asdict(probe(started))
        except Exception as error:
            yield asdict(Check(name, "problem", f"fails: {_first_line(error)}", "", _REPORT))


def start() -> BackendInfo:
    """Starts the backend, as `mirror.MirroredStrategy()` would; without a GPU, on host devices."""
    fixed_by = force_host_devices(NUM_HOST_DEVICES)
    with starting():
        wide = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or ""
        devices = backend.default_devices()
    num_hosts = len(backend.devices_of_type("CPU"))
    num_threads = max(int(wide) if wide.isdecimal() else os.cpu_count() or 1, num_hosts)
    forced = fixed_by is None and backend.type_of(devices[0]) == "CPU"
    return BackendInfo(devices, forced, num_threads)


def check_backend(started: BackendInfo) -> Iterator[Check]:
    """Which devices there are, and whether a GPU is left unused."""
    how = " (forced for this check)" if started.forced else ""
    names = backend.names(started.devices)
    yield Check(BACKEND, "ok", f"starts, with {names}{how}")
    for note in inventory.inventory()["notes"]:
        found, _, fix = note.partition(". ")
        on_purpose = PLATFORMS.value is not None and not names_gpus(PLATFORMS.value)
        works = on_purpose or backend.type_of(started.devices[0]) == "GPU"
        state: State = "warning" if works else "problem"
        yield Check("GPUs", state, found, "", fix or "unset JAX_PLATFORMS")


def check_pool(started: BackendInfo) -> Check:
    """Whether the threads that all host devices share are as many as suit them."""
    count, threads = len(backend.devices_of_type("CPU")), started.num_threads
    devices = "one host device" if count == 1 else f"{count} host devices"
    suits = max(os.cpu_count() or 1, count)
    found = f"{threads} for {devices} on {os.cpu_count()} cores"
    if threads <= suits:
        return Check(POOL, "ok", found)
    return Check(
        POOL,
        "warning",
        f"{found}, because PJRT_NPROC or NPROC says so",
        "Each operation is split over all of them, which makes steps slower.",
        "unset NPROC PJRT_NPROC",
    )


def check_all_reduce(started: BackendInfo) -> Check:
    """A known sum among the devices."""
    devices = tuple(dict.fromkeys(started.devices))
    if len(devices) == 1:
        return Check(ALL_REDUCE, "ok", "one device, which needs no collectives")
    fault = all_reduce_fault(devices, _ALL_REDUCE_SECS)
    if fault is None:
        return Check(ALL_REDUCE, "ok", f"adds up right among {len(devices)} devices")
    on_gpu = backend.type_of(devices[0]) != "CPU"
    meaning = (
        "mirror reduces on the host instead, which is slower."
        if on_gpu
        else "A training step would fail or hang."
    )
    return Check(ALL_REDUCE, "problem", fault, meaning, _NO_P2P if on_gpu else _REPORT)


def check_step(started: BackendInfo) -> Check:
    """A training step on all replicas, against one device with the whole batch."""
    strategy = MirroredStrategy(started.devices)
    batch_size = _EXAMPLES_ON_EACH * strategy.num_replicas_in_sync
    with jax.default_matmul_precision("highest"):  # no TF32, which rounds by shape
        step, args = make_named("cnn", strategy, batch_size)
        try:
            report = strategy.verify(step, args, rtol=_RTOL)
        except ReplicaMismatchError as error:
            meaning = "Replicas compute something else than one device does."
            return Check(STEP, "problem", _first_line(error), meaning, _REPORT)
    return Check(
        STEP,
        "ok",
        f"{strategy.num_replicas_in_sync} replicas compute what one device does (largest relative "
        f"difference {report.largest:.1e})",
    )


PROBES: dict[str, Callable[[BackendInfo], Check]] = {
    POOL: check_pool,
    ALL_REDUCE: check_all_reduce,
    STEP: check_step,
}
_START = "export JAX_PLATFORMS=cpu always works; mirror devices shows what is configured."
_REPORT = "Report it with the output of mirror doctor --json."


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
