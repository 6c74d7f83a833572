"""Runs a job until all of its processes succeed: prints their output, and starts them again."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

from mirror._src.base.interrupts import arriving
from mirror._src.tools.job import POLL_SECS, Job, tf_configs

_FAILURE_GRACE_SECS = 5.0  # the others stand in a collective, and often cannot react to a signal
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_output = threading.Lock()


class Exit(NamedTuple):
    """The end of a process.

    Attributes:
        process: Its index in the job.
        status: Exit status as `subprocess` has it: negative if a signal ended the process.
    """

    process: int
    status: int

    def __str__(self) -> str:
        if self.status >= 0:
            return f"process {self.process} ended first, with exit status {self.status}"
        return f"process {self.process} ended first, by {signal.Signals(-self.status).name}"

    @property
    def shell_status(self) -> int:
        """The exit status as shells have it: 137 for SIGKILL."""
        return self.status if self.status >= 0 else 128 - self.status


def run(
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    restarts: int,
    grace_secs: float,
) -> int:
    """Runs a job until all of its processes succeed; returns the exit status.

    If a process fails, the others are ended, and all start again, up to `restarts` times.

    Args:
        arguments: Arguments of Python.
        environments: The environment of each process, without `TF_CONFIG`.
        restarts: How often to start again.
        grace_secs: Time that the processes get to end after Ctrl-C or SIGTERM.
    """
    number = 0
    with arriving(*_SIGNALS) as received:
        while True:
            failure = _attempt(arguments, environments, number, received, grace_secs)
            if received:
                _say(f"ended by {signal.Signals(received[0]).name}")
                return 128 + received[0]
            if failure is None:
                return 0
            if number == restarts:
                _say(f"{failure}; all processes have been ended")
                return failure.shell_status
            number += 1
            _say(f"{failure}; all start again (restart {number} of {restarts})")


def _attempt(
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    number: int,
    received: Sequence[int],
    grace_secs: float,
) -> Exit | None:
    """Runs the processes once; returns the first failure. A signal is passed on, and ends them."""
    added = {"MIRROR_RESTARTS": str(number), "PYTHONUNBUFFERED": "1"}
    with tf_configs(len(environments)) as configs:
        clusters = [{"TF_CONFIG": config} if len(configs) > 1 else {} for config in configs]
        job = Job(
            [arguments] * len(configs),
            [{**e, **added, **c} for e, c in zip(environments, clusters, strict=True)],
        )
        threads = _pumps(job)
        failure = _first_failure(job, received)
        before = len(received)
        if before:
            job.end(received[0], grace_secs, lambda: len(received) > before)
        else:
            grace_secs = min(_FAILURE_GRACE_SECS, grace_secs)
            job.end(signal.SIGTERM, grace_secs, lambda: bool(received))
        for thread in threads:
            thread.join(1.0)
    return failure


def _first_failure(job: Job, received: Sequence[int]) -> Exit | None:
    """Waits until a process fails, all succeed, or the launcher receives a signal."""
    while not received:
        statuses = job.statuses()
        failures = [Exit(i, status) for i, status in enumerate(statuses) if status]
        if failures:
            return failures[0]
        if None not in statuses:
            return None
        time.sleep(POLL_SECS)
    return None


def _pumps(job: Job) -> Sequence[threading.Thread]:
    """Starts the threads that print the lines of the processes."""
    threads = []
    for i, process in enumerate(job.processes):
        prefix = f"[{i}] ".encode() if len(job.processes) > 1 else b""
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            arguments = (prefix, stream, target.buffer)
            threads.append(threading.Thread(target=_pump, args=arguments, daemon=True))
            threads[-1].start()
    return threads


def _pump(prefix: bytes, stream: IO[bytes], target: IO[bytes]) -> None:
    with stream:
        for line in stream:
            with _output, contextlib.suppress(OSError, ValueError):  # a closed pipe
                target.write(prefix + line.rstrip(b"\n") + b"\n")
                target.flush()


def _say(text: str) -> None:
    with _output, contextlib.suppress(OSError):
        print(f"mirror launch: {text}", file=sys.stderr, flush=True)
