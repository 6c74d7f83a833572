"""Text and tables for terminals and notebooks."""

import abc
import html
import io
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, final

from mirror._src.base.optional import require
from mirror._src.base.public_names import set_module


def in_notebook() -> bool:
    """Whether displayed objects go to a notebook, and not as text to a terminal.

    Every kernel replaces IPython's publisher, which prints: ipykernel, Colab, VS Code, JupyterLite.
    """
    shell = _shell()
    if shell is None:
        return False
    from IPython.core.displaypub import DisplayPublisher

    return type(shell.display_pub) is not DisplayPublisher


def current_cell() -> int | None:
    """Returns the number of the running cell; None outside IPython."""
    shell = _shell()
    return None if shell is None else shell.execution_count


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


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


def paint(text: str, color: str) -> str:
    """Colors text for a terminal; see rich's documentation for `NO_COLOR` and `FORCE_COLOR`.

    Args:
        text: Text to print.
        color: Name of one of the 16 standard colors.

    Returns:
        The text unchanged if standard output is not a terminal, the terminal has no colors, or
        `NO_COLOR` is set.
    """
    # Imported here because most programs print no colors.
    from rich.color import ColorSystem
    from rich.console import Console
    from rich.style import Style

    console = Console(file=sys.stdout, force_jupyter=False)
    if console.color_system is None or console.no_color:
        return text
    return Style.parse(color).render(text, color_system=ColorSystem.STANDARD)


_Item = TypeVar("_Item")
_NUMBER = re.compile(
    r"|\.\.\.|unknown|[-+]?(\d[\d.,]*(e[-+]?\d+)?|inf|nan)( ?([KMGT]iB|bytes?|ms|s|%))?"
)
"""A cell that is aligned as a number, or that stands for a missing number."""


@set_module("mirror.debugging")
@final
class Table:
    """Table of text that prints aligned, and renders as HTML in notebooks.

    In a terminal that is too narrow, long cells are wrapped at spaces. If that is not enough, each
    row is printed as a paragraph, with one cell per line.

    Attributes:
        headings: Heading of each column.
        rows: Rows of cells.

    >>> Table(["device", "ms"], [["/device:CPU:0", "1.5"], ["/device:CPU:1", "12.5"]])
    device         ms
    /device:CPU:0  1.5
    /device:CPU:1  12.5
    """

    def __init__(self, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        self.headings = tuple(headings)
        self.rows = [tuple(row) for row in rows]

    def __repr__(self) -> str:
        rows, limit = [self.headings, *self.rows], output_width()
        columns = list(zip(*rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        least = [max(map(len, " ".join(column).split(" "))) for column in columns]
        while limit is not None and sum(widths) + 2 * len(widths) - 2 > limit:
            widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
            if widths[widest] == least[widest]:
                return self._blocks(limit)
            widths[widest] -= 1
        lines = []
        for row in rows:
            cells = [wrap(cell, widths[i]).split("\n") for i, cell in enumerate(row)]
            for parts in itertools.zip_longest(*cells, fillvalue=""):
                lines.append("  ".join(map(str.ljust, parts, widths)).rstrip())
        return "\n".join(lines)

    def _blocks(self, width: int) -> str:
        """Returns one paragraph per row, `heading: cell` in each line."""
        return "\n\n".join(
            "\n".join(
                wrap(f"{heading}: {cell}" if heading else cell, width, indent="  ")
                for heading, cell in zip(self.headings, row, strict=True)
                if cell
            )
            for row in self.rows
        )

    def _repr_html_(self) -> str:
        # Notebooks align all cells to the right, and GitHub all cells to the left.
        sides = [
            "right" if any(column) and all(map(_NUMBER.fullmatch, column)) else "left"
            for column in zip(*self.rows, strict=True)
        ] or ["left"] * len(self.headings)
        head, *body = (
            "".join(
                f'<{tag} style="text-align: {side}{_unbroken(cell)}">{html.escape(cell)}</{tag}>'
                for side, cell in zip(sides, row, strict=True)
            )
            for tag, row in [("th", self.headings), *(("td", row) for row in self.rows)]
        )
        rows = "".join(f"<tr>{cells}</tr>" for cells in body)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


class Report(abc.ABC):
    """Base class of reports, which print as text, and render as HTML in notebooks."""

    @property
    @abc.abstractmethod
    def heading(self) -> str:
        """Summary in one line."""

    @abc.abstractmethod
    def _parts(self) -> Iterable[Table | list[str] | str]:
        """Returns what follows the heading: tables, lists of sentences, and text in lines."""

    def __repr__(self) -> str:
        texts = ("\n".join(x) if isinstance(x, list) else str(x) for x in self._parts())
        return wrap("\n\n".join([self.heading, *texts]))

    def _repr_html_(self) -> str:
        parts = [f"<b>{html.escape(self.heading)}</b>"]
        for each in self._parts():
            if isinstance(each, Table):
                parts.append(each._repr_html_())
            elif isinstance(each, list):
                parts += [f"<p>{html.escape(sentence)}</p>" for sentence in each]
            else:
                parts.append(f"<pre>{html.escape(each)}</pre>")
        return "".join(parts)


def _unbroken(cell: str) -> str:
    """Returns the style that keeps a short cell on one line."""
    return "; white-space: nowrap" if len(cell) <= 20 else ""


def folded_table(
    headings: Sequence[str],
    items: Sequence[_Item],
    row_of: Callable[[_Item], Sequence[str]],
    first: int,
    last: int,
) -> Table:
    """Returns a table of the first and the last items, with a row of dots for the others.

    Args:
        headings: Heading of each column.
        items: One item per row.
        row_of: Returns the cells of an item.
        first: Number of items to show at the beginning.
        last: Number of items to show at the end.
    """
    if len(items) <= first + last + 1:
        return Table(headings, map(row_of, items))
    dots = tuple("..." for _ in headings)
    return Table(headings, [*map(row_of, items[:first]), dots, *map(row_of, items[-last:])])


def new_figure(width: float, height: float) -> Any:
    """Returns an empty `matplotlib.figure.Figure`, sized in inches, that notebooks display.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    figure = require("matplotlib.figure").Figure((width, height), layout="constrained")

    def as_png() -> bytes:
        with io.BytesIO() as file:
            figure.savefig(file, format="png", dpi=100)
            return file.getvalue()

    # Notebooks display figures of pyplot only; for other figures they call `_repr_png_`.
    figure._repr_png_ = as_png
    return figure
