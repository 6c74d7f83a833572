"""500 unawaited steps of 50 leaves on 8 host devices; test_soak.py runs it as a process.

python -m tests.soak THREADS
"""

import sys
import threading

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)

import mirror  # noqa: E402

STEPS, LEAVES = 500, 50


def step(state, batch):
    grads = mirror.get_replica_context().all_reduce("mean", [w * batch.mean() for w in state])
    return [w - 1e-4 * g for w, g in zip(state, grads, strict=True)]


def train(strategy: mirror.Strategy, steps: int, done: list) -> None:
    state = [np.full((64, 64), i, np.float32) for i in range(LEAVES)]
    batch = mirror.PerReplica([np.full(4, r, np.float32) for r in range(8)])
    for _ in range(steps):
        state = strategy.run(step, (state, batch), donate_argnums=0)  # nothing is awaited
    strategy.check_mirrored(state)
    done.append([np.asarray(x) for x in state])


def main(num_threads: int) -> None:
    strategy = mirror.MirroredStrategy()
    done: list = []
    threads = [
        threading.Thread(target=train, args=(strategy, STEPS // num_threads, done))
        for _ in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == num_threads, "a thread failed"
    for other in done[1:]:
        for a, b in zip(done[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    print("replicas equal")


if __name__ == "__main__":
    main(int(sys.argv[1]))
