"""Callbacks that stop a training: without improvement, or after non-finite metrics."""

import math
from typing import Any, Literal, SupportsFloat, TypeAlias, final

from mirror._src.base.errors import counted, expected, require_int
from mirror._src.base.public_names import set_module
from mirror._src.training.callbacks.callback import Callback, Monitor
from mirror._src.training.loop import FitLoop
from mirror._src.training.precision import stuck

Mode: TypeAlias = Literal["min", "max"]


@set_module("mirror.callbacks")
@final
class EarlyStopping(Callback):
    """Stops the training when a metric has not improved for some epochs.

    Args:
        monitor: Metric, such as `"val_loss"`.
        patience: Number of consecutive epochs without improvement after which training stops; 0 is
            treated as 1.
        min_delta: Minimum change of the best value that counts as an improvement.
        mode: Whether the best value is the `"min"` or the `"max"`.

    Raises:
        ValueError: If `mode` is unknown, or `patience` or `min_delta` is negative. In `fit`, if
            `monitor` is not a metric.
        TypeError: If `patience` is not an integer, or `min_delta` is not a number.

    Attributes:
        best: Best value so far, or None.
        best_epoch: Epoch of the best value, from 0.

    >>> stopping = EarlyStopping("loss", patience=2, min_delta=100.0)
    >>> len(trainer.fit(data, epochs=9, callbacks=stopping, progress=False).epochs)
    3
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 0,
        *,
        min_delta: float = 0.0,
        mode: Mode = "min",
    ) -> None:
        require_mode(mode)
        require_int("patience", patience, 0)
        if not isinstance(min_delta, SupportsFloat):
            raise TypeError(expected("min_delta", min_delta, "a number"))
        if not min_delta >= 0:  # NaN, too
            raise ValueError(expected("min_delta", min_delta, "non-negative"))
        self._monitor = Monitor("EarlyStopping", monitor)
        self._patience, self._min_delta = patience, min_delta
        self._mode, self._sign = mode, 1.0 if mode == "min" else -1.0
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None
        self.best_epoch: int | None = None
        self._waited = 0

    def on_fit_begin(self, fit: FitLoop) -> None:
        """Resets the best value of a new training; a resumed one may stop at once."""
        if not fit.history.epochs:
            self._reset()
        self._stop_if_due(fit)

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:
        """Compares the metric with its best value."""
        value = self._monitor.value(logs)
        if self._is_better(value):
            self.best, self.best_epoch, self._waited = value, fit.history.epochs[-1], 0
        else:
            self._waited += 1
        self._stop_if_due(fit)

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        return self.best is None or self._sign * (self.best - value) > self._min_delta

    def _stop_if_due(self, fit: FitLoop) -> None:
        if self._waited >= max(self._patience, 1):
            best = "" if self.best is None else f" (best: {self.best:.4g})"
            epochs = counted(self._waited, "epoch")
            fit.stop(f"{self._monitor.name} did not improve for {epochs}{best}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the best value, and the number of epochs since then."""
        best = {"best": self.best, "best_epoch": self.best_epoch, "waited": self._waited}
        return {**best, "mode": self._mode}

    def from_dict(self, state: dict[str, Any]) -> None:
        """Restores the best value, and the number of epochs since then.

        Raises:
            ValueError: If it is the best value of the other mode.
        """
        if state.get("mode", self._mode) != self._mode:
            raise ValueError(f"mode={self._mode!r} has another best value")
        self.best, self.best_epoch = state["best"], state["best_epoch"]
        self._waited = state["waited"]


@set_module("mirror.callbacks")
@final
class NaNGuard(Callback):
    """Raises an error when a metric of a step is NaN or infinite.

    A `mirror.Weighted` metric whose weights add up to 0 in a step is NaN because nothing was
    measured. It does not raise.

    With a `mirror.LossScale`, steps whose gradients are infinite or NaN are skipped. They are an
    error only if the scale is at its minimum, because a smaller one cannot help.

    Metrics arrive up to 8 launches late, and the model has been updated since. Return to a
    checkpoint: `trainer.restore(directory)`.

    Args:
        monitor: Metric to check. Defaults to all metrics.

    Raises:
        FloatingPointError: In `fit`, if a metric is not finite, or the loss scale at its minimum
            does not make the gradients finite.

    >>> history = trainer.fit(data, epochs=2, callbacks=NaNGuard(), progress=False)
    """

    def __init__(self, monitor: str | None = None) -> None:
        self._monitor = None if monitor is None else Monitor("NaNGuard", monitor, of_steps=True)

    def on_metrics(self, fit: FitLoop, step: int, logs: dict[str, float]) -> None:
        """Checks the metrics of a launch."""
        if message := stuck(fit.trainer.loss_scale, logs, step):
            raise FloatingPointError(message)
        for name, value in logs.items():
            is_monitored = self._monitor is None or self._monitor.name == name
            is_monitored = is_monitored and name not in fit.empty
            if is_monitored and not math.isfinite(value):
                raise FloatingPointError(
                    f"{name} is {value} at step {step} (epoch {fit.position.epoch + 1}). Common "
                    "causes: a learning rate that is too high, log(0) or division by zero, or "
                    "invalid labels (set labels=... and num_classes=... to check them)."
                )


def require_mode(mode: Any) -> None:
    """Checks the argument `mode`.

    Raises:
        ValueError: If it is neither `"min"` nor `"max"`.
    """
    if mode not in ("min", "max"):
        raise ValueError(expected("mode", mode, "'min' or 'max'"))
