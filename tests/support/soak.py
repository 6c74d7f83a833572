"""Unawaited steps of 50 leaves on 8 host devices; `tests/devices/test_launch.py` runs it.

python -m tests.support.soak [--steps N] [--threads N] [--eager N] [--reduce N]
"""

import argparse
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)

import mirror  # noqa: E402

LEAVES = 50


def step(state, batch):
    grads = mirror.all_reduce("mean", [w * batch.mean() for w in state])
    return [w - 1e-4 * g for w, g in zip(state, grads, strict=True)]


def train(strategy: mirror.Strategy, steps: int, done: list) -> None:
    state = [np.full((64, 64), i, np.float32) for i in range(LEAVES)]
    batch = mirror.PerReplica([np.full(4, r, np.float32) for r in range(8)])
    for _ in range(steps):
        state = strategy.run(step, (state, batch), donate_argnums=0)  # nothing is awaited
    strategy.check_mirrored(state)
    done.append([np.asarray(x) for x in state])


def compute(strategy: mirror.Strategy, done: list, counts: list) -> None:
    """Eager work on mirrored arrays, as metrics and moving averages are."""
    with strategy.scope():
        w = [jnp.ones((256, 256)) * i for i in range(3)]
    for count in itertools.count(1):
        total = (w[0] @ w[1]).sum() + w[2].mean()
        if done:
            counts.append((count, float(total)))
            return


def reduce(strategy: mirror.Strategy, done: list, counts: list) -> None:
    """Eager collectives: the rows are on different devices."""
    rows = mirror.PerReplica([np.full(256, r, np.float32) for r in range(8)])
    rows = jax.device_put(np.asarray(rows), strategy._replicas.stacked)
    for count in itertools.count(1):
        total = rows.sum(0).mean()
        if done:
            counts.append((count, float(total)))
            return


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 500, "threads": 1, "eager": 0, "reduce": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    strategy = mirror.MirroredStrategy()
    done: list = []
    counts: list = []
    each = options.steps // options.threads
    threads = [
        *(
            threading.Thread(target=train, args=(strategy, each, done))
            for _ in range(options.threads)
        ),
        *(
            threading.Thread(target=work, args=(strategy, done, counts))
            for work, number in ((compute, options.eager), (reduce, options.reduce))
            for _ in range(number)
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == options.threads, "a thread failed"
    for other in done[1:]:
        for a, b in zip(done[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert len(counts) == options.eager + options.reduce, "an eager thread failed"
    assert all(total in (2.0, 28.0) for _, total in counts), counts
    print("replicas equal;", "eager:", sum(count for count, _ in counts))


if __name__ == "__main__":
    main()
