"""Processes that kill themselves before they change a file: each point of a save, every time."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def before_changes(directory: str | os.PathLike[str], call: Callable[[str], object]) -> None:
    """Calls a function before this process changes or syncs something below a directory.

    It gets the name of the point, such as `os.rename step-2.safetensors.unfinished`. Python reports
    all these calls, also those of other packages, but for `os.fsync`, which is replaced. Nothing
    can remove the function, so this is for processes of their own.
    """
    top, fsync = f"{Path(directory).resolve()}{os.sep}", os.fsync

    def reporting_fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if f"{path}{os.sep}".startswith(top):
            call(f"os.fsync {os.path.relpath(path, top)}")
        fsync(descriptor)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CHANGES:
            for name in _changed(event, arguments, top):
                call(f"{event} {name}")

    sys.addaudithook(hook)
    os.fsync = reporting_fsync


def _changed(event: str, arguments: tuple[Any, ...], top: str) -> Iterator[str]:
    path = arguments[0]
    if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
        return
    if event in ("os.remove", "os.rmdir") and arguments[-1] != -1:
        yield "in a directory that is deleted"
    elif isinstance(path, str | os.PathLike) and str(path).startswith(top):
        yield str(path).removeprefix(top)


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_me_at(directory: str | os.PathLike[str], number: int) -> None:
    """Kills this process before its change of a directory with this number, from now on."""
    left = [number]

    def count(_: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            kill_me()

    before_changes(directory, count)
