"""`mirror estimate-memory`."""

import argparse
import json
import sys

from mirror._src.cli.bench.workload import WorkloadError, workload_of
from mirror._src.cli.common import print_report, report_step_failure
from mirror._src.cli.estimate.estimate import Estimate, estimate_row
from mirror._src.cli.host_devices import HOST_COUNTS, force_host_devices, too_few_devices
from mirror._src.collectives.all_reduce import AllReduce
from mirror._src.devices import backend
from mirror._src.strategy.mirrored import MirroredStrategy
from mirror._src.utils import interrupts
from mirror._src.utils.errors import counted
from mirror_cli.common import USAGE_ERROR, OptionError, report_error


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        strategies = _strategies(
            parsed.devices, parsed.replicas_per_device, shard_update=parsed.shard_update
        )
        make = workload_of(parsed.step, parsed.batch_size, parsed.weak)
        rows = []
        for strategy in strategies:
            interrupts.check()
            on = counted(len(dict.fromkeys(strategy.devices)), "device")
            print(f"compiling {parsed.step} for {on}", file=sys.stderr, flush=True)
            rows.append(estimate_row(parsed.step, make, strategy, parsed.donate))
    except (OptionError, WorkloadError) as error:
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
    wanted: tuple[int, ...] | None, replicas_per_device: int, *, shard_update: bool
) -> list[MirroredStrategy]:
    """Returns a strategy per number of devices, on accelerators if there are enough, else on CPUs.

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
    # The default cross-device ops would run a test of the all-reduce on accelerators.
    return [
        MirroredStrategy(
            (devices if count <= len(devices) else host)[:count],
            AllReduce(),
            replicas_per_device=replicas_per_device,
            shard_update=shard_update,
        )
        for count in wanted
    ]
