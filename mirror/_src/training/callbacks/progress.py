"""A progress bar in a terminal and in a notebook; in a log file, a line for each epoch."""

import importlib.util
import sys
import warnings
from collections.abc import Mapping
from typing import Any, TextIO, final

from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.fit import TrainingRun
from mirror._src.utils.modules import set_module
from mirror._src.utils.optional import require

_BAR = "{desc} {percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} {rate_fmt}{postfix}"


@set_module("mirror.callbacks")
@final
class ProgressBar(Callback):
    """Shows how far an epoch is, its metrics so far, and at its end a line with all of them.

    `fit` adds one by itself. Where the output is no terminal and no notebook, there is no bar, but
    the line.

    Args:
        file: where to write; `None`: standard error, as it is when the training begins.

    >>> history = trainer.fit(data, epochs=2, callbacks=ProgressBar(sys.stdout))
    epoch 1/2: loss ..., ... s
    epoch 2/2: loss ..., ... s
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._bar: Any = None

    def on_fit_begin(self, fit: TrainingRun) -> None:
        """Says so where a training goes on in the middle."""
        position = fit.position
        if position.epoch >= fit.epochs:
            self._say(f"nothing to train: {position.epoch} of {fit.epochs} epochs are done")
        elif position.samples:
            self._say(
                f"going on in epoch {position.epoch + 1}, after {position.samples} examples of it"
            )

    def on_epoch_begin(self, fit: TrainingRun) -> None:
        """A new bar."""
        title = f"epoch {fit.position.epoch + 1}/{fit.epochs}"
        if is_watched(self._out) and _has_tqdm():
            self._bar = _bar(self._out, title, fit.steps_per_epoch, fit.position.epoch_step)

    def on_metrics(self, fit: TrainingRun, step: int, logs: dict[str, float]) -> None:  # noqa: ARG002
        """Moves the bar on."""
        if self._bar is None:
            return
        done = fit.position.epoch_step - (fit.position.step - step)
        self._bar.set_postfix_str(in_words(fit.logs), refresh=False)
        self._bar.update(done - self._bar.n)

    def on_epoch_end(self, fit: TrainingRun, logs: dict[str, float]) -> None:
        """A line that stays."""
        self._close()
        epoch, seconds = fit.position.epoch, fit.history.epoch_secs[-1]
        self._say(f"epoch {epoch}/{fit.epochs}: {in_words(logs)}, {seconds:.1f} s")

    def on_fit_end(self, fit: TrainingRun) -> None:
        """Says why the training ended early, if a callback ended it."""
        self._close()
        if fit.stopped:
            self._say(f"stopped: {fit.stopped}")

    @property
    def _out(self) -> TextIO:
        return sys.stderr if self._file is None else self._file

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)


def in_words(logs: Mapping[str, float]) -> str:
    """`loss 0.1234, accuracy 0.9876`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in logs.items())


def is_watched(file: TextIO) -> bool:
    """Whether somebody looks on: a terminal, or a notebook's output."""
    return file.isatty() or _in_notebook()


def _has_tqdm() -> bool:
    """Without it there are only the lines."""
    return importlib.util.find_spec("tqdm") is not None


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and "IPKernelApp" in getattr(ipython.get_ipython(), "config", {})


def _bar(file: TextIO, title: str, total: int | None, done: int) -> Any:
    with warnings.catch_warnings():  # in a notebook without ipywidgets it is made of text
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
