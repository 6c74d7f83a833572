"""`Profiler`: profiles a few steps of a training."""

from pathlib import Path
from typing import ClassVar, final

import jax

from mirror._src.base.errors import expected
from mirror._src.base.modules import set_module
from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.fit import TrainingRun


@set_module("mirror.callbacks")
@final
class Profiler(Callback):
    """Profiles a range of steps with `jax.profiler`; open the result in TensorBoard or Perfetto.

    Args:
        directory: Directory to write the profile to.
        steps: Half-open range `(start, stop)` of steps to profile, counted from 0 in every `fit`.
            The default skips the first steps, which include compilation.

    Raises:
        ValueError: If `steps` is not an increasing pair of non-negative numbers.

    >>> callbacks = [Profiler("profile", steps=(10, 20))]  # for fit
    """

    runs_on_chief_only: ClassVar[bool] = True

    def __init__(self, directory: str | Path, steps: tuple[int, int] = (5, 10)) -> None:
        first, last = steps
        if not 0 <= first < last:
            raise ValueError(expected("steps", steps, "a range (start, stop), 0 <= start < stop"))
        self._directory = Path(directory).expanduser()
        self._first, self._last = first, last
        self._running = False

    def on_fit_begin(self, fit: TrainingRun) -> None:
        """Resets the step counter, and starts the profile if it begins at step 0."""
        self._begin = fit.position.step
        self._start_if_due(0)

    def on_step(self, fit: TrainingRun) -> None:
        """Starts or stops the profile."""
        done = fit.position.step - self._begin
        if self._running and done >= self._last:
            fit.collect()  # waits for the profiled steps
            self._stop()
        self._start_if_due(done)

    def on_fit_end(self, fit: TrainingRun) -> None:  # noqa: ARG002
        """Stops the profile after an error, or if there were fewer steps."""
        self._stop()

    def _start_if_due(self, done: int) -> None:
        if not self._running and self._first <= done < self._last:
            jax.profiler.start_trace(str(self._directory))
            self._running = True

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
