"""The curves of a training, as a picture file."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from mirror.demo.loop import History
from mirror.demo.options import OptionError


def require_writable(file: Path) -> None:
    """Refuses a picture file that could not be written, before anything is trained.

    Raises:
        OptionError: an unknown format, or no such folder.
    """
    known = FigureCanvasAgg.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise OptionError(
            f"--plot {file}: the name's ending says the format, and {file.name!r} ends in none of "
            f"{', '.join(sorted(known))}. For example --plot {file.with_suffix('.png')}"
        )
    if file.is_dir() or not file.parent.is_dir():
        wrong = file if file.is_dir() else file.parent
        what = "is a folder" if file.is_dir() else "is no folder"
        raise OptionError(f"--plot {file}: {wrong} {what}. Name a file in a folder that exists.")


def save(history: History, title: str, file: Path) -> None:
    """Draws loss and accuracy over the epochs, of training and test images."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_loss(left, history)
    _draw_accuracy(right, history)
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(file, dpi=120)


def _epochs(history: History) -> np.ndarray:
    return np.arange(1, len(history.train) + 1)


def _draw_loss(axes: Axes, history: History) -> None:
    losses = np.concatenate([meter.step_losses for meter in history.train])
    steps = (np.arange(len(losses)) + 1) / len(losses) * len(history.train)
    axes.plot(steps, losses, color="C0", alpha=0.3, linewidth=0.8, label="training, each step")
    mean = [meter.loss for meter in history.train]
    axes.plot(_epochs(history) - 0.5, mean, "o-", color="C0", markersize=3, label="training")
    test = [meter.loss for meter in history.test]
    axes.plot(_epochs(history), test, "s-", color="C1", markersize=3, label="test")
    axes.set_yscale("log")
    axes.set_title("loss")


def _draw_accuracy(axes: Axes, history: History) -> None:
    train = [meter.accuracy for meter in history.train]
    axes.plot(_epochs(history) - 0.5, train, "o-", color="C0", markersize=3, label="training")
    test = [meter.accuracy for meter in history.test]
    axes.plot(_epochs(history), test, "s-", color="C1", markersize=3, label="test")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title("accuracy")
