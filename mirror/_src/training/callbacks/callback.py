"""`Callback`: the base class of what happens beside a training."""

from collections.abc import Iterable
from typing import Any, ClassVar

from mirror._src.training.fit import TrainingRun
from mirror._src.utils.errors import describe
from mirror._src.utils.modules import set_module


@set_module("mirror.callbacks")
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

    def on_fit_begin(self, fit: TrainingRun) -> None:
        """Before the first step; `fit.position` says where the training goes on from."""

    def on_epoch_begin(self, fit: TrainingRun) -> None:
        """Before the first step of an epoch."""

    def on_step(self, fit: TrainingRun) -> None:
        """After each launch of one step, or more; the devices may still work on it."""

    def on_metrics(self, fit: TrainingRun, step: int, logs: dict[str, float]) -> None:
        """When the metrics of a launch have come in: in order, up to 8 launches later.

        Args:
            fit: the training.
            step: the launch's last step, counted over all epochs from 1.
            logs: the means of the launch's examples.
        """

    def on_epoch_end(self, fit: TrainingRun, logs: dict[str, float]) -> None:
        """After an epoch and its validation.

        Args:
            fit: the training; `fit.history` has the epoch already.
            logs: the means of all its examples; those of the validation begin with `val_`. What a
                callback adds is in the history too.
        """

    def on_fit_end(self, fit: TrainingRun) -> None:
        """At the end in any case, also after an error or Ctrl-C: close files here."""

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint is to hold of this callback, as JSON."""
        return {}

    def from_dict(self, found: dict[str, Any]) -> None:
        """Goes on from what `to_dict` gave, when a restored training goes on."""


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
