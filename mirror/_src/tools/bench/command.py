"""`mirror bench`."""

import argparse
import json
import sys

import jax

from mirror._src.base import interrupts
from mirror._src.base.errors import counted
from mirror._src.devices import backend
from mirror._src.strategy.mirrored import MirroredStrategy
from mirror._src.tools.bench.measure import Candidate, measure
from mirror._src.tools.bench.scaling import Scaling
from mirror._src.tools.bench.workload import MakeWorkload, WorkloadError, workload_of
from mirror._src.tools.common import print_report, report_step_failure, require_writable
from mirror._src.tools.host_devices import (
    HOST_COUNTS,
    NUM_HOST_DEVICES,
    force_host_devices,
    too_few_devices,
)
from mirror._src.tools.options import USAGE_ERROR, OptionError, report_error


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        if parsed.plot is not None:
            require_writable(parsed.plot)
        devices, counts = _devices(parsed.devices)
        make = workload_of(parsed.step, parsed.batch_size, parsed.weak)
        scaling = _measure(parsed, make, devices, counts)
    except (OptionError, WorkloadError) as error:
        return report_error("bench", str(error), USAGE_ERROR)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "matplotlib":
            return report_error("bench", str(error), USAGE_ERROR)
        return report_step_failure("bench", parsed.step, error)
    if parsed.json:
        print(json.dumps(scaling.to_dict(), indent=2))
    else:
        print_report(str(scaling))
    if parsed.plot is not None:
        scaling.plot(parsed.plot)
        print(f"picture: {parsed.plot}", file=sys.stderr)
    return 0


def _measure(
    parsed: argparse.Namespace,
    make: MakeWorkload,
    devices: tuple[jax.Device, ...],
    counts: tuple[int, ...],
) -> Scaling:
    candidates = []
    for count in counts:
        interrupts.check()
        on = counted(count, "device")
        print(f"compiling {parsed.step} for {on}", file=sys.stderr, flush=True)
        strategy = MirroredStrategy(devices[:count])
        candidates.append(Candidate(strategy, make(strategy)))
        candidates[-1].warm_up()
    print("measuring and explaining the step", file=sys.stderr, flush=True)
    return measure(parsed.step, candidates, parsed.steps, parsed.weak)


def _devices(wanted: tuple[int, ...] | None) -> tuple[tuple[jax.Device, ...], tuple[int, ...]]:
    """Returns the available devices, and the numbers of devices to measure on.

    Raises:
        OptionError: If there are not enough devices.
    """
    most = max(wanted or HOST_COUNTS)
    fixed_by = force_host_devices(most)
    devices = backend.default_devices()
    if wanted is None:
        powers = (2**k for k in range(len(devices).bit_length()))
        counts = tuple(sorted({*powers, len(devices)}))
        on_host = backend.type_of(devices[0]) == "CPU"
        return devices, tuple(n for n in counts if n <= NUM_HOST_DEVICES) if on_host else counts
    if most > len(devices):
        raise too_few_devices("bench", ",".join(map(str, wanted)), devices, fixed_by)
    return devices, wanted
