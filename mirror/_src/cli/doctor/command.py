"""`mirror doctor`."""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict

from mirror._src.cli.common import FAILED, Commands, add_command
from mirror._src.cli.doctor.check import Check, summary, worst
from mirror._src.cli.doctor.child import check_in_child
from mirror._src.cli.doctor.environment import check_environment
from mirror._src.cli.doctor.versions import check_versions
from mirror._src.cli.versions import installed_versions
from mirror._src.utils import interrupts

_TEXT = """\
Checks whether this machine and environment are ready for training. For each
problem, prints what it means and how to fix it:

  versions      Python, JAX, jaxlib, Flax, Optax, the CUDA plugin and the driver
  known faults  bugs of the installed jaxlib
  XLA_FLAGS     flags that crash the process, or that are expensive
  memory        variables that control how much GPU memory JAX allocates
  GPUs          GPUs that the driver reports, and whether JAX uses them
  host threads  size of the thread pool that the host devices share
  all-reduce    a known sum across all devices, with a deadline
  training      a step on all devices, compared with one device on the whole batch

Checks that may crash run in a subprocess. Run it in the environment of your
program, with the same XLA_FLAGS and CUDA_VISIBLE_DEVICES. Without a GPU it
creates 4 host devices, unless you have set their number.
"""
_END = """\
examples:
  mirror doctor
  mirror doctor --json | jq '.checks[] | select(.state != "ok")'
  XLA_FLAGS=--xla_force_host_platform_device_count=8 mirror doctor

exit status:
  0    no problems; there may be warnings
  1    a problem was found
  2    an option is invalid
  130  interrupted by Ctrl-C
"""


def add(commands: Commands) -> None:
    """Adds the command."""
    summary_line = "check versions, environment, devices and collectives; say how to fix problems"
    parser = add_command(commands, "doctor", run, summary_line, (_TEXT, _END))
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    versions, checks = installed_versions(), []
    for check in run_checks(versions):
        interrupts.check()
        checks.append(check)
        if not parsed.json:
            print(check, flush=True)
    state = worst(checks)
    if parsed.json:
        report = {"state": state, "versions": versions, "checks": list(map(asdict, checks))}
        print(json.dumps(report, indent=2))
    else:
        print(f"\n{summary(checks)}")
    return FAILED if state == "problem" else 0


def run_checks(versions: dict[str, str]) -> Iterator[Check]:
    """Runs all checks, and yields their results."""
    yield from check_versions(versions)
    yield from check_environment(os.environ)
    yield from check_in_child(os.environ)
