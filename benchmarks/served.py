"""Measures updates with parameter servers, on a cluster of Ray on this machine.

    python -m benchmarks.served [--suites overhead,own,workers,slow] [--rounds 20]

All contenders of a suite take turns, so that background load affects all of them. They run on the
same cluster, except in `own`: there, each has a process and a cluster of its own. `overhead` and
`own`: one server, one worker and 4 MB of parameters, against the same program that is written by
hand with Ray and JAX, and against its messages alone. `workers`: two workers against one,
asynchronous. `slow`: one of four workers waits five times longer than the others for each batch,
with bounds on the staleness and without.
"""

import argparse
import contextlib
import functools
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import optax
from flax import nnx

import mirror
from benchmarks import stats
from benchmarks.processes import Child
from benchmarks.served_by_hand import EPSILON, RATE, Chain
from benchmarks.timing import in_order
from mirror._src.ps.ray_cluster import Connection

BATCH_SIZE, FEATURES, CLASSES = 32, 64, 10
LARGE, SMALL = (FEATURES, 1024, 1024, CLASSES), (FEATURES, 64, CLASSES)
FAST_SECS, SLOW_SECS = 0.03, 0.15
OVERHEAD_LIMIT, WORKERS_GOAL = 1.2, 1.5
_RTOL, _LIMIT_SECS = 1e-4, 120.0
_Layers = list[tuple[np.ndarray, np.ndarray]]


class Program(Protocol):
    """A contender."""

    def take(self, steps: int) -> list[float]:
        """Takes some steps; returns their losses."""

    def close(self) -> None:
        """Ends its processes."""


class MLP(nnx.Module):
    """Linear layers with ReLU in between.

    Args:
        layers: Kernel and bias of each layer.
    """

    def __init__(self, layers: _Layers) -> None:
        self.layers = nnx.List(
            [nnx.List([nnx.Param(jax.numpy.array(each)) for each in layer]) for layer in layers]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        for number, (kernel, bias) in enumerate(self.layers):
            x = x @ kernel[...] + bias[...]
            if number < len(self.layers) - 1:
                x = jax.nn.relu(x)
        return x


def train_step(model: MLP, optimizer: nnx.Optimizer[Any], batch: Any) -> jax.Array:
    """The training step, as for every strategy."""

    def mean_loss(model: MLP) -> jax.Array:
        logits = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = nnx.value_and_grad(mean_loss)(model)
    grads, loss = mirror.all_reduce("mean", (grads, loss))
    optimizer.update(model, grads)
    return loss


def layers_of(sizes: Sequence[int]) -> _Layers:
    """Returns the first parameters of an MLP."""
    draw = np.random.default_rng(0)
    return [
        (draw.normal(size=(a, b), scale=a**-0.5).astype(np.float32), np.zeros(b, np.float32))
        for a, b in itertools.pairwise(sizes)
    ]


def a_batch() -> dict[str, np.ndarray]:
    """Returns a batch."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=(BATCH_SIZE, FEATURES)).astype(np.float32)
    return {"x": x, "y": draw.integers(0, CLASSES, BATCH_SIZE).astype(np.int32)}


def losses_of(model: MLP, batch: Any) -> jax.Array:
    """The losses of the examples, for a `Trainer`."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


class Losses(mirror.callbacks.Callback):
    """Records the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_metrics(self, fit: Any, step: int, logs: Mapping[str, float]) -> None:
        """Records the loss."""
        del fit, step
        self.values.append(logs["loss"])


class Synchronous:
    """Training by a `Trainer` on one server and one worker."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._strategy = mirror.ps.ParameterServerStrategy(ps=1, workers=1)
        with self._strategy.scope():
            model = MLP(layers_of(sizes))
            self._trainer = mirror.Trainer(model, optax.adam(RATE, eps=EPSILON), losses_of)
        self._batch = a_batch()

    def take(self, steps: int) -> list[float]:
        """See `Program`."""
        losses = Losses()
        self._trainer.fit([self._batch] * steps, callbacks=losses, progress=False)
        return losses.values

    def close(self) -> None:
        """See `Program`."""
        self._strategy.close()


class Served:
    """Asynchronous training on parameter servers.

    Args:
        sizes: Widths of the layers.
        dataset_fn: Returns the batches of a worker; None sends a batch with every step.
        options: Of `mirror.ps.ParameterServerStrategy`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dataset_fn: Callable[[], Iterator[Any]] | None = None,
        **options: Any,
    ) -> None:
        self.strategy = mirror.ps.ParameterServerStrategy(ps=1, **options)
        self._coordinator = mirror.ps.ClusterCoordinator(self.strategy)
        with self.strategy.scope():
            model = MLP(layers_of(sizes))
            optimizer = nnx.Optimizer(model, optax.adam(RATE, eps=EPSILON), wrt=nnx.Param)
        batch: Any = a_batch()
        if dataset_fn is not None:
            batch = iter(self._coordinator.create_per_worker_dataset(dataset_fn))
        self._arguments = (model, optimizer, batch)

    def take(self, steps: int) -> list[float]:
        """See `Program`."""
        schedule = self._coordinator.schedule
        losses = [schedule(train_step, self._arguments) for _ in range(steps)]
        return [float(loss.fetch()) for loss in losses]

    def settle(self) -> None:
        """Waits until late workers have ended their part too."""
        self._coordinator.join(60)

    def close(self) -> None:
        """See `Program`."""
        self.strategy.close()


class SlowInput:
    """A dataset of which the first worker that creates it waits longer for each batch.

    Args:
        folder: Empty folder, in which that worker leaves a file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields the same batch again and again."""
        secs, batch = SLOW_SECS, a_batch()
        try:
            (self._folder / "slow").open("x").close()
        except FileExistsError:
            secs = FAST_SECS
        while True:
            time.sleep(secs)
            yield batch


class Goal(NamedTuple):
    """A ratio of two contenders, and what it should be.

    Attributes:
        name: The contender.
        base: The one it is compared with.
        limit: Largest ratio of their times, or `None`.
        rate: Smallest ratio of their rates, or `None`.
    """

    name: str
    base: str
    limit: float | None = None
    rate: float | None = None

    def line(self, times: stats.Times) -> str:
        """Returns the ratio with its interval, and whether the goal is reached."""
        if self.limit is not None:
            found = stats.ratio(times, self.name, self.base)
            goal, verdict = f"at most {self.limit:g}", str(found.at_most(self.limit))
            what = "time"
        else:
            found = stats.ratio(times, self.base, self.name)
            what, goal, verdict = "rate", "", ""
            if self.rate is not None:
                verdict = stats.ratio(times, self.name, self.base).at_most(1 / self.rate)
                goal = f"at least {self.rate:g}"
        text = f"{self.name}: {what} {found.median:.2f} [{found.low:.2f}, {found.high:.2f}]"
        return f"{text} of {self.base}" + (f", goal {goal}: {verdict}" if goal else "")


class Turn(NamedTuple):
    """How much a contender does in its turn.

    Attributes:
        program: The contender.
        steps: Number of updates.
        units: What the time of a turn is divided by: updates, or batches.
    """

    program: Program
    steps: int
    units: int


def measure(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds per unit in each round, by contender."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in in_order(list(turns), number):
            program, steps, units = turns[name]
            start = time.perf_counter()
            program.take(steps)
            times[name].append((time.perf_counter() - start) / units * 1e3)
            if isinstance(program, Served):
                program.settle()
    return times


UPDATES: dict[str, Callable[[], Program]] = {
    "by hand": lambda: Chain(layers_of(LARGE), a_batch()),
    "synchronous": lambda: Synchronous(LARGE),
    "asynchronous": lambda: Served(LARGE, workers=1, staleness=None),
    "messages alone": lambda: Chain(layers_of(LARGE), a_batch(), computes=False),
}
"""The contenders of `overhead`."""


class InOwnProcess:
    """A contender of `overhead` in a process and a cluster of its own.

    Args:
        name: Its name.
    """

    def __init__(self, name: str) -> None:
        self._child = Child("benchmarks.served_child", {"name": name}, 1)

    def take(self, steps: int) -> list[float]:
        """See `Program`."""
        self._child.ask(str(steps))
        losses: list[float] = self._child.answer(_LIMIT_SECS)["losses"]
        return losses

    def close(self) -> None:
        """See `Program`."""
        self._child.end()


def overhead(
    rounds: int, steps: int, contenders: Mapping[str, Callable[[], Program]] = UPDATES
) -> tuple[dict[str, list[float]], list[Goal]]:
    """Measures one update against the same program by hand."""
    with contextlib.ExitStack() as stack:
        programs: dict[str, Program] = {}
        for name, create in contenders.items():
            programs[name] = create()
            stack.callback(programs[name].close)
        losses = {name: program.take(3) for name, program in programs.items()}
        for name in ("synchronous", "asynchronous"):
            if not np.allclose(losses[name], losses["by hand"], rtol=_RTOL):
                raise ValueError(f"The programs train to different losses: {losses}.")
        turns = {name: Turn(each, steps, steps) for name, each in programs.items()}
        measure(turns, 2)  # warm up
        times = measure(turns, rounds)
    goals = [Goal(name, "by hand", OVERHEAD_LIMIT) for name in ("synchronous", "asynchronous")]
    return times, [*goals, Goal("by hand", "messages alone", rate=None)]


def own(rounds: int, steps: int) -> tuple[dict[str, list[float]], list[Goal]]:
    """Measures the same in processes and clusters of their own."""
    names = list(UPDATES)
    return overhead(rounds, steps, {name: functools.partial(InOwnProcess, name) for name in names})


def workers(rounds: int, steps: int) -> tuple[dict[str, list[float]], list[Goal]]:
    """Measures two asynchronous workers against one, without and with a wait for each batch."""
    with contextlib.ExitStack() as stack:
        turns = {}
        for count in (1, 2):
            for name, dataset_fn in (("", None), (", 10 ms of input", waiting_input)):
                program = Served(SMALL, dataset_fn, workers=count, staleness=None)
                stack.callback(program.close)
                program.take(20)
                words = "1 worker" if count == 1 else f"{count} workers"
                turns[words + name] = Turn(program, 2 * steps, 2 * steps)
        measure(turns, 2)
        times = measure(turns, rounds)
    return times, [
        Goal(f"2 workers{name}", f"1 worker{name}", rate=WORKERS_GOAL)
        for name in ("", ", 10 ms of input")
    ]


def waiting_input() -> Iterator[dict[str, np.ndarray]]:
    """Yields the same batch again and again, each after 10 ms."""
    batch = a_batch()
    while True:
        time.sleep(0.01)
        yield batch


def slow(rounds: int, steps: int) -> tuple[dict[str, list[float]], list[Goal]]:
    """Measures batches per second with one slow worker of four."""
    modes = {"staleness 3": 3, "staleness 15": 15, "no bound": None}
    with contextlib.ExitStack() as stack:
        turns = {}
        for name, staleness in modes.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            program = Served(SMALL, SlowInput(folder), workers=4, staleness=staleness)
            stack.callback(program.close)
            program.take(8)
            program.settle()
            turns[name] = Turn(program, 4 * steps, 4 * steps)
        times = measure(turns, rounds)
    return times, [Goal(name, "staleness 3", rate=None) for name in ("staleness 15", "no bound")]


SUITES = {"overhead": overhead, "own": own, "workers": workers, "slow": slow}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and prints ratios with their 95 % intervals."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.served",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suites", default=",".join(SUITES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=15, help="per turn")
    options = parser.parse_args(argv)
    connection = Connection(None)
    try:
        for suite in options.suites.split(","):
            before = os.getloadavg()[0]
            times, goals = SUITES[suite](options.rounds, options.steps)
            print(
                f"{suite}: {options.rounds} rounds, load {before:.1f} to {os.getloadavg()[0]:.1f}"
            )
            for name, values in times.items():
                low, high = np.percentile(values, [25, 75])
                print(f"  {name}: {stats.median(values):.2f} ms, quartiles {low:.2f} to {high:.2f}")
            for goal in goals:
                print(f"  {goal.line(times)}", flush=True)
    finally:
        connection.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
