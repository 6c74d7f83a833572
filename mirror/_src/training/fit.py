"""One call of `fit`, as its callbacks see it."""

import contextlib
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, final

from flax import nnx

from mirror._src.strategy.strategy import Strategy
from mirror._src.training.history import History
from mirror._src.training.objective import LOSS
from mirror._src.training.position import Position
from mirror._src.utils.modules import set_module
from mirror._src.utils.naming import depth_of_user


class TrainerOfFit(Protocol):
    """What a callback has of its trainer."""

    model: nnx.Module
    optimizer: nnx.Optimizer[Any]
    strategy: Strategy

    def evaluate(self, data: Any) -> dict[str, float]:
        """The means over all examples of the data."""
        ...

    def save(self, directory: str | Path) -> None:
        """Writes a checkpoint."""
        ...

    def lowered_text(self) -> str:
        """The program of the last step."""
        ...

    def checkpoint_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a checkpoint holds: arrays by name, and the position."""
        ...


class CallbackOfFit(Protocol):
    """What a training has of its callbacks; `Callback` says what each is called for."""

    def on_fit_begin(self, fit: "TrainingRun") -> None: ...

    def on_epoch_begin(self, fit: "TrainingRun") -> None: ...

    def on_step(self, fit: "TrainingRun") -> None: ...

    def on_metrics(self, fit: "TrainingRun", step: int, logs: dict[str, float]) -> None: ...

    def on_epoch_end(self, fit: "TrainingRun", logs: dict[str, float]) -> None: ...

    def on_fit_end(self, fit: "TrainingRun") -> None: ...

    def to_dict(self) -> dict[str, Any]: ...

    def from_dict(self, found: dict[str, Any]) -> None: ...


@set_module("mirror.callbacks")
@final
class TrainingRun:
    """One call of `Trainer.fit`.

    Attributes:
        trainer: whose it is; `fit.trainer.model`.
        epochs: at which epoch it ends.
        position: where it stands: `fit.position.step`, `fit.position.epoch`.
        steps_per_epoch: how many steps an epoch has, where that is known.
        stopped: why a callback has ended it; `None`: none has.
        empty: in `on_metrics`, the names of the launch's metrics that are NaN because their weights
            add up to 0: see `mirror.Weighted`.

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
        steps_per_epoch: int | None,
        callbacks: Sequence[CallbackOfFit],
    ) -> None:
        self.trainer = trainer
        self.epochs = epochs
        self.position = position
        self.steps_per_epoch = steps_per_epoch
        self.stopped: str | None = None
        self.empty: frozenset[str] = frozenset()
        self._callbacks = callbacks
        self._warned: set[bool] = set()
        self._started = time.perf_counter()

    @property
    def history(self) -> History:
        """The epochs that have ended."""
        return self.position.history

    @property
    def logs(self) -> dict[str, float]:
        """The means over the examples of this epoch whose metrics have come in."""
        return self.position.meter.means

    def stop(self, why: str) -> None:
        """Ends the training after this step, or after this epoch if it has ended."""
        self.stopped = self.stopped or why

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Tells the callbacks of the beginning, and in any case of the end."""
        for name, callback in self._named_callbacks():
            if name in self.position.callbacks:
                callback.from_dict(self.position.callbacks[name])
        with contextlib.ExitStack() as stack:
            for callback in self._callbacks:
                stack.callback(callback.on_fit_end, self)
                callback.on_fit_begin(self)
            try:
                yield
            finally:
                self.remember_callbacks()  # of a training that is interrupted here and goes on

    def remember_callbacks(self) -> None:
        """Takes down what the callbacks want to be in a checkpoint."""
        states = {name: callback.to_dict() for name, callback in self._named_callbacks()}
        self.position.callbacks = {name: state for name, state in states.items() if state}

    def _named_callbacks(self) -> Iterator[tuple[str, CallbackOfFit]]:
        """Each with its class and its number among those of the class."""
        met: dict[str, int] = {}
        for callback in self._callbacks:
            kind = type(callback).__name__
            met[kind] = met.get(kind, 0) + 1
            yield f"{kind} {met[kind]}", callback

    def begin_epoch(self) -> None:
        """Tells of an epoch's beginning."""
        self._started = time.perf_counter()
        for callback in self._callbacks:
            callback.on_epoch_begin(self)

    def after_step(self) -> None:
        """Tells of a launch."""
        for callback in self._callbacks:
            callback.on_step(self)

    def collect(self, *, running: int = 0) -> None:
        """Tells of the metrics that have come in.

        Args:
            running: how many of the last launches not to wait for.
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
            told = (
                f"The weights of the loss add up to 0 at step {step}: its loss is NaN and its "
                "gradient 0. Leave out batches in which nothing counts."
            )
        else:
            told = (
                f"The loss is {loss} at step {step}. The training goes on; "
                "mirror.callbacks.NaNGuard() ends it there, and says what usually causes it."
            )
        warnings.warn(told, stacklevel=depth_of_user())

    def end_epoch(self, validation: dict[str, float]) -> None:
        """Takes the epoch into the history, and tells of its end."""
        position, epoch = self.position, self.position.epoch
        logs = {**self.logs, **{f"val_{name}": value for name, value in validation.items()}}
        position.next_epoch()
        position.history.add(epoch, logs, time.perf_counter() - self._started)
        known = set(logs)
        for callback in self._callbacks:
            callback.on_epoch_end(self, logs)
        position.history.add_to_last({k: v for k, v in logs.items() if k not in known})
