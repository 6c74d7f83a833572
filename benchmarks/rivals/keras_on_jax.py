"""Keras 3 on JAX: a compiled model, `DataParallel` over the host devices, and `fit`.

`fit` on arrays in memory is the fastest of Keras's own loops: `train_on_batch` waits for every
step's metrics, and a `PyDataset` costs more per batch.
"""

import keras
import numpy as np

from benchmarks import plan
from benchmarks.contender import Contender
from benchmarks.rivals.keras_nets import net_of, optimizer
from benchmarks.workloads import Workload


class KerasContender(Contender):
    """A compiled model; its steps are those of an epoch."""

    fewest_steps = 50  # what an epoch costs beside its steps is spread over them

    def __init__(self, workload: Workload, num_devices: int) -> None:
        self.name = plan.KERAS
        devices = keras.distribution.list_devices("cpu")
        if len(devices) != num_devices:
            raise RuntimeError(f"{num_devices} host devices asked for, {len(devices)} there.")
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
        """Returns the mean loss of the last epoch, which is the step's where there was one."""
        return self._loss


def create(name: str, workload: Workload, num_devices: int) -> KerasContender:
    """Returns the contender."""
    assert name == plan.KERAS
    return KerasContender(workload, num_devices)
