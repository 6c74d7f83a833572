"""A job of several processes on this machine: started together, and ended together."""

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, NamedTuple

_FAILURE_GRACE_SECS = 5.0  # the others stand in a collective, and often cannot react to a signal
_PORT_ATTEMPTS = 3
_PORT_TAKEN = b"address already in use"
_PR_SET_PDEATHSIG = 1
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


class _Interrupted(BaseException):
    """A signal for the launcher."""

    def __init__(self, number: int) -> None:
        self.number = number


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
    number, ports_taken = 0, 0
    with _raising_signals():
        while True:
            job = _Job(arguments, environments, number)
            try:
                failure = job.first_failure()
                grace = _FAILURE_GRACE_SECS
            except _Interrupted as interrupt:
                return _end_by(job, interrupt.number, grace_secs)
            try:
                job.end(signal.SIGTERM, min(grace, grace_secs))
            except _Interrupted as interrupt:
                return _end_by(job, interrupt.number, 0.0)
            if failure is None:
                return 0
            if job.port_is_taken and ports_taken < _PORT_ATTEMPTS:
                ports_taken += 1
                _say("another program has taken the port of process 0; all start with a new one")
                continue
            if number == restarts:
                _say(f"{failure}; all processes have been ended")
                return failure.shell_status
            number += 1
            _say(f"{failure}; all start again (restart {number} of {restarts})")


def _end_by(job: "_Job", number: int, grace_secs: float) -> int:
    """Passes a signal on to the processes; returns the exit status of the launcher."""
    try:
        job.end(number, grace_secs)
    except _Interrupted:  # a second signal: at once
        job.end(signal.SIGKILL, 0.0)
    _say(f"ended by {signal.Signals(number).name}")
    return 128 + number


class _Job:
    """One attempt: processes in sessions of their own, and threads that print their output."""

    def __init__(
        self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]], number: int
    ) -> None:
        self.port_is_taken = False
        self._exits: queue.SimpleQueue[Exit] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        configs = tf_configs(len(environments))
        try:
            for environment, config in zip(environments, configs, strict=True):
                added = {"MIRROR_RESTARTS": str(number), "PYTHONUNBUFFERED": "1", **config}
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, *arguments],
                        env={**environment, **added},
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        # A session of its own: a terminal sends Ctrl-C to the launcher only, and
                        # the whole group, with its data loaders, can be ended.
                        start_new_session=True,
                        preexec_fn=_die_with_launcher,
                    )
                )
        except BaseException:
            self.end(signal.SIGKILL, 0.0)
            raise
        for i, process in enumerate(self._processes):
            for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert stream is not None
                self._start(self._pump, i, stream, target.buffer)
            self._start(self._watch, i, process.pid)

    def _start(self, target: object, *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))  # type: ignore[arg-type]
        self._threads[-1].start()

    def _watch(self, i: int, pid: int) -> None:
        # Not reaped yet, so that no other process can get its id before the group is ended.
        try:
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # `end` has reaped it
            return
        assert info is not None
        is_exit = info.si_code == os.CLD_EXITED
        self._exits.put(Exit(i, info.si_status if is_exit else -info.si_status))

    def _pump(self, i: int, stream: IO[bytes], target: IO[bytes]) -> None:
        prefix = f"[{i}] ".encode() if len(self._processes) > 1 else b""
        for line in stream:
            if _PORT_TAKEN in line.lower():
                self.port_is_taken = True
            with _output, contextlib.suppress(OSError, ValueError):  # a closed pipe
                target.write(prefix + line.rstrip(b"\n") + b"\n")
                target.flush()

    def first_failure(self) -> Exit | None:
        """Waits until a process fails, or all succeed."""
        for _ in self._processes:
            while True:
                with contextlib.suppress(queue.Empty):  # signals are handled between the waits
                    ended = self._exits.get(timeout=0.2)
                    break
            if ended.status:
                return ended
        return None

    def end(self, number: int, grace_secs: float) -> None:
        """Sends a signal to the processes that are left, and SIGKILL after the grace period."""
        for process in self._processes:
            _send(process, number)
        deadline = time.monotonic() + grace_secs
        while time.monotonic() < deadline and not all(map(_has_ended, self._processes)):
            time.sleep(0.02)
        for process in self._processes:
            _send(process, signal.SIGKILL)  # also to what a process that has ended left behind
            process.wait()
        for thread in self._threads:
            thread.join(1.0)


def _send(process: "subprocess.Popen[bytes]", number: int) -> None:
    if process.returncode is None:  # not reaped: no other process can have the id
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def _die_with_launcher() -> None:
    """Makes Linux end this process when the launcher is killed, which cannot end it then."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _raising_signals() -> Iterator[None]:
    def interrupt(number: int, frame: object) -> None:
        del frame
        raise _Interrupted(number)

    # What is ignored stays ignored: SIGHUP under nohup, SIGINT in a job of a script.
    handled = [n for n in _SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tf_configs(count: int) -> list[dict[str, str]]:
    """Returns the variables that make `count` processes of this machine a cluster."""
    if count == 1:
        return [{}]
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(count)]}
    tasks = [{"type": "worker", "index": i} for i in range(count)]
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]


def free_ports(count: int) -> list[int]:
    """Returns unused ports of this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _say(text: str) -> None:
    with _output, contextlib.suppress(OSError):
        print(f"mirror launch: {text}", file=sys.stderr, flush=True)
