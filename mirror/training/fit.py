"""One call of `fit`, as its callbacks see it."""

import contextlib
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, final

from flax import nnx

from mirror._errors import describe
from mirror.calls import depth_of_user
from mirror.strategy import Strategy
from mirror.training.history import History
from mirror.training.meter import Meter
from mirror.training.objective import LOSS, Sums


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

    def program_text(self) -> str:
        """The program of the last step."""
        ...

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a checkpoint holds: arrays by name, and the position."""
        ...


class Callback:
    """Does something beside the training: override what you need.

    A callback runs once, on the host, never per replica; what it is given are Python floats. It may
    use the trainer: `fit.trainer.evaluate(data)`, `fit.trainer.save(directory)`, `fit.stop("why")`.
    What it raises ends the training, and comes out of `fit`. Callbacks run in the order they are
    passed in, but for those with `runs_last`.

    Attributes:
        runs_last: whether to run after the others: it keeps what they hold, as a checkpoint does.

    >>> class Report(Callback):
    ...     def on_epoch_end(self, fit, logs):
    ...         print(f"epoch {fit.history.epochs[-1]}: {sorted(logs)}")
    >>> history = trainer.fit(data, epochs=2, callbacks=Report(), progress=False)
    epoch 0: ['loss']
    epoch 1: ['loss']
    """

    runs_last: ClassVar[bool] = False

    def on_fit_begin(self, fit: "Fit") -> None:
        """Before the first step; `fit.position` says where the training goes on from."""

    def on_epoch_begin(self, fit: "Fit") -> None:
        """Before the first step of an epoch."""

    def on_step(self, fit: "Fit") -> None:
        """After each launch of one step, or more; the devices may still work on it."""

    def on_metrics(self, fit: "Fit", step: int, logs: dict[str, float]) -> None:
        """When the metrics of a launch have come in: in order, up to 8 launches later.

        Args:
            fit: the training.
            step: the launch's last step, counted over all epochs from 1.
            logs: the means of the launch's examples.
        """

    def on_epoch_end(self, fit: "Fit", logs: dict[str, float]) -> None:
        """After an epoch and its validation.

        Args:
            fit: the training; `fit.history` has the epoch already.
            logs: the means of all its examples; those of the validation begin with `val_`. What a
                callback adds is in the history too.
        """

    def on_fit_end(self, fit: "Fit") -> None:
        """At the end in any case, also after an error or Ctrl-C: close files here."""

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint is to hold of this callback, as JSON."""
        return {}

    def from_dict(self, found: dict[str, Any]) -> None:
        """Goes on from what `to_dict` gave, when a restored training goes on."""


class Position:
    """Where a training stands: what a checkpoint holds beside the arrays.

    Attributes:
        step: how many updates there were, over all epochs.
        epoch: the epoch under way, from 0.
        epoch_step: how many updates of it.
        passes: how many times the data has been gone through before this pass.
        samples: how many examples of this pass have been trained with.
        meter: the metrics of this epoch.
        history: those of the ones before.
        callbacks: what they want to be held, by name.
    """

    def __init__(self) -> None:
        self.step = 0
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """A new training, of the same model."""
        self.epoch = self.passes = epoch
        self.epoch_step = self.samples = 0
        self.meter, self.history = Meter(), History()
        self.callbacks: dict[str, Any] = {}

    def advance(self, num_steps: int, num_examples: int, sums: Sums) -> None:
        """A launch has been made."""
        self.step += num_steps
        self.epoch_step += num_steps
        self.samples += num_examples
        self.meter.add(self.step, sums)

    def next_epoch(self) -> None:
        """The epoch has ended."""
        self.epoch += 1
        self.epoch_step = 0
        self.meter = Meter()

    def next_pass(self) -> None:
        """The data has ended."""
        self.passes += 1
        self.samples = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {
            **numbers,
            "meter": self.meter.to_dict(),
            "history": self.history.to_dict(),
            "callbacks": self.callbacks,
        }

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "Position":
        """The position that `to_dict` gave."""
        position = cls()
        for name in _NUMBERS:
            setattr(position, name, int(found[name]))
        position.meter = Meter(**found["meter"])
        position.history = History.from_dict(found["history"])
        position.callbacks = dict(found["callbacks"])
        return position


_NUMBERS = ("step", "epoch", "epoch_step", "passes", "samples")


@final
class Fit:
    """One call of `Trainer.fit`.

    Attributes:
        trainer: whose it is; `fit.trainer.model`.
        epochs: at which epoch it ends.
        position: where it stands: `fit.position.step`, `fit.position.epoch`.
        steps_per_epoch: how many steps an epoch has, where that is known.
        stopped: why a callback has ended it; `None`: none has.
        empty: in `on_metrics`, the names of the launch's metrics that are NaN because their weights
            add up to 0: see `mirror.Weighted`.

    >>> class AtMost(Callback):
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
        callbacks: Sequence[Callback],
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

    def _named_callbacks(self) -> Iterator[tuple[str, Callback]]:
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


def require_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """The callbacks as a tuple.

    Raises:
        TypeError: something is no `Callback`.
        ValueError: one is there twice.
    """
    is_one = isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable)
    found = (callbacks,) if is_one else tuple(callbacks)
    for callback in found:
        if isinstance(callback, type) and issubclass(callback, Callback):
            raise TypeError(f"{callback.__name__} is a class. Pass one: {callback.__name__}(...).")
        if not isinstance(callback, Callback):
            raise TypeError(
                f"{describe(callback)} is no mirror.callbacks.Callback. Derive from it, and "
                "override what you need."
            )
    if len(set(map(id, found))) < len(found):
        raise ValueError("The same callback is among the callbacks twice. Pass it once.")
    return tuple(sorted(found, key=lambda callback: callback.runs_last))
