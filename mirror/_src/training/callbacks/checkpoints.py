"""`Checkpoint`: saves the last checkpoints, the best one, and one when the process ends."""

import signal
import threading
from pathlib import Path
from typing import Any, ClassVar, NoReturn, final

from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.callbacks.stopping import Mode, monitored, require_mode
from mirror._src.training.checkpoints.store import CheckpointStore
from mirror._src.training.fit import TrainingRun
from mirror._src.utils.errors import require_int
from mirror._src.utils.modules import set_module

_TERMINATED = 128 + signal.SIGTERM


@set_module("mirror.callbacks")
@final
class Checkpoint(Callback):
    """Writes checkpoints that `trainer.restore(directory)` reads, on any number of replicas.

    Writes are atomic: if the process is killed while writing, the previous checkpoint remains. They
    happen in the background; `fit` raises their errors at the next checkpoint or at the end.

    On SIGTERM (for example, when a preemptible VM is reclaimed), it finishes the current step,
    writes a checkpoint, and exits with status 143. Run the program again with
    `trainer.restore(directory)` to resume. This requires that `fit` runs in the main thread and
    that the program does not handle SIGTERM.

    Args:
        directory: Directory of checkpoints; each is a subdirectory named after its step.
        every_epochs: Number of epochs between checkpoints. 0 disables them.
        every_steps: Number of steps between additional checkpoints. 0 disables them.
        keep: Number of last checkpoints to keep. None keeps all.
        monitor: Metric, such as `"val_loss"`, whose best checkpoint is kept as well, for
            `trainer.restore(directory, "best")`.
        mode: Whether the best value of the metric is the `"min"` or the `"max"`.
        asynchronous: Whether to write in the background.

    Raises:
        ValueError: If a number is out of range or `mode` is unknown. In `fit`, if `monitor` is not
            a metric.
        TypeError: If a number is not an integer.
        OSError: In `fit`, if a checkpoint cannot be written.

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
        require_int("every_epochs", every_epochs, 0)
        require_int("every_steps", every_steps, 0)
        if keep is not None:
            require_int("keep", keep, fix="None keeps all checkpoints.")
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
        """Writes the checkpoint of the previous epoch."""
        if self._due and fit.position.epoch % self._every_epochs == 0:
            self._save_epoch(fit)
        self._due = False

    def on_step(self, fit: TrainingRun) -> None:
        """Writes a checkpoint if it is due or the process has received SIGTERM."""
        if self._terminated:
            self._save(fit)
            self._end_process()
        if self._every_steps and fit.position.step - self._saved >= self._every_steps:
            self._save(fit)

    def on_epoch_end(self, fit: TrainingRun, logs: dict[str, float]) -> None:  # noqa: ARG002
        """Marks a checkpoint as due; it is written when all callbacks have seen the epoch."""
        self._due = bool(self._every_epochs)

    def on_fit_end(self, fit: TrainingRun) -> None:
        """Writes the last checkpoint, and waits for pending writes."""
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
