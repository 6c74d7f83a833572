"""Terminals for tests: what a program writes to one, and what the user sees at the end."""

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator, Sequence
from typing import TextIO

from tests.support import fresh

_CONTROLS = re.compile(r"(\x1b\[[0-9?]*[a-zA-Z]|\r|\n)")


class Screen:
    """Bytes that were written to a terminal."""

    def __init__(self) -> None:
        self.text = ""

    @property
    def frames(self) -> list[str]:
        """All pieces of text between two control codes, in order."""
        return [part for part in _CONTROLS.split(self.text)[::2] if part]

    @property
    def lines(self) -> list[str]:
        """The lines at the end, of a terminal that is wide enough."""
        lines, row, column = [""], 0, 0
        for i, part in enumerate(_CONTROLS.split(self.text)):
            if i % 2 == 0:
                line, end = lines[row], column + len(part)
                lines[row], column = line[:column].ljust(column) + part + line[end:], end
            elif part == "\r":
                column = 0
            elif part == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif part.endswith("A"):
                row = max(0, row - int(part[2:-1] or 1))
            elif part.endswith("K"):
                lines[row] = "" if part == "\x1b[2K" else lines[row][:column]
            else:
                assert re.fullmatch(r"\x1b\[(\?25[lh]|[0-9;]*m)", part), f"unknown control {part!r}"
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def shows_cursor(self) -> bool:
        """Whether the cursor is visible at the end."""
        return self.text.rfind("\x1b[?25h") >= self.text.rfind("\x1b[?25l")


@contextlib.contextmanager
def terminal(columns: int) -> Iterator[tuple[TextIO, Screen]]:
    """Yields the file of a new terminal, and what is written to it, complete after the context."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    screen = Screen()

    def read() -> None:
        with contextlib.suppress(OSError), open(ours, "rb", buffering=0) as file:
            data = b""
            while more := file.read(4096):
                data += more
                screen.text = data.decode(errors="ignore")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with open(theirs, "w") as file:
            yield file, screen
    finally:
        reader.join()


def run(command: Sequence[str], columns: int, environment: dict[str, str]) -> Screen:
    """Runs a command in a terminal; fails if the command fails."""
    with terminal(columns) as (file, screen):
        done = subprocess.run(
            command,
            env={**fresh.INHERITED, "TERM": "xterm", **environment},
            cwd=fresh.ROOT,
            stdin=file,
            stdout=file,
            stderr=file,
            timeout=900,
            check=False,
        )
    assert done.returncode == 0, screen.text
    return screen
