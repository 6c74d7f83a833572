"""A process of `benchmarks.keras_epochs`: takes an epoch for each line with a contender's name."""

import json
import sys
import time
from collections.abc import Callable

import jax
import keras
import numpy as np

import mirror
from benchmarks.keras_epochs import PARALLEL, SCOPE
from benchmarks.processes import claim_stdout
from benchmarks.rivals.keras_nets import net_of, optimizer
from benchmarks.workloads import BY_NAME, Workload


def epoch_of(name: str, workload: Workload, steps: int) -> Callable[[], float]:
    """Returns a function that trains for an epoch, and returns its mean loss."""
    distribution = None
    if name == PARALLEL:
        devices = keras.distribution.list_devices("cpu")
        distribution = keras.distribution.DataParallel(devices=devices)
    keras.distribution.set_distribution(distribution)
    if name == SCOPE:
        with mirror.MirroredStrategy([f"/cpu:{i}" for i in range(jax.device_count())]).scope():
            net = _compiled(workload)
    else:
        net = _compiled(workload)
    batch = workload.batch()
    x, y = (np.concatenate([batch[key]] * steps) for key in ("image", "label"))

    def epoch() -> float:
        keras.distribution.set_distribution(distribution)
        history = net.fit(x, y, batch_size=workload.batch_size, shuffle=False, verbose=0)
        return float(history.history["loss"][-1])

    return epoch


def _compiled(workload: Workload) -> keras.Model:
    net = net_of(workload)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer=optimizer(workload), loss=loss)
    return net


def main() -> None:
    """Answers each line with the milliseconds per step, and the mean loss."""
    answers, request = claim_stdout(), json.loads(sys.argv[1])
    workload, steps = BY_NAME[request["workload"]], request["steps"]
    epochs = {name: epoch_of(name, workload, steps) for name in request["contenders"]}
    for name in map(str.strip, sys.stdin):
        start = time.perf_counter()
        loss = epochs[name]()
        secs = time.perf_counter() - start
        print(json.dumps({"ms": secs / steps * 1e3, "loss": loss}), file=answers)


if __name__ == "__main__":
    main()
