"""TensorFlow's `MirroredStrategy` over logical CPUs, with a custom loop as in its guide."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import plan
from benchmarks.contender import Contender
from benchmarks.rivals.keras_nets import net_of, optimizer
from benchmarks.workloads import Workload


class TensorFlowContender(Contender):
    """A `tf.function` around `strategy.run`, on batches that are already distributed."""

    def __init__(self, workload: Workload, num_devices: int) -> None:
        self.name = plan.TENSORFLOW
        (cpu,) = tf.config.list_physical_devices("CPU")
        logical = [tf.config.LogicalDeviceConfiguration() for _ in range(num_devices)]
        tf.config.set_logical_device_configuration(cpu, logical)
        strategy = tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(num_devices)])
        with strategy.scope():
            net, adam = net_of(workload), optimizer(workload)
            adam.build(net.trainable_variables)
        self._train = _training_step(strategy, net, adam, workload.batch_size)
        self._batch = _distributed(strategy, workload)
        self._loss = tf.constant(float("nan"))

    def advance(self, steps: int) -> None:
        """Takes some steps, and waits for the last loss."""
        for _ in range(steps):
            self._loss = self._train(*self._batch)
        self.loss()

    def loss(self) -> float:
        """Returns the loss of the last step, before its update."""
        return float(self._loss)


def _distributed(strategy: tf.distribute.Strategy, workload: Workload) -> tuple:
    """Returns image and label, split across the replicas."""
    batch, n = workload.batch(), strategy.num_replicas_in_sync

    def split(name: str) -> object:
        rows = np.split(batch[name], n)
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(rows[context.replica_id_in_sync_group])
        )

    return split("image"), split("label")


def _training_step(
    strategy: tf.distribute.Strategy, net: Any, adam: Any, size: int
) -> Callable[..., tf.Tensor]:
    """Returns the training step for global batches of `size` examples."""

    def step(image: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = net(image, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
            loss = tf.reduce_sum(losses) / size
        grads = tape.gradient(loss, net.trainable_variables)
        adam.apply_gradients(zip(grads, net.trainable_variables, strict=True))
        return loss

    @tf.function
    def train(image: object, label: object) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(step, args=(image, label)), axis=None)

    return train


def create(name: str, workload: Workload, num_devices: int) -> TensorFlowContender:
    """Returns the contender."""
    assert name == plan.TENSORFLOW
    return TensorFlowContender(workload, num_devices)
