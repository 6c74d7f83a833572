"""`Checkpoint`: saves the last checkpoints, the best one, and one when the process ends."""

from pathlib import Path
from typing import ClassVar, final

from mirror._src.base.errors import closing, require_int, require_secs
from mirror._src.base.interrupts import TERMINATED, Termination, say
from mirror._src.base.naming import warn_user
from mirror._src.base.public_names import set_module
from mirror._src.training.callbacks.callback import Callback, Monitor
from mirror._src.training.callbacks.stopping import Mode, require_mode
from mirror._src.training.checkpoints.directory import format_list
from mirror._src.training.checkpoints.snapshot import require_values
from mirror._src.training.checkpoints.store import CheckpointStore
from mirror._src.training.loop import FitLoop
from mirror._src.training.paths import is_remote


@set_module("mirror.callbacks")
@final
class Checkpoint(Callback):
    """Writes checkpoints that `trainer.restore(directory)` reads, on any number of replicas.

    Writes are atomic: if the process is killed while writing, the previous checkpoint remains. They
    happen in the background; `fit` raises their errors at the next checkpoint or at the end.

    On SIGTERM (for example, when a preemptible VM is reclaimed), it finishes the current step,
    writes a checkpoint, and exits with status 143; a line on standard error names the saved step.
    Run the program again with `trainer.restore(directory)` to resume. This requires that `fit` runs
    in the main thread and that the program does not handle SIGTERM; the handler of `ray.init` does
    not count. If `fit` is waiting for data, evaluating or running a callback, it stops waiting
    after half a second, and saves the last step. If a step, its compilation or other native code
    takes longer than `grace_secs`, the process exits without a new checkpoint and says so.

    In a job of several processes, only the chief writes. SIGTERM or Ctrl-C to any process makes all
    of them stop after the same step; the chief writes a checkpoint, and all exit.

    Args:
        directory: Directory of checkpoints, with a file such as `step-120.safetensors` for each.
            Or a URL of an object store, such as `s3://bucket/run`, where a checkpoint that could
            not be written is a warning, unless it is the last.
        every_epochs: Number of epochs between checkpoints. 0 disables them.
        every_steps: Number of steps between additional checkpoints. 0 disables them.
        keep: Number of last checkpoints to keep. None keeps all.
        monitor: Metric, such as `"val_loss"`, whose best checkpoint is kept as well, for
            `trainer.restore(directory, "best")`.
        mode: Whether the best value of the metric is the `"min"` or the `"max"`.
        asynchronous: Whether to write in the background.
        grace_secs: Number of seconds after SIGTERM in which the process ends by itself. Choose
            fewer than the environment allows before SIGKILL: 30 by default in Kubernetes and Slurm.

    Raises:
        ValueError: If a number is out of range or `mode` is unknown. In `fit`, if `monitor` is not
            a metric.
        TypeError: If a number has the wrong type.
        OSError: In `fit`, if a checkpoint cannot be written, or would replace or delete one that
            another training has written to the directory since this one began.

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
        grace_secs: float = 25.0,
    ) -> None:
        require_mode(mode)
        require_int("every_epochs", every_epochs, 0)
        require_int("every_steps", every_steps, 0)
        if keep is not None:
            require_int("keep", keep, fix="None keeps all checkpoints.")
        self._directory = directory
        self._grace_secs = require_secs("grace_secs", grace_secs, 25)
        self._every_epochs, self._every_steps = every_epochs, every_steps
        self._monitor = None if monitor is None else Monitor("Checkpoint", monitor)
        self._best = None if monitor is None else (monitor, mode)
        self._keep, self._asynchronous = keep, asynchronous
        self._store: CheckpointStore | None = None
        self._due = False

    def on_fit_begin(self, fit: FitLoop) -> None:
        """Checks that there will be checkpoints, and opens the directory."""
        self._saved, self._due = fit.position.step, False
        require_values(fit.trainer._objects)
        self._termination = Termination(self._grace_secs, self._say_late)
        if fit.trainer.strategy.is_chief:  # the others have the same arrays
            self._store = CheckpointStore(
                self._directory,
                keep_last=self._keep,
                keep_best=self._best,
                asynchronous=self._asynchronous,
                found=fit.position.found,
            )

    def on_epoch_begin(self, fit: FitLoop) -> None:
        """Writes the checkpoint of the previous epoch."""
        if self._due and fit.position.epoch % self._every_epochs == 0:
            self._save_epoch(fit)
        self._due = False

    def on_step(self, fit: FitLoop) -> None:
        """Writes a checkpoint if it is due."""
        if self._every_steps and fit.position.step - self._saved >= self._every_steps:
            self._save(fit)

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:  # noqa: ARG002
        """Marks a checkpoint as due; it is written when all callbacks have seen the epoch."""
        self._due = bool(self._every_epochs)

    def on_fit_end(self, fit: FitLoop) -> None:
        """Writes the last checkpoint, waits for pending writes, and ends after SIGTERM."""
        store, cause = self._store, None if fit.request is None else fit.request.cause
        is_alone = not fit.trainer._local._spans_processes
        with closing("closing the CheckpointStore", self._close):
            if self._due:
                self._save_epoch(fit)
            if store is not None:
                store.wait()
            if is_alone and self._termination.is_received:  # perhaps just now
                cause = "SIGTERM"
            if cause == "SIGTERM" or (cause == "interrupt" and not is_alone):
                self._save_if_new(fit)
        if cause == "SIGTERM" or self._termination.is_received:
            if store is not None:  # the chief has it
                self._say_what_is_saved(store)
            raise SystemExit(TERMINATED)

    def _save_epoch(self, fit: FitLoop) -> None:
        metrics = {name: column[-1] for name, column in fit.history.items()}
        if self._monitor is not None:
            self._monitor.value(metrics)
        self._save(fit, metrics)
        self._due = False

    def _save(self, fit: FitLoop, metrics: dict[str, float] | None = None) -> None:
        arrays, position = fit.trainer._checkpoint_state()  # a collective in several processes
        if self._store is not None:
            try:
                self._store.save(fit.position.step, arrays, position, metrics)
            except OSError as error:
                is_last = fit.is_complete and not self._asynchronous
                is_shared = isinstance(error.__cause__, FileExistsError)  # with another training
                if is_last or is_shared or not is_remote(self._store.directory):
                    raise
                warn_user(f"{error} Training continues.")
                if self._asynchronous:  # the error was about an earlier one
                    self._store.save(fit.position.step, arrays, position, metrics)
        self._saved = fit.position.step

    def _save_if_new(self, fit: FitLoop) -> None:
        if fit.position.step != self._saved:
            self._save(fit)

    def _close(self) -> None:
        store, self._store = self._store, None
        try:
            if store is not None:
                store.close()
        finally:
            self._termination.close()

    def _say_late(self) -> None:
        steps = format_list(() if self._store is None else self._store.steps())
        self._say(
            "no checkpoint was written, because a step, its compilation or a save has not ended "
            f"within grace_secs={self._grace_secs:g}. Steps with a checkpoint: {steps}"
        )

    def _say_what_is_saved(self, store: CheckpointStore) -> None:
        step = store.latest()
        self._say(
            f"no checkpoint was written to {store.directory}, because no step has ended"
            if step is None
            else f"step {step} is saved in {store.directory}"
        )

    def _say(self, what: str) -> None:
        say(f"SIGTERM: {what}.")
