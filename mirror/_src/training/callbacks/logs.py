"""Callbacks that measure or log: files, functions, learning rate, profiles, throughput."""

import csv
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TextIO, final

import jax
import numpy as np
import optax

from mirror._src.base import clock
from mirror._src.base.errors import expected, require_int
from mirror._src.base.naming import require_parameters
from mirror._src.base.optional import require
from mirror._src.base.public_names import set_module
from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.loop import FitLoop
from mirror._src.training.objective import LOSS
from mirror._src.training.paths import LocalCopy
from mirror._src.training.runners import flops_of, local_strategy

# Tera-operations per second of dense products in bfloat16, or float16 on the two oldest GPUs, from
# NVIDIA's data sheets. The first name that is in JAX's `device_kind` counts.
_TERA = {
    **{"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312},
    **{"L40S": 362, "L4": 121, "V100": 125, "T4": 65},
}


@set_module("mirror.callbacks")
@final
class CSVLogger(Callback):
    """Writes one line per epoch to a CSV file.

    Args:
        file: Path of the file; missing directories are created. Or a URL of an object store, to
            which the file is copied after each epoch.
        append: Whether to append to an existing file. A resumed training always appends, after
            removing the lines of epochs that it repeats.

    Raises:
        ValueError: In `fit`, if the columns of the file differ from the metrics.

    >>> history = trainer.fit(data, epochs=2, callbacks=CSVLogger("log.csv"), progress=False)
    >>> from pathlib import Path
    >>> print(Path("log.csv").read_text())
    epoch,loss
    1,...
    2,...
    """

    runs_on_chief_only: ClassVar[bool] = True

    def __init__(self, file: str | Path, *, append: bool = False) -> None:
        self._copy = LocalCopy("file", file)
        self._append = append
        self._file: TextIO | None = None

    def on_fit_begin(self, fit: FitLoop) -> None:
        """Opens the file."""
        self._copy.begin()
        path = self._copy.path
        done = fit.history.epochs
        appends = (self._append or bool(done)) and path.exists()
        if appends and done:
            _remove_later_epochs(path, done[-1])
        self._columns = next(iter(_rows_of(path)), None) if appends else None
        self._file = path.open("a" if self._columns else "w", newline="", encoding="utf-8")

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:
        """Writes a line, and the header before the first."""
        assert self._file is not None
        columns = ["epoch", *logs]
        writer = csv.writer(self._file)
        if self._columns is None:
            self._columns = columns
            writer.writerow(columns)
        if columns != self._columns:
            raise ValueError(
                f"{self._copy.target} has the columns {', '.join(self._columns)}, but this epoch "
                f"has {', '.join(columns)}. Use another file."
            )
        writer.writerow([fit.history.epochs[-1] + 1, *logs.values()])
        self._file.flush()
        self._copy.upload()

    def on_fit_end(self, fit: FitLoop) -> None:  # noqa: ARG002
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        self._file = None
        self._copy.close()


def _rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def _remove_later_epochs(path: Path, last_epoch: int) -> None:
    """Removes lines after `last_epoch`, left by a training that was killed later than that."""
    rows = _rows_of(path)
    count = len(rows)
    while count > 1 and not _is_done(rows[count - 1], rows[0], last_epoch):
        count -= 1
    if count < len(rows):
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows[:count])


def _is_done(row: list[str], columns: list[str], last_epoch: int) -> bool:
    return len(row) == len(columns) and row[0].isdecimal() and int(row[0]) <= last_epoch + 1


@set_module("mirror.callbacks")
@final
class Log(Callback):
    """Calls a function with the metrics of epochs, and optionally of steps.

    For experiment trackers, see `Tracker`.

    Args:
        fn: Function `(metrics, step)`. `metrics` is a dict of floats, and `step` the number of
            steps so far.
        every_steps: Number of steps between additional calls, in which the names of metrics start
            with `step_`. 0 calls the function after epochs only.

    Raises:
        TypeError: If `fn` does not take two arguments, or `every_steps` is not an integer.
        ValueError: If `every_steps` is negative.

    >>> log = Log(lambda metrics, step: print(sorted(metrics), step > 0))
    >>> history = trainer.fit(data, epochs=2, callbacks=log, progress=False)
    ['loss'] True
    ['loss'] True
    """

    runs_on_chief_only: ClassVar[bool] = True

    def __init__(self, fn: Callable[[dict[str, float], int], Any], *, every_steps: int = 0) -> None:
        fix = "For example: Log(lambda metrics, step: print(step, metrics))."
        if not callable(fn):
            raise TypeError(expected("fn", fn, "a function (metrics, step)", fix))
        require_parameters(fn, "`fn`", ("metrics", "step"), fix)
        require_int("every_steps", every_steps, 0)
        self._fn = fn
        self._every_steps = every_steps
        self._called = 0

    def on_fit_begin(self, fit: FitLoop) -> None:
        """Counts steps from the current one."""
        self._called = fit.position.step

    def on_metrics(self, fit: FitLoop, step: int, logs: dict[str, float]) -> None:  # noqa: ARG002
        """Calls the function with the metrics of a step, if they are due."""
        if self._every_steps and step - self._called >= self._every_steps:
            self._called = step
            self._fn({f"step_{name}": value for name, value in logs.items()}, step)

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:
        """Calls the function with the metrics of the epoch."""
        self._fn(dict(logs), fit.position.step)


@set_module("mirror.callbacks")
@final
class TensorBoard(Callback):
    """Writes the metrics of epochs, and optionally of steps, for TensorBoard.

    Args:
        directory: Log directory. Or a URL of an object store, to which the log is copied after each
            epoch.
        every_steps: Number of steps between additional entries. 0 writes only epochs.
        program: Whether to write the text of the compiled step, at the first step.

    Raises:
        ModuleNotFoundError: If tensorboardX is not installed.
        ValueError: If `every_steps` is negative.
        TypeError: If `every_steps` is not an integer.

    >>> history = trainer.fit(data, callbacks=TensorBoard("logs"), progress=False)
    >>> from pathlib import Path
    >>> len(list(Path("logs").iterdir()))
    1
    """

    runs_on_chief_only: ClassVar[bool] = True

    def __init__(
        self, directory: str | Path, *, every_steps: int = 0, program: bool = False
    ) -> None:
        self._writer_class = require("tensorboardX").SummaryWriter
        self._copy = LocalCopy("directory", directory)
        self._log = Log(self._add, every_steps=every_steps)
        self._program = program
        self._writer: Any = None

    def on_fit_begin(self, fit: FitLoop) -> None:
        """Opens the log."""
        self._copy.begin()
        suffix = f".{time.time_ns()}"  # two logs of one second must not share a file
        self._writer = self._writer_class(str(self._copy.path), filename_suffix=suffix)
        self._log.on_fit_begin(fit)

    def on_step(self, fit: FitLoop) -> None:
        """Writes the text of the compiled step, once."""
        if self._program:
            self._program = False
            text = fit.trainer._lowered_text()
            self._writer.add_text("program", f"```\n{text}\n```", fit.position.step)

    def on_metrics(self, fit: FitLoop, step: int, logs: dict[str, float]) -> None:
        """Writes the metrics of steps, if they are due."""
        self._log.on_metrics(fit, step, logs)

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:
        """Writes the metrics of the epoch."""
        self._add(logs, fit.history.epochs[-1] + 1)
        self._writer.flush()
        self._copy.upload()

    def on_fit_end(self, fit: FitLoop) -> None:  # noqa: ARG002
        """Closes the log."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        self._copy.close()

    def _add(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)


@set_module("mirror.callbacks")
@final
class LearningRate(Callback):
    """Adds the learning rate to the metrics of each epoch, as `learning_rate`.

    Args:
        schedule: The schedule of the optimizer. Defaults to the learning rate in the optimizer's
            state, where `optax.inject_hyperparams` stores it.

    Raises:
        ValueError: In `fit`, if there is neither a schedule nor a learning rate in the state.

    >>> rate = LearningRate(optax.constant_schedule(0.125))
    >>> trainer.fit(data, epochs=2, callbacks=rate, progress=False)["learning_rate"]
    [0.125, 0.125]
    """

    adds: ClassVar[tuple[str, ...]] = ("learning_rate",)

    def __init__(self, schedule: Callable[[int], Any] | None = None) -> None:
        self._schedule = schedule

    def on_fit_begin(self, fit: FitLoop) -> None:
        """Checks that the learning rate is available."""
        self._rate(fit)

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:
        """Adds the learning rate of the last update."""
        logs["learning_rate"] = self._rate(fit)

    def _rate(self, fit: FitLoop) -> float:
        optimizer = fit.trainer.optimizer
        find = functools.partial(optax.tree_utils.tree_get_all_with_path, optimizer.opt_state)
        if self._schedule is not None:
            # Not the steps of `fit`: a loss scale skips updates, and `optax.MultiSteps` joins them.
            counts = find("gradient_step")
            count = int(np.asarray((counts[0][1] if counts else optimizer.step)[...]))
            return float(np.asarray(self._schedule(max(count - 1, 0))))
        rates = find("learning_rate")
        if not rates:
            raise ValueError(
                "The optimizer's state does not contain learning_rate. Pass the schedule, "
                "LearningRate(schedule), or create the optimizer with "
                "optax.inject_hyperparams(optax.adam)(learning_rate=...)."
            )
        return float(np.asarray(rates[0][1][...]))


@set_module("mirror.callbacks")
@final
class Profiler(Callback):
    """Profiles a range of steps with `jax.profiler`; open the result in TensorBoard or Perfetto.

    Args:
        directory: Directory to write the profile to. Or a URL of an object store.
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
        self._copy = LocalCopy("directory", directory)
        self._first, self._last = first, last
        self._running = False

    def on_fit_begin(self, fit: FitLoop) -> None:
        """Resets the step counter, and starts the profile if it begins at step 0."""
        self._copy.begin()
        self._begin = fit.position.step
        self._start_if_due(0)

    def on_step(self, fit: FitLoop) -> None:
        """Starts or stops the profile."""
        done = fit.position.step - self._begin
        if self._running and done >= self._last:
            fit.collect()  # waits for the profiled steps
            self._stop()
        self._start_if_due(done)

    def on_fit_end(self, fit: FitLoop) -> None:  # noqa: ARG002
        """Stops the profile after an error, or if there were fewer steps."""
        self._stop()
        self._copy.close()

    def _start_if_due(self, done: int) -> None:
        if not self._running and self._first <= done < self._last:
            jax.profiler.start_trace(str(self._copy.path))
            self._running = True

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()


def peak_of(kind: str) -> float | None:
    """Returns the most operations per second of a device, or None if it is unknown.

    >>> peak_of("NVIDIA H100 80GB HBM3"), peak_of("NVIDIA A1000"), peak_of("cpu")
    (989000000000000.0, None, None)
    """
    words = f" {kind.replace('-', ' ')} "
    return next((1e12 * tera for name, tera in _TERA.items() if f" {name} " in words), None)


@set_module("mirror.callbacks")
@final
class Throughput(Callback):
    """Adds the speed of the training to the metrics of each epoch.

    It only reads the clock, and once per `fit` XLA's analysis of the step.

    | metric | meaning |
    | --- | --- |
    | `examples_per_sec` | examples of all replicas per second of training steps |
    | `weights_per_sec` | weights of a `mirror.Weighted` loss per second, such as tokens |
    | `flops_per_sec` | floating-point operations of all devices per second, as XLA counts them |
    | `peak_share` | their share of what the devices can do at most |
    | `goodput` | share of the time of `fit` so far that was spent in training steps |

    Steps include waiting for data, but neither the compilation of the first step nor validation and
    callbacks at the end of an epoch. XLA counts the body of a loop once: there is no
    `flops_per_sec` for a step with `jax.lax.scan` or `while_loop`, `accumulate_steps` or
    `steps_per_execution`, nor for a staged step and steps on parameter servers.

    Args:
        peak_flops: The most operations per second of one device, for `peak_share`. Defaults to the
            tensor cores' figure for bfloat16, on NVIDIA's data center GPUs from T4 to B200.

    Raises:
        TypeError: If `peak_flops` is not a number.
        ValueError: If it is not positive.

    >>> history = trainer.fit(data, callbacks=Throughput(), progress=False)
    >>> sorted(history)
    ['examples_per_sec', 'flops_per_sec', 'goodput', 'loss']
    """

    adds: ClassVar[tuple[str, ...]] = ("examples_", "weights_", "flops_", "peak_share", "goodput")

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None:
            fix = "For example peak_flops=989e12, or omit it."
            if isinstance(peak_flops, bool) or not isinstance(peak_flops, int | float):
                raise TypeError(expected("peak_flops", peak_flops, "a number", fix))
            if not peak_flops > 0:
                raise ValueError(expected("peak_flops", peak_flops, "positive", fix))
        self._peak = peak_flops

    def on_fit_begin(self, fit: FitLoop) -> None:  # noqa: ARG002
        """Starts the clock of the run."""
        self._began, self._in_steps = clock.now(), 0.0
        self._compiled = self._end = 0.0
        self._flops: float | None = None

    def on_epoch_begin(self, fit: FitLoop) -> None:
        """Notes where the epoch starts."""
        self._first = fit.position.step
        self._before = self._after = _amounts(fit)

    def on_step(self, fit: FitLoop) -> None:  # noqa: ARG002
        """Notes when the first step has been compiled."""
        self._compiled = self._compiled or clock.now()

    def on_metrics(self, fit: FitLoop, step: int, logs: dict[str, float]) -> None:  # noqa: ARG002
        """Notes when the last step of the epoch has ended."""
        self._end, self._after = clock.now(), _amounts(fit)

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:
        """Adds the metrics."""
        seconds = self._end - max(self._compiled, fit.steps_began)
        if seconds > 0:  # else, the epoch was restored after its last step
            self._in_steps += seconds
            self._add_rates(fit, logs, seconds)
        logs["goodput"] = self._in_steps / (clock.now() - self._began)

    def _add_rates(self, fit: FitLoop, logs: dict[str, float], seconds: float) -> None:
        for name, amount in self._after.items():
            logs[f"{name}_per_sec"] = (amount - self._before.get(name, 0)) / seconds
        if self._flops is None:
            self._flops = flops_of(fit._runner, fit.last_batch)
        if self._flops:
            devices = list(dict.fromkeys(local_strategy(fit.trainer.strategy).devices))
            rate = self._flops * (fit.position.step - self._first) / seconds
            logs["flops_per_sec"] = rate * len(devices)
            peak = self._peak or peak_of(devices[0].device_kind)
            if peak is not None:
                logs["peak_share"] = rate / peak


def _amounts(fit: FitLoop) -> dict[str, Any]:
    """Returns the examples and the weights of the epoch whose metrics have arrived."""
    meter = fit.position.meter
    weights = {"weights": meter.weights[LOSS]} if LOSS in meter.weights else {}
    return {"examples": meter.count, **weights}
