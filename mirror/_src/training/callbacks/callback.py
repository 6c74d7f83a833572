"""`Callback`: the base class for callbacks."""

from collections.abc import Iterable
from typing import Any, ClassVar

from mirror._src.base.errors import describe
from mirror._src.base.modules import set_module
from mirror._src.training.callbacks.hooks import advice_for, require_hooks
from mirror._src.training.fit import TrainingRun


@set_module("mirror.callbacks")
class Callback:
    """Base class for callbacks. Override the hooks you need.

    A callback runs once, on the host, never per replica; the metrics it receives are Python floats.
    It may use the trainer: `fit.trainer.evaluate(data)`, `fit.trainer.save(directory)`,
    `fit.stop("why")`. An exception in a callback ends the training and is raised by `fit`.
    Callbacks run in the order in which they are passed, except for those with `runs_last`.

    Methods with the names of hooks that do not exist here, such as `on_train_begin` of Keras, and
    similar names are rejected. Begin the names of other methods with an underscore.

    Attributes:
        runs_last: Whether to run after the other callbacks, for callbacks that store their states.
        runs_on_chief_only: Whether to run on the chief only, in a job of several processes. For
            callbacks that print or write files, and that neither stop the training nor change it.

    >>> class Report(Callback):
    ...     def on_epoch_end(self, fit, logs):
    ...         print(f"epoch {fit.history.epochs[-1]}: {sorted(logs)}")
    >>> history = trainer.fit(data, epochs=2, callbacks=Report(), progress=False)
    epoch 0: ['loss']
    epoch 1: ['loss']
    """

    runs_last: ClassVar[bool] = False
    runs_on_chief_only: ClassVar[bool] = False

    def on_fit_begin(self, fit: TrainingRun) -> None:
        """Called before the first step; `fit.position` is where the training starts or resumes."""

    def on_epoch_begin(self, fit: TrainingRun) -> None:
        """Called before the first step of an epoch."""

    def on_step(self, fit: TrainingRun) -> None:
        """Called after each launch of one or more steps, which may still be running."""

    def on_metrics(self, fit: TrainingRun, step: int, logs: dict[str, float]) -> None:
        """Called when the metrics of a launch are available: in order, up to 8 launches later.

        Args:
            fit: The run.
            step: Last step of the launch, counted over all epochs from 1.
            logs: Means over the examples of the launch.
        """

    def on_epoch_end(self, fit: TrainingRun, logs: dict[str, float]) -> None:
        """Called after an epoch and its validation.

        Args:
            fit: The run; `fit.history` already contains the epoch.
            logs: Means over the examples of the epoch; names of validation metrics start with
                `val_`. Metrics that a callback adds become part of the history.
        """

    def on_fit_end(self, fit: TrainingRun) -> None:
        """Called at the end, also after an error or Ctrl-C. Close files here."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the state of this callback for checkpoints, as JSON."""
        return {}

    def from_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `to_dict` returned, when a training is resumed."""


def require_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Returns the callbacks as a tuple, in the order in which they run.

    Raises:
        TypeError: If one is not a `Callback`, or has hooks that would not be called.
        ValueError: If one is passed twice.
    """
    is_one = isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable)
    callbacks = (callbacks,) if is_one else tuple(callbacks)
    for callback in callbacks:
        if isinstance(callback, type) and issubclass(callback, Callback):
            name = callback.__name__
            raise TypeError(
                f"`callbacks` contains the class {name}. Create an object: {name}(...)."
            )
        if not isinstance(callback, Callback):
            raise TypeError(
                f"`callbacks` must be mirror.callbacks.Callback objects, got {describe(callback)}. "
                f"{advice_for(callback)}"
            )
        require_hooks(callback)
    if len(set(map(id, callbacks))) < len(callbacks):
        raise ValueError("`callbacks` contains the same object twice. Pass it once.")
    return tuple(sorted(callbacks, key=lambda callback: callback.runs_last))
