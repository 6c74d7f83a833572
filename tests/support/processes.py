"""Jobs of several processes, each with some host devices, which end by a deadline."""

import contextlib
import itertools
import os
import random
import socket
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import fast, fresh, inside

JOB_SECS = 900.0  # only ends a job that hangs
tf_configs = inside.starter().tf_configs


class Ended(NamedTuple):
    """A process of a job.

    Attributes:
        status: Exit status; negative if a signal ended it, None if the deadline did.
        output: What it printed, standard error included.
    """

    status: int | None
    output: str


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
        environment: Variables for all processes, which else compile in less time than for users.
        each: Variables for each process.
        timeout: Seconds until all processes are killed.
        after_failure: Seconds from the first failure until the others are killed. None waits for
            the deadline.
    """
    arguments = ["-c", textwrap.dedent(target)] if isinstance(target, str) else list(target)
    path = os.pathsep.join(filter(None, [fresh.INHERITED.get("PYTHONPATH"), str(fresh.ROOT)]))
    cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    with tempfile.TemporaryDirectory() as directory, tf_configs(processes) as configs:
        files = [Path(directory, str(i)) for i in range(processes)]
        variables = [
            {
                **fresh.INHERITED,
                "PYTHONPATH": path,
                "TF_CONFIG": config,
                **cpu,
                **fast.ENVIRONMENT,
                **(environment or {}),
                **(each[i] if each else {}),
            }
            for i, config in enumerate(configs)
        ]
        job = inside.starter().Job([["-u", *arguments]] * processes, variables, files, fresh.ROOT)
        try:
            _wait(job, time.monotonic() + timeout, after_failure)
            statuses = job.statuses()
        finally:
            job.end()
        outputs = [file.read_text(errors="replace") for file in files]
    return [Ended(*each) for each in zip(statuses, outputs, strict=True)]


def _wait(job: Any, deadline: float, after_failure: float | None) -> None:
    """Waits for the processes."""
    while time.monotonic() < deadline:
        statuses = job.statuses()
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
