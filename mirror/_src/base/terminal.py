"""The width and the colors of the terminal."""

import os
import sys
import textwrap
from typing import TextIO


def output_width() -> int | None:
    """Returns the number of columns that printed text should fit into.

    None, no limit, if standard output is not a terminal and `COLUMNS` is not set: lines in files
    and pipes are not wrapped.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError, AttributeError):  # not a terminal, or not a file of the system
        return None


def wrap(text: str, width: int | None = None, indent: str = "") -> str:
    """Wraps each line at spaces, never inside a word or a number.

    Args:
        text: Lines of text. A space that may not be wrapped is a no-break space, U+00A0; it is
            printed as a space.
        width: Number of columns. Defaults to `output_width()`.
        indent: Start of the lines that are added.

    >>> print(wrap("loss 0.1234, accuracy 0.9876", 20))
    loss 0.1234,
    accuracy 0.9876
    """
    width = output_width() if width is None else width
    if width is not None:
        wrapper = textwrap.TextWrapper(
            width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines = (wrapper.wrap(x) if len(x) > width else [x] for x in text.split("\n"))
        text = "\n".join("\n".join(part) for part in lines)
    return text.replace("\N{NO-BREAK SPACE}", " ")


def paint(text: str, color: str, file: TextIO | None = None) -> str:
    """Colors text for a terminal; see rich's documentation for `NO_COLOR` and `FORCE_COLOR`.

    Args:
        text: Text to print.
        color: Name of one of the 16 standard colors.
        file: File to print to. Defaults to `sys.stdout`.

    Returns:
        The text unchanged if the file is not a terminal, the terminal has no colors, or `NO_COLOR`
        is set.
    """
    # Imported here because most programs print no colors.
    from rich.color import ColorSystem
    from rich.console import Console
    from rich.style import Style

    console = Console(file=sys.stdout if file is None else file, force_jupyter=False)
    if console.color_system is None or console.no_color:
        return text
    return Style.parse(color).render(text, color_system=ColorSystem.STANDARD)
