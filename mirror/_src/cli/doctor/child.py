"""The probes, in a process of their own: what ends it is a finding."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mirror._src.cli.doctor.check import Check
from mirror._src.cli.doctor.environment import guess
from mirror._src.utils import interrupts

_DEADLINE_SECS = 240.0
_MOST_SHOWN = 300
_UNKNOWN = re.compile(r"Unknown flags? in XLA_FLAGS: (.*)")
_BAD_FLAGS = re.compile(
    r"(Couldn't interpret value .* for flag .*|Could not open file .*XLA_FLAGS.*)"
)
_FATAL = re.compile(r"^F\d{4} \S+ +\d+ \S+\] (.*)$", re.MULTILINE)
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mirror._src.cli.doctor import probes"
)


class ProbeResult(NamedTuple):
    """How the process ended.

    Attributes:
        status: its exit status, negative for a signal; `None`: it was still running at the
            deadline.
        output: what it printed.
        errors: what it complained of.
    """

    status: int | None
    output: str
    errors: str


def check_in_child(environment: Mapping[str, str]) -> Iterator[Check]:
    """What the probes find; where flags end the process, once more without them."""
    ended = probe(environment)
    unknown = _UNKNOWN.search(ended.errors)
    if unknown is None:
        yield from findings(ended)
        return
    flags = unknown[1].split()
    yield _check_unknown(flags)
    kept = [flag for flag in environment["XLA_FLAGS"].split() if flag not in flags]
    yield from findings(probe({**environment, "XLA_FLAGS": " ".join(kept)}))


def probe(environment: Mapping[str, str]) -> ProbeResult:
    """Runs the probes.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed meanwhile.
    """
    # It imports what this process would, and nothing that lies about in the current folder.
    command = [sys.executable, "-P", "-c", f"{_CODE}; probes.main()", json.dumps(sys.path)]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DEADLINE_SECS,
            check=False,
        )
        status: int | None = done.returncode
        output, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        status, output, errors = None, error.stdout or b"", error.stderr or b""
    interrupts.check()
    return ProbeResult(status, output.decode(errors="replace"), errors.decode(errors="replace"))


def findings(ended: ProbeResult) -> Iterator[Check]:
    """The checks that it printed, and what ended it, if anything did."""
    under_way = "start"
    for line in _lines(ended.output):
        if "begins" in line:
            under_way = line["begins"]
        else:
            yield Check(**line)
    if ended.status != 0:
        yield _check_end(under_way, ended)


def _lines(output: str) -> Iterator[dict[str, Any]]:
    """Those that the probes print, and not what a library may."""
    for line in output.splitlines():
        if line.startswith("{") and line.endswith("}"):
            yield json.loads(line)


def _check_unknown(flags: list[str]) -> Check:
    guesses = " ".join(filter(None, map(guess, flags)))
    instead = f", or write {guesses}" if guesses else ""
    return Check(
        "XLA_FLAGS",
        "problem",
        f"this jaxlib does not know {' '.join(flags)}",
        "XLA ends the process when it starts. What follows was found without them.",
        f"Take {' '.join(flags)} out of XLA_FLAGS{instead}.",
    )


def _check_end(under_way: str, ended: ProbeResult) -> Check:
    if ended.status is None:
        found = f"it did not finish within {_DEADLINE_SECS:g} s"
    elif ended.status < 0:
        found = f"it ended the process with {signal.Signals(-ended.status).name}"
    else:
        found = f"it ended the process with exit status {ended.status}"
    flags = _BAD_FLAGS.search(ended.errors)
    if flags is not None:
        fix = "Correct it, or unset XLA_FLAGS."
        return Check("XLA_FLAGS", "problem", found, flags[1][:_MOST_SHOWN], fix)
    lines = [line for line in ended.errors.splitlines() if line.strip()]
    said = (_FATAL.findall(ended.errors) or lines[-1:] or [""])[0][:_MOST_SHOWN]
    fix = "Try with JAX_PLATFORMS=cpu: if that works, it is the GPUs, their driver or NCCL."
    return Check(under_way, "problem", found, said, fix)
