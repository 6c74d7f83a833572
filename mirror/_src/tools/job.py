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
_EXIT_POLL_SECS, _END_POLL_SECS = 0.1, 0.02
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


class _Signals:
    """The signals that the launcher has received; its handlers raise nothing, wherever it is."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __enter__(self) -> "_Signals":
        # What is ignored stays ignored: SIGHUP under nohup, SIGINT in a job of a script.
        handled = [n for n in _SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._receive) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        del frame
        self.received.append(number)


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
    with _Signals() as signals:
        while True:
            with tf_configs(len(environments)) as configs:
                job = _Job(arguments, environments, configs, number)
                failure = job.first_failure(signals.received)
                if signals.received:
                    return _end_by(job, signals.received, grace_secs)
                job.end(signal.SIGTERM, min(_FAILURE_GRACE_SECS, grace_secs), signals.received)
                if signals.received:
                    return _end_by(job, signals.received, 0.0)
            if failure is None:
                return 0
            if number == restarts:
                _say(f"{failure}; all processes have been ended")
                return failure.shell_status
            number += 1
            _say(f"{failure}; all start again (restart {number} of {restarts})")


def _end_by(job: "_Job", received: Sequence[int], grace_secs: float) -> int:
    """Passes a signal on to the processes; returns the exit status of the launcher."""
    number = received[0]
    job.end(number, grace_secs, received)
    _say(f"ended by {signal.Signals(number).name}")
    return 128 + number


class _Job:
    """One attempt: processes in sessions of their own, and threads that print their output."""

    def __init__(
        self,
        arguments: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        configs: Sequence[str],
        number: int,
    ) -> None:
        self._exits: queue.SimpleQueue[Exit] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        added = {"MIRROR_RESTARTS": str(number), "PYTHONUNBUFFERED": "1"}
        try:
            for environment, config in zip(environments, configs, strict=True):
                if len(configs) > 1:
                    added["TF_CONFIG"] = config
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
            self.end(signal.SIGKILL, 0.0, ())
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
        with stream:
            for line in stream:
                with _output, contextlib.suppress(OSError, ValueError):  # a closed pipe
                    target.write(prefix + line.rstrip(b"\n") + b"\n")
                    target.flush()

    def first_failure(self, received: Sequence[int]) -> Exit | None:
        """Waits until a process fails, all succeed, or the launcher receives a signal."""
        left = len(self._processes)
        while left and not received:
            with contextlib.suppress(queue.Empty):
                ended = self._exits.get(timeout=_EXIT_POLL_SECS)
                left -= 1
                if ended.status:
                    return ended
        return None

    def end(self, number: int, grace_secs: float, received: Sequence[int]) -> None:
        """Sends a signal to the processes that are left, and SIGKILL after the grace period.

        Another signal for the launcher ends the grace period.
        """
        for process in self._processes:
            _send(process, number)
        before, deadline = len(received), time.monotonic() + grace_secs
        while time.monotonic() < deadline and len(received) == before:
            if all(map(_has_ended, self._processes)):
                break
            time.sleep(_END_POLL_SECS)
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
def tf_configs(count: int) -> Iterator[list[str]]:
    """Yields the `TF_CONFIG` of each process of a cluster on this machine.

    Within the context, no other program can take the port of process 0: it stays bound with
    SO_REUSEPORT, with which JAX's coordinator binds it, too.
    """
    with contextlib.ExitStack() as stack:
        reserved = stack.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with contextlib.ExitStack() as others:
            sockets = [reserved, *(others.enter_context(socket.socket()) for _ in range(1, count))]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
        tasks = [{"type": "worker", "index": i} for i in range(count)]
        yield [json.dumps({"cluster": {"worker": addresses}, "task": task}) for task in tasks]


def _say(text: str) -> None:
    with _output, contextlib.suppress(OSError):
        print(f"mirror launch: {text}", file=sys.stderr, flush=True)
