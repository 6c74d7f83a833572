"""A profile of a few steps."""

from pathlib import Path
from typing import final

import jax

from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.fit import TrainingRun
from mirror._src.utils.errors import describe
from mirror._src.utils.modules import set_module


@set_module("mirror.callbacks")
@final
class Profiler(Callback):
    """Profiles some steps with `jax.profiler`; look at them with TensorBoard or Perfetto.

    Args:
        directory: where to write the profile.
        steps: the first step and the one after the last, counted in each `fit` from 0; the default
            leaves the first ones out, which compile.

    Raises:
        ValueError: no two steps in order.

    >>> callbacks = [Profiler("profile", steps=(10, 20))]  # for fit
    """

    def __init__(self, directory: str | Path, steps: tuple[int, int] = (5, 10)) -> None:
        first, last = steps
        if not 0 <= first < last:
            raise ValueError(f"steps={describe(steps)}: pass the first and the one after the last.")
        self._directory = Path(directory).expanduser()
        self._first, self._last = first, last
        self._running = False

    def on_fit_begin(self, fit: TrainingRun) -> None:
        """Counts from here."""
        self._begin = fit.position.step
        self._start_if_due(0)

    def on_step(self, fit: TrainingRun) -> None:
        """Starts or ends the profile."""
        done = fit.position.step - self._begin
        if self._running and done >= self._last:
            fit.collect()  # what is profiled should have been computed
            self._stop()
        self._start_if_due(done)

    def on_fit_end(self, fit: TrainingRun) -> None:  # noqa: ARG002
        """Ends the profile where there were fewer steps, or an error."""
        self._stop()

    def _start_if_due(self, done: int) -> None:
        if not self._running and self._first <= done < self._last:
            jax.profiler.start_trace(str(self._directory))
            self._running = True

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
