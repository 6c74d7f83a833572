"""Tables and figures for terminals and notebooks."""

import html
import io
from collections.abc import Iterable, Sequence
from typing import Any, final

from mirror._src.utils.modules import set_module
from mirror._src.utils.optional import require


@set_module("mirror.debugging")
@final
class Table:
    """Table of text that prints aligned, and renders as HTML in notebooks.

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
        rows = [self.headings, *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.headings))]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(h)}</th>" for h in self.headings)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


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
