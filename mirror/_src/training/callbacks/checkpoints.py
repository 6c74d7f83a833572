"""`Checkpoint`: saves the last checkpoints, the best one, and one when the process ends."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar, NoReturn, final

from mirror._src.base.closing import closing
from mirror._src.base.errors import counted, require_int, require_secs
from mirror._src.base.interrupts import SignalWatch
from mirror._src.base.modules import set_module
from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.callbacks.monitor import Monitor
from mirror._src.training.callbacks.stopping import Mode, require_mode
from mirror._src.training.checkpoints.layout import in_words
from mirror._src.training.checkpoints.store import CheckpointStore
from mirror._src.training.fit import TrainingRun, ended_by, request_end, stops_together

_TERMINATED = 128 + signal.SIGTERM
_SECS_TO_REACT = 0.5  # for `fit` to reach the end of a step by itself
_SECS_TO_END = 1.0  # for the main thread to leave `fit`
_RAY = "ray._private.worker"  # of Ray 2.60; tests/ps/test_signals.py


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
    not count. If `fit` is waiting for data, evaluating or running a callback, the checkpoint is
    written meanwhile. If a step, or its compilation, takes longer than `grace_secs`, the process
    exits without a new checkpoint and says so.

    In a job of several processes, only the chief writes. SIGTERM or Ctrl-C to any process makes all
    of them stop after the same step; the chief writes a checkpoint, and all exit.

    Args:
        directory: Directory of checkpoints, with a file such as `step-120.safetensors` for each.
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
        self._terminated = False
        self._is_saved_in_time = False
        self._handles = False
        self._is_at_end = False
        self._ended = threading.Event()
        self._ending = threading.Lock()

    def on_fit_begin(self, fit: TrainingRun) -> None:
        """Opens the directory."""
        if self._monitor is not None:
            self._monitor.require_validation(fit)
        if fit.trainer.strategy.is_chief:  # the others have the same arrays
            self._store = CheckpointStore(
                self._directory,
                keep_last=self._keep,
                keep_best=self._best,
                asynchronous=self._asynchronous,
            )
        self._saved, self._due = fit.position.step, False
        self._fit: TrainingRun | None = fit
        self._listen()

    def on_epoch_begin(self, fit: TrainingRun) -> None:
        """Writes the checkpoint of the previous epoch."""
        if self._due and fit.position.epoch % self._every_epochs == 0:
            self._save_epoch(fit)
        self._due = False

    def on_step(self, fit: TrainingRun) -> None:
        """Writes a checkpoint if it is due or the process has received SIGTERM."""
        if self._monitor is not None:
            self._monitor.require_metric(fit)
        if self._terminated and not stops_together(fit):
            with fit.consistent():
                self._save_if_new(fit)
                self._end_process(self._store)
        if self._every_steps and fit.position.step - self._saved >= self._every_steps:
            self._save(fit)

    def on_epoch_end(self, fit: TrainingRun, logs: dict[str, float]) -> None:  # noqa: ARG002
        """Marks a checkpoint as due; it is written when all callbacks have seen the epoch."""
        self._due = bool(self._every_epochs)

    def on_fit_end(self, fit: TrainingRun) -> None:
        """Writes the last checkpoint, and waits for pending writes."""
        self._is_at_end = True  # it ends the process itself, when the checkpoint is complete
        store = self._store
        self._terminated = self._terminated or ended_by(fit) == "SIGTERM"
        with closing("closing the CheckpointStore", self._close):
            if self._due:
                self._save_epoch(fit)
            elif self._terminated or ended_by(fit) == "interrupt":
                self._save_if_new(fit)
        if self._terminated:
            self._end_process(store)

    def _end_process(self, store: CheckpointStore | None) -> NoReturn:
        self._close()
        self._terminated = False
        self._say_what_is_saved(store)
        raise SystemExit(_TERMINATED)

    def _save_epoch(self, fit: TrainingRun) -> None:
        self._due = False
        metrics = {name: column[-1] for name, column in fit.history.items()}
        if self._monitor is not None:
            self._monitor.value(metrics)
        self._save(fit, metrics)

    def _save(self, fit: TrainingRun, metrics: dict[str, float] | None = None) -> None:
        with fit.consistent():  # SIGTERM may have come
            arrays, position = fit.trainer._checkpoint_state()  # a collective in several processes
            if self._store is not None:
                self._store.save(fit.position.step, arrays, position, metrics)
            self._saved = fit.position.step

    def _save_if_new(self, fit: TrainingRun) -> None:
        if fit.position.step != self._saved:
            self._save(fit)

    def _close(self) -> None:
        self._is_at_end = True
        store, self._store, self._fit = self._store, None, None
        try:
            if store is not None:
                store.close()
        finally:
            with self._ending:  # `_save_in_time` sends no signal afterwards
                self._ended.set()
            if self._handles:
                self._wakeup.close()
                signal.signal(signal.SIGTERM, self._before)
            self._handles = False

    def _listen(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self._before = signal.getsignal(signal.SIGTERM)
        self._handles = is_main and _is_unhandled(self._before)
        self._terminated = self._is_saved_in_time = self._is_at_end = False
        self._ended.clear()
        if self._handles:
            signal.signal(signal.SIGTERM, self._note)
            self._wakeup = SignalWatch(signal.SIGTERM, self._begin_to_end)

    def _note(self, signum: int, frame: Any) -> None:  # noqa: ARG002
        """Handles SIGTERM, and ends the main thread when `_save_in_time` sends it."""
        if self._is_saved_in_time and not self._is_at_end:
            raise SystemExit(_TERMINATED)
        self._begin_to_end()

    def _begin_to_end(self) -> None:
        if not self._terminated:
            self._terminated = True
            if self._fit is not None and stops_together(self._fit):
                request_end(self._fit, "SIGTERM")
                return
            threading.Thread(target=self._save_in_time, name="mirror SIGTERM", daemon=True).start()

    def _save_in_time(self) -> None:
        """Saves and ends the process if `fit` does not reach the end of a step by itself."""
        fit, store, deadline = self._fit, self._store, time.monotonic() + self._grace_secs
        if fit is None or self._ended.wait(_SECS_TO_REACT):
            return
        with fit.consistent(timeout=_left(deadline - _SECS_TO_END)) as is_in_time:
            if self._ended.is_set():
                return
            if is_in_time:
                self._try_to_save(fit)
                self._end_main_thread()  # still held, so that it cuts off no other save
        if not is_in_time:
            self._say(
                "no checkpoint was written, because a step or its compilation has not ended within "
                f"grace_secs={self._grace_secs:g}. Steps with a checkpoint: {self._there()}"
            )
        elif self._ended.wait(max(_left(deadline), _SECS_TO_END)):
            return
        else:
            self._say_what_is_saved(store)
        os._exit(_TERMINATED)  # the main thread is in native code, or ignores SystemExit

    def _end_main_thread(self) -> None:
        with self._ending:
            if not self._ended.is_set():  # otherwise the signal would find the default handler
                self._is_saved_in_time = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _try_to_save(self, fit: TrainingRun) -> None:
        try:
            self._save_if_new(fit)
            store = self._store
            if store is not None:  # the main thread may be closing it
                store.wait()
        except Exception as error:
            lost = counted(fit.position.step - self._saved, "step")
            self._say(f"the checkpoint could not be written ({lost} lost): {error}")

    def _there(self) -> str:
        return in_words(self._store.steps() if self._store is not None else ())

    def _say_what_is_saved(self, store: CheckpointStore | None) -> None:
        if store is None:  # the chief has it
            return
        step = store.latest()
        self._say(
            f"no checkpoint was written to {store.directory}, because no step has ended"
            if step is None
            else f"step {step} is saved in {store.directory}"
        )

    def _say(self, what: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed, or a broken pipe
            print(f"SIGTERM: {what}.", file=sys.stderr, flush=True)


def _is_unhandled(handler: Any) -> bool:
    """Whether the program leaves SIGTERM to `fit`.

    `ray.init` sets a handler, which then never runs: Ray's core, in C++, replaces it by one that
    prints a trace and ends the process, and restores the default at the end.
    """
    return handler is signal.SIG_DFL or getattr(handler, "__module__", None) == _RAY


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
