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
from mirror._src.cli.doctor.versions import check_versions, installed
from mirror._src.utils import interrupts

_TEXT = """\
Examines whether this machine, with this environment, is fit for training, and
says for each thing that is not what it means and which line mends it:

  versions      Python, JAX, jaxlib, Flax, Optax, the CUDA plugin and the driver
  known faults  of the jaxlib there is
  XLA_FLAGS     flags that end the process, or cost something
  memory        the variables that say how much of a GPU's memory JAX takes
  GPUs          what the driver shows, and whether JAX uses it
  host threads  whether the host devices have enough of them to meet
  all-reduce    a known sum among all devices, with a deadline
  training      a step on all devices, against one device with the whole batch

What may end a process runs in one of its own. Try it with the environment of
your program, XLA_FLAGS and CUDA_VISIBLE_DEVICES among it. Where there is no GPU
and you forced no host devices, it forces 4.
"""
_END = """\
examples:
  mirror doctor
  mirror doctor --json | jq '.checks[] | select(.state != "ok")'
  XLA_FLAGS=--xla_force_host_platform_device_count=8 mirror doctor

exit status:
  0    no problem; perhaps warnings
  1    a problem was found
  2    an option is wrong
  130  Ctrl-C
"""


def add(commands: Commands) -> None:
    """Adds the command."""
    summary_line = "examine versions, environment, devices and collectives; say what to do"
    parser = add_command(commands, "doctor", run, summary_line, (_TEXT, _END))
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    versions, checks = installed(), []
    for check in examine(versions):
        interrupts.check()
        checks.append(check)
        if not parsed.json:
            print(check, flush=True)
    state = worst(checks)
    if parsed.json:
        found = {"state": state, "versions": versions, "checks": list(map(asdict, checks))}
        print(json.dumps(found, indent=2))
    else:
        print(f"\n{summary(checks)}")
    return FAILED if state == "problem" else 0


def examine(versions: dict[str, str]) -> Iterator[Check]:
    """All checks, one after the other."""
    yield from check_versions(versions)
    yield from check_environment(os.environ)
    yield from check_in_child(os.environ)
