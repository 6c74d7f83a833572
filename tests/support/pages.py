"""The pages of the documentation, and the blocks of Python in them."""

import re
from typing import NamedTuple

from tests.support import fresh

_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n\n?^```text\n(?P<output>.*?)^```$)?", re.DOTALL | re.M
)


class Block(NamedTuple):
    """A block of Python, and the block of text after it, which it prints."""

    line: int
    code: str
    output: str | None


def pages() -> dict[str, str]:
    """Returns the text of each page."""
    files = [fresh.ROOT / "README.md", *sorted((fresh.ROOT / "docs").rglob("*.md"))]
    return {str(file.relative_to(fresh.ROOT)): file.read_text() for file in files}


def blocks(text: str) -> list[Block]:
    """Returns the blocks of Python that can run."""
    matches = _BLOCK.finditer(text)
    return [Block(text.count("\n", 0, m.start()) + 1, m["code"], m["output"]) for m in matches]


PAGES = pages()
WITH_CODE = [name for name, text in PAGES.items() if blocks(text)]
