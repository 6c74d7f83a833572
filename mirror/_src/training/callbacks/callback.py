"""`Callback`: the base class, the checks of its hooks, and of the metrics that one monitors."""

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, final

from mirror._src.base.errors import describe, nearest
from mirror._src.base.naming import parameter_names
from mirror._src.base.public_names import set_module
from mirror._src.base.unknown_names import advice
from mirror._src.training.loop import FitLoop

# Parameters of hooks of other libraries, in the place where `fit` is passed.
_NOT_A_RUN = {"epoch", "batch", "step", "logs", "trainer", "model", "pl_module"}
_SIMILAR = 0.75


def require_hooks(callback: object) -> None:
    """Rejects a callback with hooks that would not be called, or with other arguments.

    Methods that begin with `on_` are hooks if `Callback` or another library has them, or if their
    names are similar to a hook. A leading underscore marks other methods.

    Raises:
        TypeError: If the callback has such a hook.
    """
    kind = type(callback)
    for name in dir(kind):
        if name.startswith("on_") and name not in HOOKS and callable(getattr(kind, name, None)):
            instead = advice().get(("hooks", name)) or _similar(name)
            if instead:
                raise TypeError(
                    f"{kind.__name__}.{name} would never be called, because {name} is not a hook "
                    f"of mirror.callbacks.Callback. Use {instead}. If it is not meant as a hook, "
                    f"rename it: _{name}."
                )
    for name, parameters in HOOKS.items():
        _require_signature(callback, name, parameters)


def advice_for(callback: object) -> str:
    """Returns what to use instead of an object that is not a `Callback`."""
    name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
    told = advice().get(("mirror.callbacks", name))
    if told is not None:
        return told
    if callable(callback):
        return "To call a function with the metrics, pass mirror.callbacks.Log(fn)."
    return "Subclass Callback and override the hooks you need."


def _similar(name: str) -> str:
    found = difflib.get_close_matches(name, HOOKS, n=1, cutoff=_SIMILAR)
    return f"{found[0]}(self, {', '.join(HOOKS[found[0]])})" if found else ""


def _require_signature(callback: object, name: str, parameters: Sequence[str]) -> None:
    try:
        signature = inspect.signature(getattr(callback, name))
    except (TypeError, ValueError):
        return
    names = list(signature.parameters)
    try:
        signature.bind(*parameters)
        fits = not names or names[0] not in _NOT_A_RUN
    except TypeError:
        fits = False
    if not fits:
        raise TypeError(
            f"{type(callback).__name__}.{name} has the parameters ({', '.join(['self', *names])}), "
            f"but fit calls it with ({', '.join(['self', *parameters])}). `fit` is the run: the "
            "epoch is fit.position.epoch, the step is fit.position.step, the model is "
            "fit.trainer.model."
        )


_VALIDATION = "val_"


@final
class Monitor:
    """The metric that a callback monitors, as its attribute `_monitor`, which the run checks.

    Args:
        callback: Class name of the callback, for messages.
        name: Name of the metric, such as `"val_loss"`.
        of_steps: Whether the callback reads metrics of steps instead of epochs.
    """

    def __init__(self, callback: str, name: str, *, of_steps: bool = False) -> None:
        self.name = name
        self._callback = callback
        self._of_steps = of_steps

    def require_validation(self, fit: FitLoop) -> None:
        """Checks, before the first step, that validation metrics will exist.

        Raises:
            ValueError: If the metric is a validation metric, and there is no validation data.
        """
        if not self.name.startswith(_VALIDATION):
            return
        if self._of_steps:
            raise ValueError(
                f"{self._callback} monitors {self.name!r}, but it reads the metrics of training "
                f"steps, which have no validation. Monitor {self._training_name!r}."
            )
        if not fit.has_validation and not fit.may_add(self.name):
            raise ValueError(
                f"{self._callback} monitors {self.name!r}, but there is no validation data. Pass "
                "trainer.fit(..., validation_data=...), or monitor a training metric: "
                f"{self._training_name!r}."
            )

    def require_metric(self, fit: FitLoop) -> None:
        """Checks, after the first step, that the metric will exist.

        Raises:
            ValueError: If there is no such metric, and no callback may add it.
        """
        has_validation = fit.has_validation and not self._of_steps
        of_validation = [*fit.metrics, *fit.evaluated_metrics] if has_validation else []
        names = [*fit.metrics, *(_VALIDATION + name for name in of_validation)]
        if self.name not in names and (self._of_steps or not fit.may_add(self.name)):
            raise ValueError(self._unknown(names))

    def value(self, logs: Mapping[str, float]) -> float:
        """Returns the metric at the end of an epoch.

        Raises:
            ValueError: If there is no such metric.
        """
        if self.name not in logs:
            raise ValueError(self._unknown([*logs]))
        return logs[self.name]

    @property
    def _training_name(self) -> str:
        return self.name.removeprefix(_VALIDATION)

    def _unknown(self, names: list[str]) -> str:
        return (
            f"{self._callback} monitors {self.name!r}, which is not a metric of this run "
            f"({', '.join(map(repr, names))}).{nearest(self.name, names)}"
        )


@set_module("mirror.callbacks")
class Callback:
    """Base class for callbacks. Override the hooks you need.

    A callback runs once, on the host, never per replica; the metrics it receives are Python floats.
    It may use the trainer: `fit.trainer.evaluate(data)`, `fit.trainer.save(directory)`,
    `fit.stop("why")`. An exception in a callback ends the training and is raised by `fit`.
    Callbacks run in the order in which they are passed, except for those with `adds`, and for those
    with `runs_last`.

    Methods with the names of hooks that do not exist here, such as `on_train_begin` of Keras, and
    similar names are rejected. Begin the names of other methods with an underscore.

    Attributes:
        adds: Starts of the names of metrics that it adds to `logs` in `on_epoch_end`. It then runs
            before callbacks that show or log them.
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

    adds: ClassVar[tuple[str, ...]] = ()
    runs_last: ClassVar[bool] = False
    runs_on_chief_only: ClassVar[bool] = False

    def on_fit_begin(self, fit: FitLoop) -> None:
        """Called before the first step; `fit.position` is where the training starts or resumes."""

    def on_epoch_begin(self, fit: FitLoop) -> None:
        """Called before the first step of an epoch."""

    def on_step(self, fit: FitLoop) -> None:
        """Called after each launch of one or more steps, which may still be running."""

    def on_metrics(self, fit: FitLoop, step: int, logs: dict[str, float]) -> None:
        """Called when the metrics of a launch are available: in order, up to 8 launches later.

        Args:
            fit: The run.
            step: Last step of the launch, counted over all epochs from 1.
            logs: Means over the examples of the launch.
        """

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:
        """Called after an epoch and its validation.

        Args:
            fit: The run; `fit.history` already contains the epoch.
            logs: Means over the examples of the epoch; names of validation metrics start with
                `val_`. Metrics that a callback adds become part of the history.
        """

    def on_fit_end(self, fit: FitLoop) -> None:
        """Called at the end, also after an error or Ctrl-C. Close files here."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the state of this callback for checkpoints, as JSON."""
        return {}

    def from_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `to_dict` returned, when a training is resumed."""


HOOKS: Mapping[str, list[str]] = {
    name: parameter_names(hook)[1:]
    for name, hook in vars(Callback).items()
    if name.startswith("on_")
}
"""The hooks of `Callback` and their parameters, without `self`."""


def require_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Returns the callbacks as a tuple.

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
    return callbacks
