"""Keras 3 on JAX: a compiled model, `DataParallel` over the host devices, and `fit`.

`fit` on arrays in memory is the fastest loop of Keras: `train_on_batch` waits for the metrics of
every step, and a `PyDataset` has a higher cost per batch.
"""

import keras
import numpy as np

from benchmarks import plan
from benchmarks.contender import Contender
from benchmarks.rivals.keras_nets import net_of, optimizer
from benchmarks.workloads import Workload


class KerasContender(Contender):
    """A compiled Keras model; a turn is an epoch."""

    fewest_steps = 50  # amortizes the fixed cost of an epoch

    def __init__(self, workload: Workload, num_devices: int) -> None:
        self.name = plan.KERAS
        devices = keras.distribution.list_devices("cpu")
        if len(devices) != num_devices:
            raise RuntimeError(f"{num_devices} host devices requested, {len(devices)} exist.")
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
        self._net = net_of(workload)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._net.compile(optimizer=optimizer(workload), loss=loss)
        self._batch, self._batch_size = workload.batch(), workload.batch_size
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._loss = float("nan")

    def advance(self, steps: int) -> None:
        """Takes an epoch of that many steps."""
        if steps not in self._epochs:
            tiled = (np.concatenate([self._batch[k]] * steps) for k in ("image", "label"))
            self._epochs[steps] = next(tiled), next(tiled)
        x, y = self._epochs[steps]
        history = self._net.fit(x, y, batch_size=self._batch_size, shuffle=False, verbose=0)
        self._loss = history.history["loss"][-1]

    def loss(self) -> float:
        """Returns the mean loss of the last epoch: the loss of the step if it had a single step."""
        return self._loss


def create(name: str, workload: Workload, num_devices: int) -> KerasContender:
    """Returns the contender."""
    assert name == plan.KERAS
    return KerasContender(workload, num_devices)
