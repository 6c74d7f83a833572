"""Runs the probes in a subprocess, and reports a crash as a problem."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mirror._src.base import interrupts
from mirror._src.tools.doctor.check import Check
from mirror._src.tools.doctor.environment import guess

_DEADLINE_SECS = 240.0
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
    limit: float = _DEADLINE_SECS


def check_in_child(environment: Mapping[str, str]) -> Iterator[Check]:
    """Yields the results of the probes; repeats them without flags that crash the subprocess."""
    result = probe(environment)
    unknown = _UNKNOWN.search(result.errors)
    if unknown is None:
        yield from findings(result)
        return
    flags = unknown[1].split()
    yield _check_unknown(flags)
    kept = [flag for flag in environment["XLA_FLAGS"].split() if flag not in flags]
    yield from findings(probe({**environment, "XLA_FLAGS": " ".join(kept)}))


def check_others_in_child(
    module: str, environment: Mapping[str, str], secs: float
) -> Iterator[Check]:
    """Yields the results of the checks of a job, or of Ray, which the subprocess joins.

    Args:
        module: `"distributed"` or `"ray_nodes"`.
        environment: Environment variables, which describe the job; `TF_CONFIG` may describe Ray's.
        secs: How long to wait for the others in each check.
    """
    limit = _STAGES * secs + _DEADLINE_SECS
    result = _run_code(_CHECKS, environment, module, str(secs), limit=limit)
    yield from findings(result, _OTHERS if module == "distributed" else _RAY_LOGS)


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
    """Runs code in a subprocess, for `_DEADLINE_SECS` at most unless there is another limit.

    Raises:
        KeyboardInterrupt: If Ctrl-C was pressed in the meantime.
    """
    # The subprocess gets this sys.path, and with -P it does not add the current directory, whose
    # files could shadow modules.
    limit = _DEADLINE_SECS if limit is None else limit
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
