"""Process of a job that trains in turns: one for every line on standard input."""

import json
import sys
import time
from typing import Any

import numpy as np

import mirror
from benchmarks.processes import claim_stdout
from benchmarks.scale_program import NUM_MATRICES, step
from benchmarks.stats import median
from mirror._src.run import runner

BATCH_SIZE, WIDTH = 64, 64
_AGREEMENTS = 20


class Training:
    """The training step of `benchmarks.scale`, with 30 matrices of 16 KiB, on a global batch.

    Attributes:
        agreement_secs: Median duration of the agreement on the program, repeated; None in a single
            process.
    """

    def __init__(self, pack_bytes: int | None) -> None:
        self.agreement_secs: float | None = None
        mirror.distributed.initialize()
        self.strategy = mirror.MultiWorkerMirroredStrategy(
            cross_device_ops=mirror.AllReduce(pack_bytes=pack_bytes)
        )
        draw = np.random.default_rng(0)
        shapes = [(WIDTH, WIDTH)] * NUM_MATRICES
        with self.strategy.scope():
            self._params: Any = [draw.normal(size=s).astype(np.float32) for s in shapes]
        x = draw.normal(size=(BATCH_SIZE, WIDTH)).astype(np.float32)
        (self._batch,) = self.strategy.distribute_dataset([x])
        self._loss: Any = None
        agree = runner.require_agreement

        def timed(*arguments: Any) -> None:
            times = []
            for _ in range(_AGREEMENTS):
                # Meet first, so that the time is not the time until the other process comes.
                mirror.distributed.barrier("agreement")
                start = time.perf_counter()
                agree(*arguments)
                times.append(time.perf_counter() - start)
            self.agreement_secs = median(times)

        runner.require_agreement = timed
        self.take(3)
        runner.require_agreement = agree

    def take(self, steps: int) -> float:
        """Takes some steps; returns the milliseconds per step."""
        start = time.perf_counter()
        for _ in range(steps):
            self._params, self._loss = self.strategy.run(
                step, (self._params, self._batch), donate_argnums=0
            )
        self._loss.block_until_ready()
        return (time.perf_counter() - start) / steps * 1e3

    def loss(self) -> float:
        """Returns the loss of the last step."""
        return float(self._loss)


def main(text: str) -> None:
    """Answers the orders on standard input: a number of steps."""
    request = json.loads(text)
    answers = claim_stdout()
    training = Training(request["pack_bytes"])
    first = {"loss": training.loss(), "agreement_secs": training.agreement_secs}
    print(json.dumps(first), file=answers, flush=True)
    for line in sys.stdin:
        answer = {"ms": training.take(int(line)), "loss": training.loss()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
