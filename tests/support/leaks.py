"""What a process keeps after many steps, trainings, strategies and programs.

    python -m tests.support.leaks NAME COUNT

It runs a case a few times, measures, runs it COUNT times and measures again. It prints both
measurements as JSON; `tests/chaos/test_leaks.py` compares them.
"""

import contextlib
import ctypes
import gc
import itertools
import json
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import mirror
from tests.support.strategies import executors

N = 2
BATCHES_OF_FIT = 20
Case = Callable[[int], object]


class Counter(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(np.ones((4, 4), np.float32))
        self.calls = nnx.BatchStat(np.zeros((), np.int32))


def step(model, batch):
    mean = mirror.all_reduce("mean", batch.mean())
    model.w[...] = model.w[...] * 0.999 + mean
    model.calls[...] += 1
    return mean


def steps_of(executor: str) -> Case:
    """New batches for one model, and results that are dropped."""
    strategy = executors(N)[executor]()
    model, rows = Counter(), np.ones((N * 2, 3), np.float32)

    def steps(count: int) -> None:
        for batch in strategy.distribute_dataset(itertools.repeat(rows, count)):
            strategy.run(step, (model, batch))
        model.w[...].block_until_ready()

    return steps


def loss_fn(model, batch):
    return optax.l2_loss(model(batch["x"]))[:, 0]


def fits() -> Case:
    """Steps of `fit`, with prefetching, callbacks and validation; some end in an error."""
    with executors(N)["pmap"]().scope():
        trainer = mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.adam(1e-3), loss_fn)
    data = [{"x": np.ones((4, 2), np.float32)}] * BATCHES_OF_FIT

    class Fails(mirror.callbacks.Callback):
        def on_epoch_end(self, fit, logs):
            raise OSError("the disk is full")

    def fit(count: int) -> None:
        for number in range(max(count // (2 * BATCHES_OF_FIT), 1)):
            callbacks = [
                mirror.callbacks.NaNGuard(),
                mirror.callbacks.EarlyStopping("val_loss"),
                mirror.callbacks.CSVLogger("log.csv"),
                *([Fails()] if number % 3 == 2 else []),
            ]
            with contextlib.suppress(OSError):
                trainer.fit(
                    data,
                    2,
                    initial_epoch=0,
                    validation_data=data[:1],
                    callbacks=callbacks,
                    progress=False,
                )

    return fit


def strategies() -> Case:
    """Strategies that run a step and are dropped."""
    batch = mirror.PerReplica([np.ones(3, np.float32)] * N)

    def create(count: int) -> None:
        for _ in range(count):
            executors(N)["pmap"]().run(step, (Counter(), batch))

    return create


def programs() -> Case:
    """Steps that are defined, run once and dropped."""
    strategy = executors(N)["pmap"]()
    batch = mirror.PerReplica([np.ones(3, np.float32)] * N)

    def define(count: int) -> None:
        for number in range(count):

            def another(x, number=number):
                return mirror.all_reduce("sum", x * number)

            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="another .* was recompiled")
                strategy.run(another, (batch,))

    return define


# JAX keeps what it has traced and compiled, some 400 objects per program, in caches of a bounded
# size. They are cleared where a case makes programs, so that the rest is ours.
MAKES_PROGRAMS = ("strategies", "programs")

CASES: dict[str, tuple[Callable[[], Case], int]] = {
    "pmap": (lambda: steps_of("pmap"), 20_000),
    "vmap": (lambda: steps_of("vmap"), 20_000),
    "staged": (lambda: steps_of("staged"), 20_000),
    "fit": (fits, 20_000),
    "strategies": (strategies, 200),
    "programs": (programs, 1_000),
}
"""The cases, and how often to run them for a whole measurement."""


def measured(name: str) -> dict[str, int]:
    """Returns what the process keeps after a case."""
    jax.effects_barrier()
    if name in MAKES_PROGRAMS:
        jax.clear_caches()
    for _ in range(3):
        gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "kib": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "arrays": len(jax.live_arrays()),
        "threads": threading.active_count(),
        "native threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
    }


def main(name: str, count: int) -> None:
    case = CASES[name][0]()
    case(max(count // 5, 20))
    first = measured(name)
    case(count)
    print(json.dumps([first, measured(name)]))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", N)
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        main(sys.argv[1], int(sys.argv[2]))
