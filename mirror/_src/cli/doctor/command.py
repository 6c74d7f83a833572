"""`mirror doctor`."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict

from mirror._src.cli.doctor.check import COLORS, Check, summary, worst
from mirror._src.cli.doctor.child import check_in_child, inventory_in_child
from mirror._src.cli.doctor.environment import check_environment
from mirror._src.cli.doctor.report import format_report
from mirror._src.cli.doctor.versions import check_versions
from mirror._src.cli.versions import installed_versions
from mirror._src.utils import interrupts
from mirror._src.utils.terminal import paint
from mirror_cli.common import FAILED


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    versions, checks = installed_versions(), []
    prints_checks = not (parsed.json or parsed.report)
    if parsed.report:
        print("mirror doctor: collecting the report, some seconds", file=sys.stderr, flush=True)
    for check in run_checks(versions):
        interrupts.check()
        checks.append(check)
        if prints_checks:
            print(check.colored, flush=True)
    state = worst(checks)
    if parsed.report:
        devices = inventory_in_child(os.environ)
        print(format_report(versions, devices, checks, os.environ))
    elif parsed.json:
        report = {"state": state, "versions": versions, "checks": list(map(asdict, checks))}
        print(json.dumps(report, indent=2))
    else:
        print(f"\n{paint(summary(checks), COLORS[state])}")
    return FAILED if state == "problem" else 0


def run_checks(versions: dict[str, str]) -> Iterator[Check]:
    """Runs all checks, and yields their results."""
    yield from check_versions(versions)
    yield from check_environment(os.environ)
    yield from check_in_child(os.environ)
