"""`ProgressBar`: a progress bar in terminals and notebooks, one line per epoch in log files."""

import importlib.util
import sys
import warnings
from collections.abc import Mapping
from typing import Any, TextIO, final

from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.fit import TrainingRun
from mirror._src.utils.errors import counted
from mirror._src.utils.modules import set_module
from mirror._src.utils.optional import require

_BAR = "{desc} {percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} {rate_fmt}{postfix}"


@set_module("mirror.callbacks")
@final
class ProgressBar(Callback):
    """Shows the progress and the metrics of an epoch, and prints a line with them at its end.

    `fit` adds one automatically. If the output is neither a terminal nor a notebook, only the lines
    are printed.

    Args:
        file: File to write to. Defaults to `sys.stderr`, looked up at every use.

    >>> import sys
    >>> history = trainer.fit(data, epochs=2, callbacks=ProgressBar(sys.stdout))
    epoch 1/2: loss ..., ... s
    epoch 2/2: loss ..., ... s
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._bar: Any = None

    def on_fit_begin(self, fit: TrainingRun) -> None:
        """Reports where a training resumes, or that there is nothing to do."""
        position = fit.position
        if position.epoch >= fit.epochs:
            self._print(f"nothing to do: training is complete ({counted(fit.epochs, 'epoch')})")
        elif position.samples:
            self._print(f"resuming epoch {position.epoch + 1} after {position.samples} examples")

    def on_epoch_begin(self, fit: TrainingRun) -> None:
        """Opens a new bar."""
        title = f"epoch {fit.position.epoch + 1}/{fit.epochs}"
        if is_interactive(self._out) and _has_tqdm():
            self._bar = _bar(self._out, title, fit.steps_per_epoch, fit.position.epoch_step)

    def on_metrics(self, fit: TrainingRun, step: int, logs: dict[str, float]) -> None:  # noqa: ARG002
        """Advances the bar."""
        if self._bar is None:
            return
        done = fit.position.epoch_step - (fit.position.step - step)
        self._bar.set_postfix_str(in_words(fit.logs), refresh=False)
        self._bar.update(done - self._bar.n)

    def on_epoch_end(self, fit: TrainingRun, logs: dict[str, float]) -> None:
        """Replaces the bar by a line with the metrics."""
        self._close()
        epoch, seconds = fit.position.epoch, fit.history.epoch_secs[-1]
        self._print(f"epoch {epoch}/{fit.epochs}: {in_words(logs)}, {seconds:.1f} s")

    def on_fit_end(self, fit: TrainingRun) -> None:
        """Prints why a callback stopped the training, if one did."""
        self._close()
        if fit.stopped:
            self._print(f"stopped: {fit.stopped}")

    @property
    def _out(self) -> TextIO:
        return sys.stderr if self._file is None else self._file

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)


def in_words(logs: Mapping[str, float]) -> str:
    """Formats metrics: `loss 0.1234, accuracy 0.9876`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in logs.items())


def is_interactive(file: TextIO) -> bool:
    """Whether the file is a terminal or the output of a notebook."""
    return file.isatty() or _in_notebook()


def _has_tqdm() -> bool:
    """Whether tqdm is installed, which draws the bar."""
    return importlib.util.find_spec("tqdm") is not None


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and "IPKernelApp" in getattr(ipython.get_ipython(), "config", {})


def _bar(file: TextIO, title: str, total: int | None, done: int) -> Any:
    with warnings.catch_warnings():  # tqdm warns in notebooks without ipywidgets
        warnings.simplefilter("ignore")
        return require("tqdm.auto").tqdm(
            desc=title,
            total=total,
            initial=done,
            file=None if _in_notebook() else file,
            unit=" steps",
            leave=False,
            bar_format=None if total is None or _in_notebook() else _BAR,
        )
