"""Writing metrics down: in a CSV file, for TensorBoard, and the learning rate among them."""

import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, final

import numpy as np
import optax

from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.fit import TrainingRun
from mirror._src.utils.modules import set_module
from mirror._src.utils.optional import require


@set_module("mirror.callbacks")
@final
class CSVLogger(Callback):
    """Writes a line for each epoch into a file.

    Args:
        file: its name; folders are made.
        append: whether to write behind what is there. A training that goes on does so anyway, and
            takes away the lines of epochs that it trains again.

    Raises:
        ValueError: in `fit`, the file's columns are others than the metrics.

    >>> history = trainer.fit(data, epochs=2, callbacks=CSVLogger("log.csv"), progress=False)
    >>> print(Path("log.csv").read_text())
    epoch,loss
    1,...
    2,...
    """

    def __init__(self, file: str | Path, *, append: bool = False) -> None:
        self._path = Path(file).expanduser()
        self._append = append
        self._file: TextIO | None = None

    def on_fit_begin(self, fit: TrainingRun) -> None:
        """Opens the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        done = fit.history.epochs
        behind = (self._append or bool(done)) and self._path.exists()
        if behind and done:
            _take_back(self._path, done[-1])
        self._columns = next(iter(_rows_of(self._path)), None) if behind else None
        self._file = self._path.open("a" if self._columns else "w", newline="")

    def on_epoch_end(self, fit: TrainingRun, logs: dict[str, float]) -> None:
        """Writes a line, and the columns' names before the first."""
        assert self._file is not None
        columns = ["epoch", *logs]
        writer = csv.writer(self._file)
        if self._columns is None:
            self._columns = columns
            writer.writerow(columns)
        if columns != self._columns:
            raise ValueError(
                f"{self._path} has the columns {', '.join(self._columns)}, and this epoch "
                f"{', '.join(columns)}. Write to another file."
            )
        writer.writerow([fit.history.epochs[-1] + 1, *logs.values()])
        self._file.flush()

    def on_fit_end(self, fit: TrainingRun) -> None:  # noqa: ARG002
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        self._file = None


def _rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def _take_back(path: Path, last_epoch: int) -> None:
    """Takes away the last lines if a training that was killed had gone further than this one."""
    rows = _rows_of(path)
    count = len(rows)
    while count > 1 and not _is_done(rows[count - 1], rows[0], last_epoch):
        count -= 1
    if count < len(rows):
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(rows[:count])


def _is_done(row: list[str], columns: list[str], last_epoch: int) -> bool:
    return len(row) == len(columns) and row[0].isdecimal() and int(row[0]) <= last_epoch + 1


@set_module("mirror.callbacks")
@final
class TensorBoard(Callback):
    """Writes metrics for TensorBoard: of each epoch, of steps, and the program of a step as text.

    Args:
        directory: of the log.
        every_steps: also write the metrics of every so many steps; 0: of epochs only.
        program: whether to write the compiled step's program, at the first step.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
        ValueError: a negative `every_steps`.

    >>> history = trainer.fit(data, callbacks=TensorBoard("logs"), progress=False)
    >>> len(list(Path("logs").iterdir()))
    1
    """

    def __init__(
        self, directory: str | Path, *, every_steps: int = 0, program: bool = False
    ) -> None:
        if every_steps < 0:
            raise ValueError(f"every_steps={every_steps} is negative.")
        self._writer_class = require("tensorboardX").SummaryWriter
        self._directory = Path(directory).expanduser()
        self._every_steps = every_steps
        self._program = program
        self._written = 0
        self._writer: Any = None

    def on_fit_begin(self, fit: TrainingRun) -> None:
        """Opens the log."""
        suffix = f".{time.time_ns()}"  # or two in one second would have one file
        self._writer = self._writer_class(str(self._directory), filename_suffix=suffix)
        self._written = fit.position.step

    def on_step(self, fit: TrainingRun) -> None:
        """Writes the program, once."""
        if self._program:
            self._program = False
            text = fit.trainer.lowered_text()
            self._writer.add_text("program", f"```\n{text}\n```", fit.position.step)

    def on_metrics(self, fit: TrainingRun, step: int, logs: dict[str, float]) -> None:  # noqa: ARG002
        """Writes the metrics of steps."""
        if self._every_steps and step - self._written >= self._every_steps:
            self._written = step
            self._add({f"step_{name}": value for name, value in logs.items()}, step)

    def on_epoch_end(self, fit: TrainingRun, logs: dict[str, float]) -> None:
        """Writes the metrics of the epoch."""
        self._add(logs, fit.history.epochs[-1] + 1)
        self._writer.flush()

    def on_fit_end(self, fit: TrainingRun) -> None:  # noqa: ARG002
        """Closes the log."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _add(self, logs: dict[str, float], step: int) -> None:
        for name, value in logs.items():
            self._writer.add_scalar(name, value, step)


@set_module("mirror.callbacks")
@final
class LearningRate(Callback):
    """Puts the learning rate among the metrics of each epoch, as `learning_rate`.

    Args:
        schedule: the one the optimizer was made with, of the number of updates; `None`: it stands
            in the optimizer's state, where `optax.inject_hyperparams` put it.

    Raises:
        ValueError: in `fit`, there is no schedule and no learning rate in the state.

    >>> rate = LearningRate(optax.constant_schedule(0.125))
    >>> trainer.fit(data, epochs=2, callbacks=rate, progress=False)["learning_rate"]
    [0.125, 0.125]
    """

    def __init__(self, schedule: Callable[[int], Any] | None = None) -> None:
        self._schedule = schedule

    def on_fit_begin(self, fit: TrainingRun) -> None:
        """Looks whether it will be found."""
        self._rate(fit)

    def on_epoch_end(self, fit: TrainingRun, logs: dict[str, float]) -> None:
        """Adds it: the rate that the last update had."""
        logs["learning_rate"] = self._rate(fit)

    def _rate(self, fit: TrainingRun) -> float:
        if self._schedule is not None:
            return float(np.asarray(self._schedule(max(fit.position.step - 1, 0))))
        found = optax.tree_utils.tree_get_all_with_path(
            fit.trainer.optimizer.opt_state, "learning_rate"
        )
        if not found:
            raise ValueError(
                "The optimizer's state has no learning_rate. Pass the schedule, "
                "LearningRate(schedule), or make the optimizer with "
                "optax.inject_hyperparams(optax.adam)(learning_rate=...)."
            )
        return float(np.asarray(found[0][1][...]))
