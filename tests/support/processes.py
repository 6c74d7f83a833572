"""Jobs of several processes, each with some host devices, which end by a deadline."""

import contextlib
import itertools
import os
import random
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support import fresh, inside

JOB_SECS = 150.0
tf_configs = inside.launcher()[1].tf_configs


class Ended(NamedTuple):
    """A process of a job.

    Attributes:
        status: Exit status; negative if a signal ended it, None if the deadline did.
        output: What it printed, standard error included.
        at: When it ended, in seconds of `time.time()`; None if the deadline ended it.
    """

    status: int | None
    output: str
    at: float | None = None


_ports = itertools.count(random.SystemRandom().randrange(1000))


def free_ports(count: int, first: int = 20_000, per_worker: int = 600) -> list[int]:
    """Returns ports that no program listens on, from a range of this worker of pytest-xdist.

    Args:
        count: Number of ports.
        first: First port of the first range. By default, all ranges are above the ports that Ray
            gives to workers, and below those that Linux gives to programs that ask for any port.
        per_worker: Number of ports in the range of each of 20 workers.
    """
    first += per_worker * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 20)
    ports: list[int] = []
    while len(ports) < count:
        port = first + next(_ports) % per_worker
        with socket.socket() as unused, contextlib.suppress(OSError):
            unused.bind(("", port))
            ports.append(port)
    return ports


def run(
    target: str | Sequence[str],
    *,
    processes: int = 2,
    devices: int = 2,
    environment: Mapping[str, str] | None = None,
    each: Sequence[Mapping[str, str]] = (),
    timeout: float = JOB_SECS,
    after_failure: float | None = None,
) -> list[Ended]:
    """Runs a program in several processes; ends those that are left at the deadline.

    Args:
        target: Code, or the arguments of Python.
        processes: Number of processes.
        devices: Number of host devices of each.
        environment: Variables for all processes.
        each: Variables for each process.
        timeout: Seconds until all processes are killed.
        after_failure: Seconds from the first failure until the others are killed. None waits for
            the deadline.
    """
    arguments = ["-c", textwrap.dedent(target)] if isinstance(target, str) else list(target)
    path = os.pathsep.join(filter(None, [fresh.INHERITED.get("PYTHONPATH"), str(fresh.ROOT)]))
    started: list[subprocess.Popen[bytes]] = []
    ends: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as directory, tf_configs(processes) as configs:
        files = [Path(directory, str(i)) for i in range(processes)]
        try:
            for i, config in enumerate(configs):
                variables = {
                    **fresh.INHERITED,
                    "PYTHONPATH": path,
                    "TF_CONFIG": config,
                    "JAX_PLATFORMS": "cpu",
                    "JAX_NUM_CPU_DEVICES": str(devices),
                    **(environment or {}),
                    **(each[i] if each else {}),
                }
                with files[i].open("wb") as output:
                    started.append(
                        subprocess.Popen(
                            [sys.executable, "-u", *arguments],
                            env=variables,
                            cwd=fresh.ROOT,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                        )
                    )
            _wait(started, ends, time.monotonic() + timeout, after_failure)
        finally:
            statuses = [process.poll() for process in started]
            for process in started:
                if process.poll() is None:
                    process.kill()
                process.wait()
        outputs = [file.read_text(errors="replace") for file in files]
    return [
        Ended(status, text, ends.get(i))
        for i, (status, text) in enumerate(zip(statuses, outputs, strict=True))
    ]


def _wait(
    started: Sequence["subprocess.Popen[bytes]"],
    ends: dict[int, float],
    deadline: float,
    after_failure: float | None,
) -> None:
    """Waits for the processes, and notes when each has ended."""
    while time.monotonic() < deadline:
        statuses = [process.poll() for process in started]
        for i, status in enumerate(statuses):
            if status is not None:
                ends.setdefault(i, time.time())
        if None not in statuses:
            return
        if after_failure is not None and any(statuses):
            deadline, after_failure = min(deadline, time.monotonic() + after_failure), None
        time.sleep(0.05)


def run_program(name: str, *arguments: str, **options: object) -> list[Ended]:
    """Runs a file of `tests/programs` in several processes, like `run`."""
    return run([str(fresh.PROGRAMS / f"{name}.py"), *arguments], **options)


def outputs_of(ended: Sequence[Ended]) -> list[str]:
    """Returns what the processes printed; fails with all of it if one has failed."""
    text = "\n".join(f"--- process {i}: {e.status}\n{e.output}" for i, e in enumerate(ended))
    assert [e.status for e in ended] == [0] * len(ended), text
    return [e.output for e in ended]
