"""`Monitor`: a metric that a callback monitors, checked as early as possible."""

from collections.abc import Mapping
from typing import final

from mirror._src.base.errors import nearest
from mirror._src.training.fit import TrainingRun

_VALIDATION = "val_"


@final
class Monitor:
    """The metric that a callback monitors.

    Args:
        callback: Class name of the callback, for messages.
        name: Name of the metric, such as `"val_loss"`.
        of_steps: Whether the callback reads metrics of steps instead of epochs.
    """

    def __init__(self, callback: str, name: str, *, of_steps: bool = False) -> None:
        self.name = name
        self._callback = callback
        self._of_steps = of_steps

    def require_validation(self, fit: TrainingRun) -> None:
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

    def require_metric(self, fit: TrainingRun) -> None:
        """Checks, after the first step, that the metric will exist.

        Raises:
            ValueError: If there is no such metric, and no callback may add it.
        """
        has_validation = fit.has_validation and not self._of_steps
        names = [*fit.metrics, *(_VALIDATION + name for name in fit.metrics if has_validation)]
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
