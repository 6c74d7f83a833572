"""Ending a training: where it gets no better, and where it has gone wrong."""

import math
from typing import Any, Literal, TypeAlias, final

from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.fit import TrainingRun
from mirror._src.utils.errors import describe
from mirror._src.utils.modules import set_module

Mode: TypeAlias = Literal["min", "max"]


@set_module("mirror.callbacks")
@final
class EarlyStopping(Callback):
    """Ends the training when a metric has been no better than its best for some epochs.

    Args:
        monitor: the metric, such as `"val_loss"`.
        patience: after how many epochs in a row that are no better it ends; 0 is 1.
        min_delta: by how much it must be better than the best so far to count.
        mode: whether less or more is better.

    Raises:
        ValueError: an unknown mode, a negative `patience` or `min_delta`; in `fit`, a metric that
            the epochs do not have.

    Attributes:
        best: the best value so far.
        best_epoch: its epoch, from 0.

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
        if patience < 0 or min_delta < 0:
            raise ValueError(f"patience={patience}, min_delta={min_delta}: neither is negative.")
        self._monitor, self._patience, self._min_delta = monitor, patience, min_delta
        self._sign = 1.0 if mode == "min" else -1.0
        self._begin()

    def _begin(self) -> None:
        self.best: float | None = None
        self.best_epoch: int | None = None
        self._waited = 0

    def on_fit_begin(self, fit: TrainingRun) -> None:
        """A new training has no best value yet; one that goes on may have ended already."""
        if not fit.history.epochs:
            self._begin()
        self._stop_if_due(fit)

    def on_epoch_end(self, fit: TrainingRun, logs: dict[str, float]) -> None:
        """Compares."""
        value = monitored(self, self._monitor, logs)
        if self._is_better(value):
            self.best, self.best_epoch, self._waited = value, fit.history.epochs[-1], 0
        else:
            self._waited += 1
        self._stop_if_due(fit)

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):  # no better than anything
            return False
        return self.best is None or self._sign * (self.best - value) > self._min_delta

    def _stop_if_due(self, fit: TrainingRun) -> None:
        if self._waited >= max(self._patience, 1):
            best = "" if self.best is None else f"; best {self.best:.4g}"
            epochs = "1 epoch" if self._waited == 1 else f"{self._waited} epochs"
            fit.stop(f"{self._monitor} no better for {epochs}{best}")

    def to_dict(self) -> dict[str, Any]:
        """The best value and how long it has been."""
        return {"best": self.best, "best_epoch": self.best_epoch, "waited": self._waited}

    def from_dict(self, found: dict[str, Any]) -> None:
        """Goes on waiting."""
        self.best, self.best_epoch = found["best"], found["best_epoch"]
        self._waited = found["waited"]


@set_module("mirror.callbacks")
@final
class NaNGuard(Callback):
    """Ends the training with an error where a metric of a step is infinite or no number.

    A `mirror.Weighted` metric whose weights add up to 0 in a step is NaN because nothing was
    measured, and does not end the training.

    The metrics come in up to 8 launches late: the model has been trained on by then. Go back to a
    checkpoint, `trainer.restore(directory)`.

    Args:
        monitor: the metric to look at; `None`: all.

    Raises:
        FloatingPointError: in `fit`, at the step.

    >>> history = trainer.fit(data, epochs=2, callbacks=NaNGuard(), progress=False)
    """

    def __init__(self, monitor: str | None = None) -> None:
        self._monitor = monitor

    def on_metrics(self, fit: TrainingRun, step: int, logs: dict[str, float]) -> None:
        """Looks at a launch's metrics."""
        if self._monitor is not None:
            monitored(self, self._monitor, logs)
        for name, value in logs.items():
            looked_at = self._monitor in (None, name) and name not in fit.empty
            if looked_at and not math.isfinite(value):
                raise FloatingPointError(
                    f"{name} is {value} at step {step}, in epoch {fit.position.epoch + 1}. Usual "
                    "causes: a learning rate that is too large, a logarithm or a quotient of 0, "
                    "labels that are no class (labels=..., num_classes=... checks them)."
                )


def require_mode(mode: Any) -> None:
    """Refuses what is neither.

    Raises:
        ValueError: it is not `"min"` and not `"max"`.
    """
    if mode not in ("min", "max"):
        raise ValueError(f"mode={describe(mode)} is neither 'min' nor 'max'.")


def monitored(callback: Callback, name: str, logs: dict[str, float]) -> float:
    """The metric that a callback looks at.

    Raises:
        ValueError: there is no such one.
    """
    if name not in logs:
        hint = " Pass validation_data to fit." if name.startswith("val_") else ""
        raise ValueError(
            f"{type(callback).__name__} looks at {name!r}; there are "
            f"{', '.join(map(repr, logs))}.{hint}"
        )
    return logs[name]
