"""`mirror doctor`: runs the checks, partly in a subprocess, and prints them or a report."""

import argparse
import getpass
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from mirror._src.base import interrupts
from mirror._src.base.optional import version_of
from mirror._src.base.terminal import paint
from mirror._src.tools.devices import tables
from mirror._src.tools.doctor.check import COLORS, Check, summary, worst
from mirror._src.tools.doctor.environment import (
    check_environment,
    check_versions,
    guess,
    installed_versions,
)
from mirror._src.tools.options import FAILED, USAGE_ERROR, report_error

DEADLINE_SECS = 60  # as `commands.toml` says
_PRINT_SECS = 1.0
_CHILD_SECS = 240.0  # for the checks in a subprocess
_MOST_CHARACTERS = 300
_UNKNOWN = re.compile(r"Unknown flags? in XLA_FLAGS: (.*)")
_BAD_FLAGS = re.compile(
    r"(Couldn't interpret value .* for flag .*|Could not open file .*XLA_FLAGS.*)"
)
_FATAL = re.compile(r"^F\d{4} \S+ +\d+ \S+\] (.*)$", re.MULTILINE)
_PATH = "import json, sys; sys.path[:] = json.loads(sys.argv[1])"
_CHECKS = "from mirror._src.tools.doctor import check; check.main(sys.argv[2], float(sys.argv[3]))"
_STAGES = 4  # checks that wait for others
_CPU = "Try JAX_PLATFORMS=cpu: if that works, the cause is the GPUs, their driver or NCCL."
_OTHERS = "Read the output of the other processes: JAX ends all of them when one has ended."
_RAY_LOGS = "Read Ray's logs, in /tmp/ray/session_latest/logs."
_INVENTORY = "from mirror._src.tools import devices; print(json.dumps(devices.inventory()))"
_PACKAGES = ("chex", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_VARIABLES = (
    *("CUDA_", "JAX_", "MIRROR_", "NCCL_", "NPROC", "NVIDIA_", "PJRT_", "XLA_"),
    # Not all of `SLURM_`, which has names of users and accounts.
    *("GLOO_", "OMPI_COMM_WORLD_", "SLURM_JOB_NODELIST", "SLURM_LOCALID", "SLURM_NTASKS"),
    *("SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    # Not all of `TF_`, which Terraform uses too, for secrets among others.
    *("TF_CONFIG", "TF_CPP_", "TF_FORCE_GPU_", "TF_GPU_", "TF_XLA_"),
)
_CONSTANT = "NVIDIA_REQUIRE_"  # of container images: 2,000 characters
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
_HOMES = re.compile(r"(?<=/home/|Users/)[^/\s:,;'\"|`]+")


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
        # The checks join the job or Ray, which variables of this environment describe.
        limit = _STAGES * secs + _CHILD_SECS
        result = _run_code(_CHECKS, os.environ, others, str(secs), limit=limit)
        yield from findings(result, _OTHERS if others == "distributed" else _RAY_LOGS)


class ProbeResult(NamedTuple):
    """Exit status and output of the subprocess.

    Attributes:
        status: Exit status, negative for a signal; `None` if it was still running at the deadline.
        output: Text on standard output.
        errors: Text on standard error.
        limit: The deadline, in seconds.
    """

    status: int | None
    output: str
    errors: str
    limit: float = _CHILD_SECS


def check_in_child(environment: Mapping[str, str]) -> Iterator[Check]:
    """Yields the results of the probes; repeats them without flags that crash the subprocess."""
    result = probe(environment)
    unknown = _UNKNOWN.search(result.errors)
    if unknown is not None:
        flags = unknown[1].split()
        yield _check_unknown(flags)
        kept = [flag for flag in environment["XLA_FLAGS"].split() if flag not in flags]
        result = probe({**environment, "XLA_FLAGS": " ".join(kept)})
    yield from findings(result)


def inventory_in_child(environment: Mapping[str, str]) -> dict[str, Any] | str:
    """Returns the devices and settings of a program with this environment, or why it crashed."""
    result = _run_code(_INVENTORY, environment)
    if result.status == 0:
        return list(_lines(result.output))[-1]
    check = _check_crash("JAX's backend", result, _CPU)
    return f"{check.found}: {check.meaning}"


def probe(environment: Mapping[str, str]) -> ProbeResult:
    """Runs the probes in a subprocess."""
    return _run_code(_CHECKS, environment, "probes", "0")


def _run_code(
    code: str, environment: Mapping[str, str], *arguments: str, limit: float | None = None
) -> ProbeResult:
    """Runs code in a subprocess, for `_CHILD_SECS` at most unless there is another limit.

    Raises:
        KeyboardInterrupt: If Ctrl-C was pressed in the meantime.
    """
    # The subprocess gets this sys.path, and with -P it does not add the current directory, whose
    # files could shadow modules.
    limit = _CHILD_SECS if limit is None else limit
    command = [sys.executable, "-P", "-c", f"{_PATH}; {code}", json.dumps(sys.path), *arguments]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit,
            check=False,
        )
        status: int | None = done.returncode
        output, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        status, output, errors = None, error.stdout or b"", error.stderr or b""
    interrupts.check()
    texts = (output.decode(errors="replace"), errors.decode(errors="replace"))
    return ProbeResult(status, *texts, limit)


def findings(result: ProbeResult, fix: str = _CPU) -> Iterator[Check]:
    """Yields the checks that the subprocess printed, and a problem if it crashed.

    Args:
        result: The result of the subprocess.
        fix: What to do about a crash.
    """
    running, has_ended = "start", result.status == 0
    for line in _lines(result.output):
        if "begins" in line:
            running = line["begins"]
        elif "ends" in line:  # a crash after it, while other processes end, means nothing
            has_ended = True
        else:
            yield Check(**line)
    if not has_ended:
        yield _check_crash(running, result, fix)


def _lines(output: str) -> Iterator[dict[str, Any]]:
    """Yields the lines that the probes printed, without the lines that libraries print."""
    for line in output.splitlines():
        if line.startswith("{") and line.endswith("}"):
            yield json.loads(line)


def _check_unknown(flags: list[str]) -> Check:
    guesses = " ".join(filter(None, map(guess, flags)))
    instead = f", or use {guesses}" if guesses else ""
    return Check(
        "XLA_FLAGS",
        "problem",
        f"unknown to this jaxlib: {' '.join(flags)}",
        "XLA ends the process at startup. The following checks ran without them.",
        f"Remove {' '.join(flags)} from XLA_FLAGS{instead}.",
    )


def _check_crash(running: str, result: ProbeResult, fix: str) -> Check:
    if result.status is None:
        finding = f"did not finish within {result.limit:g} s"
    elif result.status < 0:
        finding = f"ended the process with {signal.Signals(-result.status).name}"
    else:
        finding = f"ended the process with exit status {result.status}"
    flags = _BAD_FLAGS.search(result.errors)
    if flags is not None:
        correct = "Correct the value, or unset XLA_FLAGS."
        return Check("XLA_FLAGS", "problem", finding, flags[1][:_MOST_CHARACTERS], correct)
    lines = [line for line in result.errors.splitlines() if line.strip()]
    message = (_FATAL.findall(result.errors) or lines[-1:] or [""])[0][:_MOST_CHARACTERS]
    return Check(running, "problem", finding, message, fix)


def format_report(
    versions: Mapping[str, str],
    devices: Mapping[str, Any] | str,
    checks: Sequence[Check],
    environment: Mapping[str, str],
) -> str:
    """Returns the report. It contains no user names in paths and no secrets of the environment.

    Args:
        versions: The installed versions by name.
        devices: The result of `devices.inventory`, or why JAX did not start.
        checks: The results of the checks.
        environment: The environment variables.
    """
    parts = [
        f"### mirror {versions['mirror']} on {platform.system()}",
        _table(("component", "version"), _components(versions)),
        *_devices(devices),
        _table(("variable", "value"), variables(environment)),
        f"**Checks:** {summary(checks)}",
        "\n".join(map(_line, checks)),
    ]
    return without_names("\n\n".join(parts), environment)


def variables(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the variables that configure JAX, XLA and CUDA; hides the values of secrets."""
    names = sorted(name for name in environment if name.startswith(_VARIABLES))
    names = [name for name in names if not name.startswith(_CONSTANT)]
    return [(n, "(hidden)" if _SECRET.search(n) else environment[n] or '""') for n in names]


def without_names(text: str, environment: Mapping[str, str]) -> str:
    """Returns the text without user names in paths and credentials in URLs."""
    home = environment.get("HOME") or os.path.expanduser("~")
    if len(home) > 1:  # not "/"
        text = re.sub(rf"(?<![\w.~-]){re.escape(home.rstrip('/'))}(?![\w.-])", "~", text)
    text = _CREDENTIALS.sub("", _HOMES.sub("USER", text))
    return re.sub(rf"(?<=/){re.escape(_user())}(?![\w.-])", "USER", text)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for this user
        return "USER"


def _components(versions: Mapping[str, str]) -> list[tuple[str, str]]:
    system = f"{platform.platform()}, {os.cpu_count()} cores"
    others = [(name, found) for name in _PACKAGES if (found := version_of(name)) is not None]
    return [("system", system), *versions.items(), *others]


def _devices(devices: Mapping[str, Any] | str) -> Iterable[str]:
    if isinstance(devices, str):
        return [f"**Devices:** {_cell(devices)}"]
    return [
        f"**Backend:** {_cell(devices['versions']['backend'])}",
        *(_table(table.headings, table.rows) for table in tables(devices)),
        *(f"**Note:** {_cell(note)}" for note in devices["notes"]),
    ]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(check: Check) -> str:
    state = check.state if check.state == "ok" else f"**{check.state}**"
    details = [f"  - {_cell(text)}" for text in (check.meaning, check.fix) if text]
    return "\n".join([f"- {state}: {check.name}: {_cell(check.found)}", *details])


def _cell(text: str) -> str:
    """Returns text that Markdown shows unchanged in a cell of a table."""
    text = " ".join(text.split())
    return re.sub(r"([\\|*`<])", r"\\\1", text)
