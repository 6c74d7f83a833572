"""`TrainingRun`: one call of `fit`, as its callbacks see it."""

import contextlib
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, final

from flax import nnx

from mirror._src.data.padded import PaddedBatch, PaddedDataset
from mirror._src.strategy.strategy import Strategy
from mirror._src.training.history import History
from mirror._src.training.objective import LOSS, Sums
from mirror._src.training.position import Position
from mirror._src.training.stream import NO_DATA, Stream
from mirror._src.utils.errors import require_int
from mirror._src.utils.modules import set_module
from mirror._src.utils.naming import depth_of_user


class TrainerOfFit(Protocol):
    """The trainer, as far as its callbacks may use it."""

    optimizer: nnx.Optimizer[Any]
    strategy: Strategy

    @property
    def model(self) -> nnx.Module:
        """The model that is trained."""
        ...

    def evaluate(self, data: Any) -> dict[str, float]:
        """Returns the means over all examples of the data."""
        ...

    def save(self, directory: str | Path) -> None:
        """Writes a checkpoint."""
        ...

    def lowered_text(self) -> str:
        """Returns the text of the last step's program."""
        ...

    def checkpoint_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the contents of a checkpoint: arrays by name, and the position."""
        ...


class CallbackOfFit(Protocol):
    """The hooks that a run calls; see `Callback`."""

    def on_fit_begin(self, fit: "TrainingRun") -> None: ...

    def on_epoch_begin(self, fit: "TrainingRun") -> None: ...

    def on_step(self, fit: "TrainingRun") -> None: ...

    def on_metrics(self, fit: "TrainingRun", step: int, logs: dict[str, float]) -> None: ...

    def on_epoch_end(self, fit: "TrainingRun", logs: dict[str, float]) -> None: ...

    def on_fit_end(self, fit: "TrainingRun") -> None: ...

    def to_dict(self) -> dict[str, Any]: ...

    def from_dict(self, state: dict[str, Any]) -> None: ...


@set_module("mirror.callbacks")
@final
class TrainingRun:
    """One call of `Trainer.fit`; it owns the position of the training.

    Attributes:
        trainer: The trainer, as in `fit.trainer.model`.
        epochs: Number of the epoch to stop at.
        position: Progress so far, as in `fit.position.step` and `fit.position.epoch`. Read only.
        steps_per_epoch: Number of steps per epoch, or None if unknown.
        stopped: Why a callback stopped the run, or None.
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
        trainer: TrainerOfFit,
        epochs: int,
        position: Position,
        data: PaddedDataset,
        steps_per_epoch: int | None,
        callbacks: Sequence[CallbackOfFit],
    ) -> None:
        if steps_per_epoch is not None:
            require_int("steps_per_epoch", steps_per_epoch)
        self.trainer = trainer
        self.epochs = epochs
        self.position = position
        self.steps_per_epoch = steps_per_epoch or data.num_batches
        self.stopped: str | None = None
        self.empty: frozenset[str] = frozenset()
        self._limit = steps_per_epoch
        self._stream = Stream(data)
        self._callbacks = callbacks
        self._warned: set[bool] = set()
        self._started = time.perf_counter()

    @property
    def history(self) -> History:
        """The metrics of the completed epochs."""
        return self.position.history

    @property
    def logs(self) -> dict[str, float]:
        """The means over this epoch's examples whose metrics have arrived."""
        return self.position.meter.means

    def stop(self, why: str) -> None:
        """Stops the training after this step, or after this epoch if it has ended."""
        self.stopped = self.stopped or why

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Calls `on_fit_begin` of the callbacks, and `on_fit_end` in any case."""
        for name, callback in self._named_callbacks():
            if name in self.position.callbacks:
                callback.from_dict(self.position.callbacks[name])
        with contextlib.ExitStack() as stack:
            for callback in self._callbacks:
                stack.callback(callback.on_fit_end, self)
                callback.on_fit_begin(self)
            try:
                with contextlib.closing(self._stream):
                    yield
            finally:
                self.remember_callbacks()  # an interrupted training may be resumed

    def remember_callbacks(self) -> None:
        """Stores the states of the callbacks in the position."""
        states = {name: callback.to_dict() for name, callback in self._named_callbacks()}
        self.position.callbacks = {name: state for name, state in states.items() if state}

    def _named_callbacks(self) -> Iterator[tuple[str, CallbackOfFit]]:
        """Yields each callback with its class and its number within the class."""
        counts: dict[str, int] = {}
        for callback in self._callbacks:
            kind = type(callback).__name__
            counts[kind] = counts.get(kind, 0) + 1
            yield f"{kind} {counts[kind]}", callback

    def begin_epoch(self) -> None:
        """Calls `on_epoch_begin` of the callbacks."""
        self._started = time.perf_counter()
        for callback in self._callbacks:
            callback.on_epoch_begin(self)

    def launches(self) -> Iterator[PaddedBatch]:
        """Yields the rest of the epoch: of one pass, or of `steps_per_epoch` from any passes."""
        position, limit = self.position, self._limit
        while limit is None or position.epoch_step < limit:
            most = None if limit is None else limit - position.epoch_step
            launch = self._stream.next_launch(position.passes, most)
            if launch is not None:
                yield launch
            elif not position.samples:
                raise ValueError(NO_DATA)
            elif limit is None:
                return
            else:
                self._end_pass()

    def _end_pass(self) -> None:
        self.position.next_pass()
        self._stream.close()

    def after_step(self, launch: PaddedBatch, sums: Sums) -> None:
        """Counts a launch, and calls `on_step` of the callbacks."""
        self.position.advance(launch.num_batches, launch.num_examples, sums)
        for callback in self._callbacks:
            callback.on_step(self)

    def collect(self, *, running: int = 0) -> None:
        """Calls `on_metrics` of the callbacks for launches that have finished.

        Args:
            running: Number of last launches not to wait for.
        """
        for step, logs, empty in self.position.meter.collect(running=running):
            self.empty = empty
            for callback in self._callbacks:
                callback.on_metrics(self, step, logs)
            self._warn_of_nan(step, logs[LOSS])

    def _warn_of_nan(self, step: int, loss: float) -> None:
        is_empty = LOSS in self.empty
        if math.isfinite(loss) or is_empty in self._warned:
            return
        self._warned.add(is_empty)
        if is_empty:
            message = (
                f"The weights of the loss add up to 0 at step {step}, so the loss is NaN and the "
                "gradient 0. Omit batches whose weights are all 0."
            )
        else:
            message = (
                f"The loss is {loss} at step {step}. Training continues; add "
                "mirror.callbacks.NaNGuard() to stop at the first non-finite value."
            )
        warnings.warn(message, stacklevel=depth_of_user())

    def end_epoch(self, validation: dict[str, float]) -> None:
        """Adds the epoch to the history, and calls `on_epoch_end` of the callbacks."""
        position, epoch = self.position, self.position.epoch
        logs = {**self.logs, **{f"val_{name}": value for name, value in validation.items()}}
        if self._limit is None:
            self._end_pass()
        position.next_epoch()
        position.history.add(epoch, logs, time.perf_counter() - self._started)
        known = set(logs)
        for callback in self._callbacks:
            callback.on_epoch_end(self, logs)
        position.history.add_to_last({k: v for k, v in logs.items() if k not in known})
