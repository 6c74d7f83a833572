"""`History`: the metrics of each epoch, as a mapping, a table and a plot."""

import html
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from mirror._src.base.errors import expected, nearest
from mirror._src.base.optional import require
from mirror._src.base.public_names import set_module
from mirror._src.base.terminal import Table, current_cell, new_figure

_VALIDATION = "val_"


@set_module("mirror")
@final
class History(Mapping[str, list[float]]):
    """Metrics by name, one number per epoch: `history["val_loss"][-1]`.

    `print` shows a table; a notebook shows the table and the curves. A metric that an epoch did not
    measure is NaN.

    Attributes:
        epochs: Numbers of the epochs, from 0.
        epoch_secs: Duration of each epoch in seconds, including validation.

    >>> history = trainer.fit(data, epochs=2, progress=False)
    >>> list(history), history.epochs, len(history["loss"])
    (['loss'], [0, 1], 2)
    """

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.epoch_secs: list[float] = []
        self._columns: dict[str, list[float]] = {}
        self._shown_in_cell: int | None = None

    def _mark_as_shown(self) -> None:
        """Records that the progress display of this notebook cell shows the table."""
        self._shown_in_cell = current_cell()

    def add(self, epoch: int, logs: Mapping[str, float], seconds: float) -> None:
        """Adds the metrics of an epoch."""
        for name in logs:
            self._columns.setdefault(name, [float("nan")] * len(self.epochs))
        for name, column in self._columns.items():
            column.append(float(logs.get(name, float("nan"))))
        self.epochs.append(epoch)
        self.epoch_secs.append(seconds)

    def add_to_last(self, logs: Mapping[str, float]) -> None:
        """Adds more metrics to the last epoch.

        Raises:
            TypeError: If one is not a number.
        """
        numbers = {name: _number(name, value) for name, value in logs.items()}
        for name, number in numbers.items():
            column = self._columns.setdefault(name, [float("nan")] * len(self.epochs))
            column[-1] = number

    def __getitem__(self, name: str) -> list[float]:
        if name not in self._columns:
            metrics = ", ".join(self._columns) or "no metrics"
            near = nearest(str(name), self._columns)
            raise KeyError(f"{name!r} is not in the history, which has {metrics}.{near}")
        return self._columns[name]

    def __getattr__(self, name: str) -> Any:
        if name == "history":
            text = "A mirror.History is what Keras calls history.history: history['loss']."
            raise AttributeError(text, name=name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def to_dict(self) -> dict[str, Any]:
        """Returns the history as JSON."""
        return {"epochs": self.epochs, "seconds": self.epoch_secs, "metrics": self._columns}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "History":
        """Returns the history of a `to_dict` result.

        Raises:
            ValueError: If the columns have different lengths.
        """
        history = cls()
        history.epochs, history.epoch_secs = list(state["epochs"]), list(state["seconds"])
        history._columns = {name: list(column) for name, column in state["metrics"].items()}
        columns = [history.epoch_secs, *history._columns.values()]
        if any(len(column) != len(history.epochs) for column in columns):
            raise ValueError("its columns have different lengths")
        return history

    @property
    def table(self) -> Table:
        """A table with one row per epoch, counted from 1."""
        return Table(self._headings, map(self._row, range(len(self.epochs))))

    @property
    def _headings(self) -> tuple[str, ...]:
        return ("epoch", *self, "seconds")

    def _row(self, i: int) -> tuple[str, ...]:
        metrics = (f"{self[name][i]:.4g}" for name in self)
        return str(self.epochs[i] + 1), *metrics, f"{self.epoch_secs[i]:.1f}"

    def __repr__(self) -> str:
        return repr(self.table) if self.epochs else "History of no epochs"

    def _repr_html_(self) -> str:
        if not self.epochs:
            return f"<p>{html.escape(repr(self))}</p>"
        curves = self._svg() if len(self.epochs) > 1 else ""
        is_shown = self._shown_in_cell is not None and self._shown_in_cell == current_cell()
        return curves if curves and is_shown else self.table._repr_html_() + curves

    def _svg(self) -> str:
        try:
            figure = self.plot()
        except ModuleNotFoundError:
            return ""
        with io.StringIO() as file:
            figure.savefig(file, format="svg")
            text = file.getvalue()
        return text[text.index("<svg") :]

    def plot(self, file: str | Path | None = None) -> Any:
        """Plots the curves of all metrics, training and validation in one diagram each.

        Args:
            file: File to save the plot to; its suffix determines the format.

        Returns:
            A `matplotlib.figure.Figure`, which a notebook displays. No window is opened.

        Raises:
            ValueError: If the history is empty.
            ModuleNotFoundError: If matplotlib is not installed.
        """
        if not self.epochs:
            raise ValueError(
                "History is empty, so it cannot be plotted. Train first: trainer.fit(...)."
            )
        names = [n for n in self if not n.startswith(_VALIDATION) or n[4:] not in self]
        figure = new_figure(5 * len(names), 3.5)
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            self._draw(axes, name)
        if file is not None:
            figure.savefig(file, dpi=120)
        return figure

    def _draw(self, axes: Any, name: str) -> None:
        epochs = [epoch + 1 for epoch in self.epochs]
        for column, label in ((name, "training"), (_VALIDATION + name, "validation")):
            if column in self:
                axes.plot(epochs, self[column], "o-", markersize=3, label=label)
        axes.set_title(name)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(require("matplotlib.ticker").MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        fix = "A callback added it in on_epoch_end; metrics are numbers. Log other values there."
        raise TypeError(expected(f"logs[{name!r}]", value, "a number", fix)) from None
