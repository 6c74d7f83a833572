"""The processes of a job on this machine: started together, and ended together.

`mirror launch`, the pytest plugin and the tests of mirror start processes with it.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

from mirror._src.tools import die_with_parent

POLL_SECS = 0.02


@final
class Job:
    """Processes of Python, each in a session of its own; they end when this process ends.

    A terminal sends Ctrl-C to this process only, and a whole session, with its data loaders, can
    be ended.

    Args:
        arguments: The arguments of Python of each process.
        environments: The environment of each process.
        outputs: A file for what each process prints, standard error included; None makes pipes.
        cwd: The working directory.

    Attributes:
        processes: The processes. Those that have ended are only reaped by `end`, so that no other
            process can get the id of a session before.
    """

    def __init__(
        self,
        arguments: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        outputs: Sequence[Path] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        # While it starts, Python drops Ctrl-C where it reads PYTHONWARNINGS (-I ignores it) and
        # looks at the path of a script (-c has none): CPython 3.11.
        code = Path(die_with_parent.__file__).read_text(encoding="utf-8")
        command = [sys.executable, "-I", "-S", "-c", code, str(os.getpid())]
        try:
            for i, (own, environment) in enumerate(zip(arguments, environments, strict=True)):
                with contextlib.ExitStack() as stack:
                    output, errors = subprocess.PIPE, subprocess.PIPE
                    if outputs is not None:
                        output = stack.enter_context(outputs[i].open("wb"))  # type: ignore[assignment]
                        errors = subprocess.STDOUT
                    self.processes.append(
                        subprocess.Popen(
                            [*command, sys.executable, *own],
                            env=dict(environment),
                            cwd=cwd,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=errors,
                            start_new_session=True,
                        )
                    )
        except BaseException:
            self.end()
            raise

    def statuses(self) -> list[int | None]:
        """Returns the exit status of each process, negative for a signal; None before its end."""
        return list(map(_status, self.processes))

    def end(
        self,
        number: int = signal.SIGKILL,
        grace_secs: float = 0.0,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Sends a signal to the processes, and SIGKILL after the grace period.

        Args:
            number: The signal.
            grace_secs: How long they have to end.
            is_over: Whether to end the grace period now.
        """
        for process in self.processes:
            _send(process, number)
        deadline = time.monotonic() + grace_secs
        while time.monotonic() < deadline and not is_over() and None in self.statuses():
            time.sleep(POLL_SECS)
        for process in self.processes:
            _send(process, signal.SIGKILL)  # also to what a process that has ended left behind
            process.wait()


def _status(process: "subprocess.Popen[bytes]") -> int | None:
    """Returns the exit status of a process, which is not reaped."""
    if process.returncode is not None:
        return process.returncode
    info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _send(process: "subprocess.Popen[bytes]", number: int) -> None:
    if process.returncode is None:  # not reaped: no other process can have the id
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


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
