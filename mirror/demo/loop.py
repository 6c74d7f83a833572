"""The training loop: epochs, a progress bar, and metrics that never make the devices wait."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

import mirror
from mirror.demo import interrupts
from mirror.demo.data import Digits
from mirror.demo.models import Metrics, Training
from mirror.demo.options import Options

_MOST_RUNNING = 8
_BAR = "{desc} {percentage:3.0f}% |{bar:20}| {rate_fmt}{postfix}"


class Meter:
    """Adds the steps' metrics up on the host, as they come in."""

    def __init__(self) -> None:
        self._pending: deque[Metrics] = deque()
        self._loss, self._num_correct, self._num_images = 0.0, 0, 0
        self.step_losses: list[float] = []

    def add(self, metrics: Metrics) -> None:
        """Takes a step's metrics, which may not be computed yet."""
        self._pending.append(metrics)

    def collect(self, *, running: int = 0) -> None:
        """Adds up the steps' metrics, except for the last few.

        Reading an array waits for its step. Those that may still run are left for later, so that
        the devices never wait for the host.

        Args:
            running: how many of the last steps to leave.
        """
        while len(self._pending) > running:
            loss, num_correct, num_images = map(np.asarray, self._pending.popleft())
            self._loss += float(loss)
            self._num_correct += int(num_correct)
            self._num_images += int(num_images)
            self.step_losses.append(float(loss) / int(num_images))

    @property
    def loss(self) -> float:
        """The mean loss of all images so far."""
        return self._loss / max(self._num_images, 1)

    @property
    def accuracy(self) -> float:
        """The fraction of all images so far that was recognised."""
        return self._num_correct / max(self._num_images, 1)

    @property
    def score(self) -> str:
        """The accuracy with the counts it is made of."""
        return f"{self.accuracy:.1%} ({self._num_correct} of {self._num_images})"


@dataclass
class History:
    """What was measured, to be plotted.

    Attributes:
        train: a meter for each epoch; its metrics are those before each step.
        test: a meter for each epoch, of all test images after it.
        seconds: how long it all took, compiling included.
    """

    train: list[Meter] = field(default_factory=list)
    test: list[Meter] = field(default_factory=list)
    seconds: float = 0.0


def fit(
    strategy: mirror.Strategy, training: Training, train: Digits, test: Digits, options: Options
) -> History:
    """Trains for some epochs, and tests after each."""
    history, start = History(), time.perf_counter()
    shuffle = np.random.default_rng(options.seed)
    for epoch in range(options.epochs):
        with _bar(len(train), f"epoch {epoch + 1:2d}/{options.epochs}") as bar:
            if epoch == 0:
                bar.set_postfix_str("compiling")
            batches = train.batches(options.batch_size, shuffle)
            history.train.append(_train_epoch(strategy, training, batches, bar))
        history.test.append(evaluate(strategy, training, test, options.batch_size))
    history.seconds = time.perf_counter() - start
    return history


def evaluate(strategy: mirror.Strategy, training: Training, test: Digits, batch_size: int) -> Meter:
    """Tests all images once, whatever the batch size: what pads a batch is masked."""
    meter = Meter()
    batches = test.batches(batch_size)
    for batch, mask in strategy.distribute_dataset(batches, remainder="pad"):
        interrupts.check()
        meter.add(training.test(strategy, batch, mask))
    meter.collect()
    return meter


def _train_epoch(
    strategy: mirror.Strategy,
    training: Training,
    batches: Iterator[dict[str, np.ndarray]],
    bar: "tqdm[Any]",
) -> Meter:
    meter = Meter()
    distributed = strategy.distribute_dataset(batches, remainder="pad")
    for step, (batch, mask) in enumerate(distributed):
        interrupts.check()
        meter.add(training.train(strategy, batch, mask))
        if step == 0:
            bar.unpause()  # The rate is that of training, not of compiling.
        meter.collect(running=_MOST_RUNNING)
        _show(bar, meter, int(mask.stacked.size))
    meter.collect()
    _show(bar, meter, 0)
    return meter


def _bar(num_images: int, title: str) -> "tqdm[Any]":
    """A bar that counts images; in a log file, one line when it is full."""
    return tqdm(
        total=num_images,
        desc=title,
        unit=" images",
        unit_scale=True,
        smoothing=0,
        mininterval=0.1 if sys.stderr.isatty() else float("inf"),
        bar_format=_BAR,
    )


def _show(bar: "tqdm[Any]", meter: Meter, num_images: int) -> None:
    """Moves the bar on by a step's images; the last step has fewer than there are rows."""
    shown = f"loss {meter.loss:.4f}, accuracy {meter.accuracy:.1%}" if meter.step_losses else ""
    bar.set_postfix_str(shown, refresh=False)
    bar.update(min(num_images, bar.total - bar.n))
