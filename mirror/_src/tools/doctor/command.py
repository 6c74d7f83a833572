"""`mirror doctor`."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

from mirror._src.base import interrupts
from mirror._src.base.terminal import paint
from mirror._src.tools.doctor.check import COLORS, Check, summary, worst
from mirror._src.tools.doctor.child import (
    check_in_child,
    check_others_in_child,
    inventory_in_child,
)
from mirror._src.tools.doctor.environment import check_environment
from mirror._src.tools.doctor.report import format_report
from mirror._src.tools.doctor.versions import check_versions
from mirror._src.tools.options import FAILED, USAGE_ERROR, report_error
from mirror._src.tools.versions import installed_versions

DEADLINE_SECS = 60  # as `commands.toml` says
_PRINT_SECS = 1.0


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    if parsed.deadline is not None and not (parsed.distributed or parsed.ray):
        message = "--deadline is the time to wait for others. Add --distributed or --ray."
        return report_error("doctor", message, USAGE_ERROR)
    versions, checks = installed_versions(), []
    prints_checks = not (parsed.json or parsed.report)
    if parsed.report:
        print("mirror doctor: collecting the report, some seconds", file=sys.stderr, flush=True)
    others = "distributed" if parsed.distributed else "ray_nodes" if parsed.ray else None
    for check in run_checks(versions, others, parsed.deadline or DEADLINE_SECS):
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
    if state != "problem":
        return 0
    if parsed.distributed:
        # mirror launch ends all processes when one has failed; the others print the problem, too.
        sys.stdout.flush()
        time.sleep(_PRINT_SECS)
    return FAILED


def run_checks(
    versions: dict[str, str], others: str | None = None, secs: float = DEADLINE_SECS
) -> Iterator[Check]:
    """Runs all checks, and yields their results.

    Args:
        versions: The installed versions by name.
        others: The module that checks a job of several processes, or Ray; None checks this process.
        secs: How long to wait for the others in each check.
    """
    yield from check_versions(versions)
    yield from check_environment(os.environ)
    if others is None:
        yield from check_in_child(os.environ)
    else:
        yield from check_others_in_child(others, os.environ, secs)
