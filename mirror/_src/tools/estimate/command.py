"""`mirror estimate-memory`."""

import argparse
import json
import sys

import jax

from mirror._src.base import interrupts
from mirror._src.base.errors import counted
from mirror._src.base.types import Shard
from mirror._src.devices import backend, startup
from mirror._src.devices.described import GpuCompilerError, described_gpus
from mirror._src.engine.all_reduce import AllReduce
from mirror._src.strategy.mirrored import MirroredStrategy
from mirror._src.tools.bench.workload import WorkloadError, workload_of
from mirror._src.tools.common import print_report, report_step_failure
from mirror._src.tools.estimate.estimate import Estimate, estimate_row
from mirror._src.tools.host_devices import HOST_COUNTS, force_host_devices, too_few_devices
from mirror._src.tools.options import USAGE_ERROR, OptionError, report_error

_GPU_COUNTS = (1, 8)


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        strategies = _strategies(
            parsed.devices,
            parsed.replicas_per_device,
            shard=parsed.shard,
            gpu=parsed.gpu,
        )
        make = workload_of(parsed.step, parsed.batch_size, parsed.weak)
        rows = []
        for strategy in strategies:
            interrupts.check()
            kind = f"{parsed.gpu} GPU" if parsed.gpu else "device"
            on = counted(len(dict.fromkeys(strategy.devices)), kind)
            print(f"compiling {parsed.step} for {on}", file=sys.stderr, flush=True)
            rows.append(estimate_row(parsed.step, make, strategy, parsed.donate))
    except (OptionError, WorkloadError, GpuCompilerError) as error:
        return report_error("estimate-memory", str(error), USAGE_ERROR)
    except Exception as error:
        return report_step_failure("estimate-memory", parsed.step, error)
    estimate = Estimate(parsed.step, parsed.weak, tuple(rows))
    if parsed.json:
        print(json.dumps(estimate.to_dict(), indent=2))
    else:
        print_report(str(estimate))
    return 0


def _strategies(
    wanted: tuple[int, ...] | None,
    replicas_per_device: int,
    *,
    shard: Shard,
    gpu: str | None = None,
) -> list[MirroredStrategy]:
    """Returns a strategy per number of devices.

    Raises:
        OptionError: If there are not enough host devices because their number is fixed.
        GpuCompilerError: If this machine cannot compile for the model `gpu`.
    """
    # The default cross-device ops would run a test of the all-reduce on accelerators.
    return [
        MirroredStrategy(
            devices,
            AllReduce(),
            replicas_per_device=replicas_per_device,
            shard=shard,
        )
        for devices in (_found(wanted) if gpu is None else _described(gpu, wanted))
    ]


def _described(gpu: str, wanted: tuple[int, ...] | None) -> list[tuple[jax.Device, ...]]:
    """Returns the devices per number of GPUs of a model, which need not exist.

    Raises:
        GpuCompilerError: If this machine cannot compile for the model.
    """
    if not startup.started():  # JAX would start the real GPUs, or log an error
        jax.config.update("jax_platforms", "cpu")
    return [described_gpus(gpu, count) for count in wanted or _GPU_COUNTS]


def _found(wanted: tuple[int, ...] | None) -> list[tuple[jax.Device, ...]]:
    """Returns the devices per number of devices: accelerators if there are enough, else CPUs.

    Raises:
        OptionError: If there are not enough host devices because their number is fixed.
    """
    fixed_by = force_host_devices(max(wanted or HOST_COUNTS))
    devices = backend.default_devices()
    if wanted is None:
        is_on_host = backend.type_of(devices[0]) == "CPU"
        wanted = HOST_COUNTS if is_on_host else tuple(sorted({1, len(devices)}))
        wanted = tuple(count for count in wanted if count <= len(devices))
    host = backend.devices_of_type("CPU")
    if max(wanted) > max(len(devices), len(host)):
        raise too_few_devices("estimate-memory", ",".join(map(str, wanted)), host, fixed_by)
    return [(devices if count <= len(devices) else host)[:count] for count in wanted]
