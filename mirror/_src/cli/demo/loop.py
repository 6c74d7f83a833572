"""The training loop by hand, over `strategy.run`: what `mirror.Trainer` does for you.

It has the numbers of every step on the host a few steps late, so that the devices never wait.
"""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

import mirror
from mirror._src.cli.demo.data import Digits
from mirror._src.cli.demo.models import Metrics, Training
from mirror._src.cli.demo.options import Options
from mirror._src.utils import interrupts

_MOST_RUNNING = 8


class Meter:
    """Adds the steps' metrics up on the host, as they come in."""

    def __init__(self) -> None:
        self._pending: deque[Metrics] = deque()
        self._sums = np.zeros(3)

    def add(self, metrics: Metrics) -> None:
        """Takes a step's metrics, which may not be computed yet, and reads older ones."""
        self._pending.append(metrics)
        self._collect(running=_MOST_RUNNING)

    def _collect(self, *, running: int) -> None:
        while len(self._pending) > running:
            self._sums += [np.asarray(value).item() for value in self._pending.popleft()]

    def means(self) -> dict[str, float]:
        """Of all images: waits for the last steps."""
        self._collect(running=0)
        loss, num_correct, num_images = self._sums.tolist()
        return {"loss": loss / num_images, "accuracy": num_correct / num_images}


def fit(
    strategy: mirror.Strategy, training: Training, train: Digits, test: Digits, options: Options
) -> mirror.History:
    """Trains for some epochs, and tests after each."""
    history = mirror.History()
    data = train.batches(options.batch_size, shuffle=True, seed=options.seed)
    batches = strategy.distribute_dataset(data, remainder="pad")
    for epoch in range(options.epochs):
        start, meter = time.perf_counter(), Meter()
        for batch, mask in batches:
            interrupts.check()
            meter.add(training.train(strategy, batch, mask))
        tested = evaluate(strategy, training, test.batches(options.batch_size))
        logs = {**meter.means(), **{f"val_{name}": value for name, value in tested.items()}}
        history.add(epoch, logs, time.perf_counter() - start)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in logs.items())
        print(f"epoch {epoch + 1}/{options.epochs}: {shown}", flush=True)
    return history


def evaluate(
    strategy: mirror.Strategy, training: Training, data: Iterable[dict[str, Any]]
) -> dict[str, float]:
    """Tests all images once, whatever the batch size: what pads a batch is masked."""
    meter = Meter()
    for batch, mask in strategy.distribute_dataset(data, remainder="pad"):
        interrupts.check()
        meter.add(training.test(strategy, batch, mask))
    return meter.means()
