"""Checkpoints while training, and at its end: the last ones, the best one, and when told to end."""

import signal
import threading
from pathlib import Path
from typing import Any, ClassVar, NoReturn, final

from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.callbacks.stopping import Mode, monitored, require_mode
from mirror._src.training.checkpoints.store import CheckpointStore
from mirror._src.training.fit import TrainingRun
from mirror._src.utils.modules import set_module

_TERMINATED = 128 + signal.SIGTERM


@set_module("mirror.callbacks")
@final
class Checkpoint(Callback):
    """Writes checkpoints that `trainer.restore(directory)` reads, on any number of replicas.

    Each is whole or not there: a process that is killed while it writes leaves the one before. They
    are written in the background; an error of that comes out of `fit`, at the next one or the end.

    When the process is told to end (SIGTERM, as before a machine is taken away), the step under way
    is finished, a checkpoint is written, and the process ends with status 143; run it again with
    `trainer.restore(directory)`, and `fit` goes on. So it is in the main thread, unless the program
    handles SIGTERM itself.

    Args:
        directory: where they go, each into a folder named after its step.
        every_epochs: write one after every so many epochs; 0: none.
        every_steps: write one after every so many steps, too; 0: none.
        keep: how many of the last ones to keep; `None`: all.
        monitor: a metric, such as `"val_loss"`, the best checkpoint of which is kept as well:
            `trainer.restore(directory, "best")`.
        mode: whether less or more of it is better.
        asynchronous: whether to write in the background.

    Raises:
        ValueError: numbers below 0, or an unknown mode; in `fit`, no such metric.
        OSError: in `fit`, it cannot be written.

    >>> checkpoint = Checkpoint("ckpt", keep=2, monitor="loss")
    >>> history = trainer.fit(data, epochs=2, callbacks=checkpoint, progress=False)
    >>> trainer.restore("ckpt")
    >>> trainer.fit(data, epochs=3, progress=False).epochs
    [0, 1, 2]
    """

    runs_last: ClassVar[bool] = True

    def __init__(
        self,
        directory: str | Path,
        *,
        every_epochs: int = 1,
        every_steps: int = 0,
        keep: int | None = 3,
        monitor: str | None = None,
        mode: Mode = "min",
        asynchronous: bool = True,
    ) -> None:
        require_mode(mode)
        if min(every_epochs, every_steps) < 0 or (keep is not None and keep < 1):
            raise ValueError(
                f"every_epochs={every_epochs}, every_steps={every_steps}, keep={keep}: the first "
                "two are 0 or more, and keep is 1 or more, or None for all."
            )
        self._directory = directory
        self._every_epochs, self._every_steps = every_epochs, every_steps
        self._monitor = monitor
        self._best = None if monitor is None else (monitor, mode)
        self._keep, self._asynchronous = keep, asynchronous
        self._store: CheckpointStore | None = None
        self._due = False
        self._terminated = False
        self._handles = False

    def on_fit_begin(self, fit: TrainingRun) -> None:
        """Opens the directory."""
        self._store = CheckpointStore(
            self._directory,
            keep_last=self._keep,
            keep_best=self._best,
            asynchronous=self._asynchronous,
        )
        self._saved, self._due = fit.position.step, False
        self._listen()

    def on_epoch_begin(self, fit: TrainingRun) -> None:
        """Writes the one of the epoch before."""
        if self._due and fit.position.epoch % self._every_epochs == 0:
            self._save_epoch(fit)
        self._due = False

    def on_step(self, fit: TrainingRun) -> None:
        """Writes one if it is time, or time to go."""
        if self._terminated:
            self._save(fit)
            self._end_process()
        if self._every_steps and fit.position.step - self._saved >= self._every_steps:
            self._save(fit)

    def on_epoch_end(self, fit: TrainingRun, logs: dict[str, float]) -> None:  # noqa: ARG002
        """One is due, when the other callbacks have seen the epoch: it holds what they keep."""
        self._due = bool(self._every_epochs)

    def on_fit_end(self, fit: TrainingRun) -> None:
        """Writes the last one, and waits for what is being written."""
        try:
            if self._due:
                self._save_epoch(fit)
            elif self._terminated and fit.position.step != self._saved:
                self._save(fit)
        finally:
            self._close()
        if self._terminated:
            self._end_process()

    def _end_process(self) -> NoReturn:
        self._close()
        self._terminated = False
        raise SystemExit(_TERMINATED)

    def _save_epoch(self, fit: TrainingRun) -> None:
        self._due = False
        metrics = {name: column[-1] for name, column in fit.history.items()}
        if self._monitor is not None:
            monitored(self, self._monitor, metrics)
        self._save(fit, metrics)

    def _save(self, fit: TrainingRun, metrics: dict[str, float] | None = None) -> None:
        assert self._store is not None
        arrays, position = fit.trainer.checkpoint_state()
        self._store.save(fit.position.step, arrays, position, metrics)
        self._saved = fit.position.step

    def _close(self) -> None:
        store, self._store = self._store, None
        try:
            if store is not None:
                store.close()
        finally:
            if self._handles:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._handles = False

    def _listen(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self._handles = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        self._terminated = False
        if self._handles:
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, signum: int, frame: Any) -> None:  # noqa: ARG002
        self._terminated = True
