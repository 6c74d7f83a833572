"""The pages of the documentation, the blocks of Python in them, and a page as a program."""

import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import fresh
from tests.support.strict import STRICT

_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$"
    r"(?:\n\n?^```text stderr\n(?P<progress>.*?)^```$)?"
    r"(?:\n\n?^```text(?P<option> numbers-vary)?\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.M,
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_END = "\0"  # printed after each block, to standard output and standard error
_MARK = f"import sys as _sys; [print({_END!r}, end='', file=f) for f in (_sys.stdout, _sys.stderr)]"
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]\d+)?")


def fits(shown: str, printed: str, *, numbers_vary: bool = False) -> bool:
    """Whether a page shows what was printed; ellipses stand for anything, as in a doctest.

    Args:
        shown: Block of the page.
        printed: What the program printed.
        numbers_vary: Whether any number may stand in the place of another, such as a time.
    """
    if numbers_vary:
        shown, printed = (_NUMBER.sub("0", text) for text in (shown, printed))
    return doctest.OutputChecker().check_output(shown, printed, FLAGS)


class Block(NamedTuple):
    """A block of Python, and the blocks of text after it, which it prints.

    A block ```` ```text numbers-vary ```` shows numbers of one run, such as times. So does a block
    ```` ```text stderr ````, before the output: the last lines on standard error.
    """

    line: int
    code: str
    progress: str | None
    output: str | None
    numbers_vary: bool

    def check(self, name: str, printed: str, errors: str) -> None:
        """Checks what the block prints to standard output and to standard error."""
        self._check(name, self.output, printed, self.numbers_vary)
        # Libraries may warn on standard error before that.
        self._check(name, self.progress and f"...{self.progress}", errors, numbers_vary=True)

    def _check(self, name: str, shown: str | None, printed: str, numbers_vary: bool) -> None:
        message = f"{name}:{self.line} prints\n{printed}and not\n{shown}"
        assert shown is None or fits(shown, printed, numbers_vary=numbers_vary), message


def pages() -> dict[str, str]:
    """Returns the text of each page."""
    files = [fresh.ROOT / "README.md", *sorted((fresh.ROOT / "docs").rglob("*.md"))]
    return {str(file.relative_to(fresh.ROOT)): file.read_text() for file in files}


def blocks(text: str) -> list[Block]:
    """Returns the blocks of Python that can run."""
    matches = _BLOCK.finditer(text)
    return [
        Block(
            text.count("\n", 0, m.start()) + 1,
            *(m["code"], m["progress"], m["output"]),
            m["option"] is not None,
        )
        for m in matches
    ]


PAGES = pages()
WITH_CODE = [name for name, text in PAGES.items() if blocks(text)]


def program(text: str) -> str:
    """Returns the code of a page as one program, in which every line keeps its number.

    The fence below a block becomes a line that marks the end of its output.
    """
    lines: list[str] = []
    for block in blocks(text):
        lines += [""] * (block.line - len(lines))
        lines += [*block.code.splitlines(), _MARK]
    return "\n".join(lines) + "\n"


def check_as_program(
    name: str, folder: Path, environment: dict[str, str] | None = None, *, on_gpus: bool = False
) -> None:
    """Runs a page as a program in a new process, and checks what it prints.

    Args:
        name: Name of the page.
        folder: Working directory, empty.
        environment: Variables to add. All variables that configure JAX are unset, so without GPUs
            there is one host device unless the page creates more.
        on_gpus: Whether it runs on GPUs: numbers vary, and a page for more GPUs is skipped.
    """
    file = folder / Path(name).name  # so that a traceback names the page and its line
    file.write_text(program(PAGES[name]))
    done = subprocess.run(
        [sys.executable, *STRICT, file.name],
        env={**fresh.INHERITED, "PYTHONPATH": str(fresh.ROOT), **(environment or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=fresh.LIMIT_SECS,
        check=False,
    )
    if on_gpus and "mirror.InvalidDeviceError: MirroredStrategy(" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stderr}"
    streams = done.stdout.split(_END), done.stderr.split(_END)
    for block, printed, errors in zip(blocks(PAGES[name]), *streams, strict=False):
        block = block._replace(numbers_vary=block.numbers_vary or on_gpus)
        block.check(name, printed, errors)
