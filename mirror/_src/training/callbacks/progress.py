"""`ProgressBar`: a bar in terminals, a table in notebooks, one line per epoch in log files."""

import sys
from typing import ClassVar, Protocol, TextIO, final

from mirror._src.base.errors import counted
from mirror._src.base.modules import set_module
from mirror._src.base.notebook import in_notebook
from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.callbacks.notebook_progress import NotebookProgress
from mirror._src.training.callbacks.terminal_progress import (
    LogProgress,
    TerminalProgress,
    is_terminal,
)
from mirror._src.training.fit import TrainingRun


class Progress(Protocol):
    """Display of the progress of one fit."""

    def begin_epoch(self, fit: TrainingRun) -> None:
        """Starts to show an epoch."""
        ...

    def after_step(self, fit: TrainingRun) -> None:
        """Notes that the first step is compiled."""
        ...

    def update(self, fit: TrainingRun, done: int) -> None:
        """Shows the number of finished steps and the metrics of the epoch so far."""
        ...

    def end_epoch(self, fit: TrainingRun, logs: dict[str, float]) -> None:
        """Shows the metrics of the epoch that has just ended."""
        ...

    def note(self, text: str) -> None:
        """Shows a sentence."""
        ...

    def close(self, fit: TrainingRun) -> None:
        """Removes everything but the results."""
        ...


@set_module("mirror.callbacks")
@final
class ProgressBar(Callback):
    """Shows the progress and the metrics of an epoch, and prints a line with them at its end.

    `fit` adds one automatically. In a notebook, it shows a table with one row per epoch instead. If
    the output is neither a terminal nor a notebook, only the lines are printed.

    Args:
        file: File to write to, also in a notebook. Defaults to the output of the notebook, or to
            `sys.stderr`, looked up when `fit` begins.

    >>> import sys
    >>> history = trainer.fit(data, epochs=2, callbacks=ProgressBar(sys.stdout))
    epoch 1/2 on 2 replicas: loss ..., ... s
    epoch 2/2: loss ..., ... s
    """

    runs_on_chief_only: ClassVar[bool] = True

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._progress: Progress | None = None

    def on_fit_begin(self, fit: TrainingRun) -> None:
        """Reports where a training resumes, or that there is nothing to do."""
        self._progress = self._new_progress(fit)
        if self._progress is None:
            return
        position = fit.position
        if position.epoch >= fit.epochs:
            words = f"nothing to do: training is complete ({counted(fit.epochs, 'epoch')})"
            self._progress.note(words)
        elif position.samples:
            words = f"resuming epoch {position.epoch + 1} after {position.samples} examples"
            self._progress.note(words)

    def on_epoch_begin(self, fit: TrainingRun) -> None:
        """Opens a new bar."""
        if self._progress is not None:
            self._progress.begin_epoch(fit)

    def on_step(self, fit: TrainingRun) -> None:
        """Shows the bar once the first step is compiled."""
        if self._progress is not None:
            self._progress.after_step(fit)

    def on_metrics(self, fit: TrainingRun, step: int, logs: dict[str, float]) -> None:  # noqa: ARG002
        """Advances the bar."""
        if self._progress is not None:
            done = fit.position.epoch_step - (fit.position.step - step)
            self._progress.update(fit, done)

    def on_epoch_end(self, fit: TrainingRun, logs: dict[str, float]) -> None:
        """Replaces the bar by a line with the metrics."""
        if self._progress is not None:
            self._progress.end_epoch(fit, logs)

    def on_fit_end(self, fit: TrainingRun) -> None:
        """Reports why a callback stopped the training, if one did."""
        if self._progress is not None:
            if fit.stopped:
                self._progress.note(f"stopped: {fit.stopped}")
            self._progress.close(fit)
        self._progress = None

    def _new_progress(self, fit: TrainingRun) -> Progress | None:
        if self._file is None and in_notebook():
            return NotebookProgress(fit)
        # A service, such as a daemon, may have no standard error.
        file: TextIO | None = sys.stderr if self._file is None else self._file
        if file is None or (self._file is None and file.closed):
            return None
        return TerminalProgress(file) if is_terminal(file) else LogProgress(file)
