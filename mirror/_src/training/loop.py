"""`FitLoop`: one call of `fit`, which owns data, progress and callbacks."""

import contextlib
import copy
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from mirror._src.base import clock, interrupts
from mirror._src.base.errors import Closing, closing, require_int
from mirror._src.base.naming import is_first, is_our_module, warn_user
from mirror._src.base.public_names import set_module
from mirror._src.cluster.store import process_index
from mirror._src.data.padded import PaddedBatch, PaddedDataset
from mirror._src.training.agreed_stop import AgreedStop, Cause, Request
from mirror._src.training.checkpoints.store import CheckpointStore
from mirror._src.training.history import History
from mirror._src.training.inputs import NO_DATA, Stream, Validation
from mirror._src.training.mistakes import bytes_of, labels_in, wrong_numbers
from mirror._src.training.objective import LOSS, Sums
from mirror._src.training.precision import stuck
from mirror._src.training.progress import Position, StepMetrics, in_order
from mirror._src.training.runners import StepRunner

if TYPE_CHECKING:
    from mirror._src.training.trainer import Trainer

_LABELS = ", which mirror.Trainer(..., labels='label', num_classes=10) checks"
_MOST_KEPT_BYTES = 2**23
_OF_COUNTED_STEPS = ("on_step", "on_metrics")  # when training resumes, the step is not repeated
_CAUSES: dict[int, Cause] = {signal.SIGINT: "interrupt", signal.SIGTERM: "SIGTERM"}


@set_module("mirror.callbacks")
@final
class FitLoop:
    """One call of `Trainer.fit`; it owns the position of the training.

    Attributes:
        trainer: The trainer, as in `fit.trainer.model`.
        epochs: Number of the epoch to stop at.
        position: Progress so far, as in `fit.position.step` and `fit.position.epoch`. Read only.
        steps_per_epoch: Number of steps per epoch, or None if unknown.
        metrics: Names of the training metrics, known from the first step on.
        has_validation: Whether `fit` received validation data.
        request: Why the run ends early: its `cause` is "stop", "interrupt" or "SIGTERM". Or None.
        empty: In `on_metrics`, the names of metrics of the launch that are NaN because their
            weights add up to 0; see `mirror.Weighted`.

    >>> class AtMost(mirror.callbacks.Callback):
    ...     def on_step(self, fit):
    ...         if fit.position.epoch_step == 2:
    ...             fit.stop("two steps are enough")
    >>> trainer.fit(data, epochs=9, callbacks=AtMost(), progress=False)
    History of no epochs
    """

    def __init__(
        self,
        trainer: "Trainer[Any]",
        epochs: int,
        position: Position,
        data: PaddedDataset,
        steps_per_epoch: int | None,
        callbacks: Sequence[Any],
        validation: Validation,
    ) -> None:
        if steps_per_epoch is not None:
            require_int("steps_per_epoch", steps_per_epoch)
            of_this_epoch = max(steps_per_epoch - position.epoch_step, 0)
            data.read_at_most((epochs - position.epoch - 1) * steps_per_epoch + of_this_epoch)
        self.trainer = trainer
        self.epochs = epochs
        self.position = position
        self.steps_per_epoch = steps_per_epoch or data.num_batches
        self.has_validation = validation.data is not None
        self.metrics: tuple[str, ...] = ()
        self.request: Request | None = None
        self.empty: frozenset[str] = frozenset()
        self.thread = threading.get_ident()
        self.last_batch: PaddedBatch | None = None
        self.is_complete = False
        self._runner: StepRunner = trainer._runner
        self._validation = validation
        self._limit = steps_per_epoch
        self._stream = Stream(data)
        ordered = sorted(callbacks, key=lambda c: (c.runs_last, not c.adds))
        is_chief = trainer.strategy.is_chief
        self._callbacks = [c for c in ordered if is_chief or not c.runs_on_chief_only]
        monitors = [getattr(callback, "_monitor", None) for callback in self._callbacks]
        self._monitors: list[Any] = [each for each in monitors if hasattr(each, "require_metric")]
        self._agreed_stop: AgreedStop | None = None
        self._has_states = False
        self._batches: deque[tuple[int, PaddedBatch]] = deque()  # of launches not collected
        self._keeps_batches: bool | None = None
        self._warned: set[str] = set()
        self.saved: list[Path] = []  # checkpoints by `trainer.save`
        self._started = time.perf_counter()

    def __repr__(self) -> str:
        position = self.position
        stopped = f", stopped: {self.stopped}" if self.stopped else ""
        return f"FitLoop(epoch {position.epoch} of {self.epochs}, step {position.step}{stopped})"

    @property
    def history(self) -> History:
        """The metrics of the completed epochs."""
        return self.position.history

    @property
    def evaluated_metrics(self) -> tuple[str, ...]:
        """Names of metrics that only evaluation computes, known from the first step on."""
        return self.trainer._objective.evaluated

    @property
    def logs(self) -> dict[str, float]:
        """The means over this epoch's examples whose metrics have arrived."""
        return self.position.meter.means

    def may_add(self, name: str) -> bool:
        """Whether a callback may add a metric of this name at the end of an epoch."""
        if any(not is_our_module(type(callback).__module__) for callback in self._callbacks):
            return True
        return any(name.startswith(callback.adds) for callback in self._callbacks)

    @property
    def stopped(self) -> str | None:
        """Why a callback stopped the run, or another process did, or None."""
        return None if self.request is None else self.request.why or None

    def stop(self, why: str) -> None:
        """Stops the training after this step, or after this epoch if it has ended.

        In a job of several processes, one process may call it alone: all of them stop after the
        same step, which is at most a few steps later.
        """
        self._request_stop("stop", why)

    def _request_stop(self, cause: Cause, why: str) -> None:
        """Requests the end of the run; called by any thread and by signal handlers."""
        if self._agreed_stop is None:
            self.request = self.request or Request(cause, why)
        else:
            self._agreed_stop.ask(cause, why)

    def _note_signal(self, number: int) -> None:
        """Requests that all processes stop, because this one received a signal."""
        cause = _CAUSES[number]
        words = "interrupted" if cause == "interrupt" else cause
        self._request_stop(cause, f"{words} in process {process_index()}")

    def _may_launch(self) -> bool:
        """Whether the next launch takes place; False if all processes stop before it."""
        if self._agreed_stop is None or self._agreed_stop.may_launch():
            return True
        self.request = self._agreed_stop.request
        return False

    def run(self, train: Callable[[PaddedBatch], Sums]) -> None:
        """Trains up to the last epoch.

        Args:
            train: Makes the steps of a batch, or of a group of batches.
        """
        position, deferred = self.position, interrupts.DeferredInterrupts(watches=True)
        with deferred, self._listening(), self._ends_synchronized():
            self._runner.has_lost_values = False
            while position.epoch < self.epochs and not self._must_stop():
                self._begin_epoch()
                for batch in self._batches_of_epoch():
                    self.last_batch = batch
                    self._after_step(batch, train(batch))
                    self.collect(running=self._runner.most_running)
                    if self._must_stop():
                        break
                is_cut_short = self._must_stop()
                self.collect()
                if not is_cut_short:
                    self._runner.synchronize()  # for callbacks that read the model
                    self._end_epoch(self.trainer._validate(self._validation, position.epoch_step))
            self._runner.synchronize()
            self._must_stop()
            self.is_complete = True  # also if the callbacks fail to end

    @contextlib.contextmanager
    def _ends_synchronized(self) -> Iterator[None]:
        """Context manager after which the objects belong to the position, also after an error."""
        try:
            yield
        except BaseException:
            if self._runner.may_fail_later:
                with contextlib.suppress(Exception):  # the error that ends `fit` is raised
                    self._runner.synchronize()
                # Steps are counted when they are scheduled. With synchronous updates, this is
                # where the model is. With others, batches after the one that failed may have been
                # used, and are used again.
                self.position.drop_failed()
            raise

    def _must_stop(self) -> bool:
        """Acts on requests, after a step.

        Raises:
            KeyboardInterrupt: If this process, or with several processes any, was interrupted.
            SystemExit: If it received SIGTERM and has a `Checkpoint`, or runs in a job.
        """
        interrupts.check()
        if self.request is not None and self.request.cause == "interrupt":
            raise KeyboardInterrupt
        if self.request is not None and self.request.cause == "SIGTERM":
            raise SystemExit(interrupts.TERMINATED)
        return self.request is not None

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Calls `on_fit_begin` of the callbacks, and `on_fit_end` in any case."""
        states = self.position.callbacks
        names = [name for name, _ in self._named_callbacks()]
        for name, callback in zip(names, self._callbacks, strict=True):
            if name in states:
                _restore(callback, name, states[name])
            else:
                _require_same_monitor(name, states.keys() - names, self.position.epoch)
        for monitor in self._monitors:
            monitor.require_validation(self)
        with Closing() as at_end:
            if self.trainer._local._spans_processes:
                self._agreed_stop = AgreedStop()
                at_end.add("ending the agreement", self._agreed_stop.close)
                interrupts.redirect(self._note_signal)
            for name, callback in self._named_callbacks():
                at_end.add(f"on_fit_end of {name}", callback.on_fit_end, self)
                callback.on_fit_begin(self)
            if self._agreed_stop is not None:  # in a job, JAX only notes SIGTERM
                at_end.add("restoring the handler of SIGTERM", interrupts.Termination().close)
            # An interrupted training may be resumed.
            at_end.add("dropping the batches", self._batches.clear)
            at_end.add("to_dict of a callback", self.remember_callbacks)
            with (
                self._notes_the_signal(),
                closing("closing the data", self._stream.close),
            ):
                yield

    @contextlib.contextmanager
    def _notes_the_signal(self) -> Iterator[None]:
        """Lets callbacks know, in `on_fit_end`, which signal has ended the run."""
        try:
            yield
        except BaseException:
            number = interrupts.settle()
            if number is not None:
                self.request = self.request or Request(_CAUSES[number], "")
            raise

    def remember_callbacks(self) -> None:
        """Stores the states of the callbacks in the position, unless it has earlier ones."""
        if self._has_states:
            return
        states = {name: callback.to_dict() for name, callback in self._named_callbacks()}
        self.position.callbacks = {name: state for name, state in states.items() if state}

    def _named_callbacks(self) -> Iterator[tuple[str, Any]]:
        """Yields each callback with its class, what it monitors, and its number among equals."""
        counts: dict[str, int] = {}
        for callback in self._callbacks:
            kind = type(callback).__name__
            monitor = getattr(callback, "_monitor", None)
            kind = kind if monitor is None else f"{kind}({getattr(monitor, 'name', monitor)})"
            counts[kind] = counts.get(kind, 0) + 1
            yield f"{kind} {counts[kind]}", callback

    def _call(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of all callbacks.

        If one is interrupted, the others still receive a step that is counted.
        """
        interrupt: BaseException | None = None
        for callback in self._callbacks:
            try:
                with interrupts.immediate():
                    getattr(callback, hook)(self, *arguments)
            except (KeyboardInterrupt, SystemExit) as error:
                if interrupt is not None or hook not in _OF_COUNTED_STEPS:
                    raise
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _begin_epoch(self) -> None:
        """Calls `on_epoch_begin` of the callbacks."""
        self._started = time.perf_counter()
        self._call("on_epoch_begin")
        self.steps_began = clock.now()

    def _batches_of_epoch(self) -> Iterator[PaddedBatch]:
        """Yields the rest of the epoch: of one pass, or of `steps_per_epoch` from any passes.

        Ends early if all processes stop before the next launch.
        """
        position, limit = self.position, self._limit
        if limit is None and position.epoch_step and not position.samples:
            return  # the pass has ended, and the end of the epoch was interrupted
        while limit is None or position.epoch_step < limit:
            most = None if limit is None else limit - position.epoch_step
            batch = self._stream.next_batch(position.passes, most)
            if batch is not None:
                if not self._may_launch():
                    return
                yield batch
            elif not position.samples:
                raise ValueError(NO_DATA.format("data"))
            elif limit is None:
                return
            else:
                self._end_pass()

    def _end_pass(self) -> None:
        self.position.next_pass()
        self._stream.close()

    def _after_step(self, batch: PaddedBatch, sums: Sums) -> None:
        """Counts a launch, and calls `on_step` of the callbacks."""
        self.position.advance(batch.num_batches, batch.num_examples, sums, batch.state)
        if not self.metrics:
            self.metrics = tuple(in_order(sums.totals))
            self._require_other_names()
            for monitor in self._monitors:
                monitor.require_metric(self)
            if self.has_validation:
                self.trainer._require_evaluable(self._validation.data)
        if self._keeps_batches is None:  # to find NaN in them; large ones would need memory
            self._keeps_batches = bytes_of(batch) <= _MOST_KEPT_BYTES
        if self._keeps_batches:
            self._batches.append((self.position.step, batch))
        self._call("on_step")

    def _require_other_names(self) -> None:
        """Rejects a metric with the name of a metric of the validation."""
        of_validation = {f"val_{name}" for name in self.metrics if self.has_validation}
        if taken := sorted(of_validation.intersection(self.metrics)):
            raise ValueError(
                f"The metric {taken[0]!r} of the loss function has the name that "
                f"{taken[0].removeprefix('val_')!r} has for `validation_data`. Rename it."
            )

    def collect(self, *, running: int = 0) -> None:
        """Calls `on_metrics` of the callbacks for launches that have finished.

        Args:
            running: Number of last launches not to wait for.
        """
        self.position.meter.collect(running=running, then=self._report)

    def _report(self, metrics: StepMetrics) -> None:
        step, logs, self.empty = metrics
        self._call("on_metrics", step, logs)
        self._warn_of_nan(step, logs[LOSS])
        while self._batches and self._batches[0][0] <= step:
            self._batches.popleft()
        message = stuck(self.trainer.loss_scale, logs, step)
        if message and is_first(self._warned, "skips"):
            then = "Training continues; mirror.callbacks.NaNGuard() would stop it here."
            warn_user(f"{message} {then}")

    def _warn_of_nan(self, step: int, loss: float) -> None:
        kind = "empty" if LOSS in self.empty else "NaN"
        if math.isfinite(loss) or not is_first(self._warned, kind):
            return
        if kind == "empty":
            message = (
                f"The weights of the loss add up to 0 at step {step}, so the loss is NaN and the "
                "gradient 0. Omit batches whose weights are all 0."
            )
        else:
            kept = next((batch for number, batch in self._batches if number == step), None)
            data = "" if kept is None else wrong_numbers(kept)
            labels = None if kept is None else labels_in(kept)
            message = (
                f"The loss is {loss} at step {step}. Training continues; add "
                f"mirror.callbacks.NaNGuard() to stop at the first non-finite value. {data}Common "
                "causes: a learning rate that is too high, log(0) or division by zero, or labels "
                f"out of range{labels or _LABELS}."
            )
        warn_user(message)

    def _end_epoch(self, validation: dict[str, float]) -> None:
        """Adds the epoch to the history, and calls `on_epoch_end` of the callbacks.

        If one is interrupted or fails, the epoch has not ended: a training that resumes calls all
        of them, with the states that they had.
        """
        position, epoch = self.position, self.position.epoch
        logs = {**self.logs, **{f"val_{name}": value for name, value in validation.items()}}
        if self._limit is None and position.samples:
            self._end_pass()
        self.remember_callbacks()
        before = vars(position) | {
            "callbacks": copy.deepcopy(position.callbacks),
            "history": History.from_dict(position.history.to_dict()),
        }
        position.next_epoch()
        position.history.add(epoch, logs, time.perf_counter() - self._started)
        known = set(logs)
        self.saved.clear()
        with closing("saving the end of the epoch", self._update_saved):
            try:
                self._call("on_epoch_end", logs)
                position.history.add_to_last({k: v for k, v in logs.items() if k not in known})
            except BaseException:
                vars(position).update(before)
                self._has_states = True
                raise

    def _update_saved(self) -> None:
        """Writes checkpoints of `on_epoch_end` again: of an epoch that has ended, or has not."""
        for path in dict.fromkeys(self.saved):
            if path.exists():  # and was not moved to another place
                self.remember_callbacks()
                found = self.position.found
                with CheckpointStore(path.parent, asynchronous=False, found=found) as store:
                    store.update(path, self.position.to_dict())


def _require_same_monitor(name: str, unused: Set[str], epoch: int) -> None:
    """Rejects a callback without a state if a state of its class is left, of another metric.

    Raises:
        ValueError: If there is such a state.
    """
    kind, has_monitor, new = name.partition("(")
    before = min((each for each in unused if each.startswith(f"{kind}(")), default=None)
    if not has_monitor or before is None:
        return
    old = before.removeprefix(f"{kind}(")
    old, new = (f"{kind}({each.rpartition(')')[0]!r})" for each in (old, new))
    raise ValueError(
        f"The training that is resumed has the state of {old}, but `callbacks` contains {new}, "
        f"which would start without a best value. Pass {old} as before, or pass `initial_epoch` "
        f"to start without the states of callbacks: trainer.fit(data, initial_epoch={epoch})."
    )


def _restore(callback: Any, name: str, state: dict[str, Any]) -> None:
    """Restores the state of a callback.

    Raises:
        ValueError: If the callback cannot read it.
    """
    try:
        callback.from_dict(state)
    except Exception as error:
        raise ValueError(
            f"{name} could not restore its state {state!r:.300} from the checkpoint: {error!r}. "
            "Train with the `callbacks` that the checkpoint was saved with, or pass "
            "`initial_epoch` to start without their states."
        ) from error
