"""Child processes that answer in lines of JSON, within a time limit."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

_COUNT_FLAG = "--xla_force_host_platform_device_count"
_ROOT = Path(__file__).resolve().parent.parent
_END_SECS = 10.0
_LONGEST = 300
_CHUNK_BYTES = 1 << 16


class ChildError(RuntimeError):
    """Error for a child process that hangs, or ends without an answer."""


def child_environment(num_devices: int | None) -> dict[str, str]:
    """Returns this environment with host devices, and no other changes; without any for None.

    mirror sets up its process itself, and hand-written JAX runs with the defaults of JAX, as for a
    user.
    """
    if num_devices is None:
        return dict(os.environ)
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if not flag.startswith(_COUNT_FLAG)]
    return {
        **os.environ,
        "XLA_FLAGS": " ".join([*kept, f"{_COUNT_FLAG}={num_devices}"]),
        "JAX_PLATFORMS": "cpu",
    }


class Child:
    """A Python process that runs a module of the benchmark, in its own session.

    Args:
        module: Name of the module.
        argument: Its only argument, passed as JSON.
        num_devices: Number of host devices; None leaves the devices to JAX.
        extra: Additional environment variables.
    """

    def __init__(
        self,
        module: str,
        argument: dict[str, Any],
        num_devices: int | None,
        extra: dict[str, str] | None = None,
    ) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by end)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(argument)],
            env={**child_environment(num_devices), **(extra or {})},
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )
        self._unread = b""

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """The id of the process and of its session."""
        return self._process.pid

    def ask(self, text: str) -> None:
        """Sends a line.

        Raises:
            ChildError: If the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{text}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self, limit_secs: float) -> dict[str, Any]:
        """Returns the next answer of the process.

        Raises:
            ChildError: If the process has ended, or does not answer in time; it is then killed.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_secs
        while b"\n" not in self._unread:
            remaining = deadline - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(remaining, 0))
            if not ready:
                self._kill()
                raise ChildError(
                    f"hung: no answer within {limit_secs:.0f} s, so process {self.pid} was killed"
                )
            data = os.read(self._process.stdout.fileno(), _CHUNK_BYTES)
            if not data:
                raise self._ended()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def close_input(self) -> None:
        """Asks the process to end, without waiting for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self) -> None:
        """Ends the process and its children, by force if it takes too long."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(_END_SECS)
        except subprocess.TimeoutExpired:
            self._kill()
        if self._process.returncode:
            self._kill()
        self._stderr.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # the whole session, including the ranks of torch
        self._process.wait()

    def _ended(self) -> ChildError:
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._stderr.seek(0)
        output = self._stderr.read().decode(errors="replace").strip()
        return ChildError(f"ended with {how}: {_last_line(output)}")


def _last_line(output: str) -> str:
    """Returns the last line, which names the error; the middle of a long line is removed."""
    last = output.splitlines()[-1] if output else "no output"
    return (
        last if len(last) <= _LONGEST else f"{last[: _LONGEST // 2]} ... {last[-_LONGEST // 2 :]}"
    )


def claim_stdout() -> TextIO:
    """Returns a file for the answers, and redirects all other output to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers
