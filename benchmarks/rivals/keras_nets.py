"""The workloads as Keras models, for any backend of Keras."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from benchmarks.workloads import LEARNING_RATE, RESIDUAL, Workload


@keras.saving.register_keras_serializable("mirror_benchmarks")
class Residual(keras.layers.Layer):
    """`x + 0.1 * tanh(x @ w)`."""

    def build(self, input_shape: Any) -> None:
        """Creates the matrix."""
        width = input_shape[-1]
        self.weight = self.add_weight(shape=(width, width), name="weight")

    def call(self, x: Any) -> Any:
        """Returns the layer's output."""
        return x + RESIDUAL * keras.ops.tanh(keras.ops.matmul(x, self.weight))


def net_of(workload: Workload) -> keras.Model:
    """Returns the model with the workload's initial parameters."""
    net = keras.Sequential([keras.Input(workload.features), *_LAYERS[workload.kind](workload)])
    net.set_weights(list(_weights(workload.initial_params())))
    return net


def optimizer(workload: Workload) -> keras.optimizers.Optimizer:
    """Returns Adam with the hyperparameters of all contenders."""
    return keras.optimizers.Adam(LEARNING_RATE, epsilon=workload.epsilon)


def _mlp(workload: Workload) -> list[keras.layers.Layer]:
    dense = keras.layers.Dense
    hidden = [dense(size, activation="relu") for size in workload.sizes[1:-1]]
    return [*hidden, dense(workload.classes)]


def _cnn(workload: Workload) -> list[keras.layers.Layer]:
    layers = keras.layers
    _, _, first, second, hidden, classes = workload.sizes
    return [
        layers.Conv2D(first, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(2),
        layers.Conv2D(second, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(hidden, activation="relu"),
        layers.Dense(classes),
    ]


def _chain(workload: Workload) -> list[keras.layers.Layer]:
    return [Residual() for _ in range(workload.sizes[0])]


def _weights(params: Any) -> Iterator[np.ndarray]:
    """Yields the arrays in the order of Keras: by layer, the kernel before the bias."""
    if isinstance(params, np.ndarray):
        yield params
    elif "kernel" in params:
        yield from (params["kernel"], params["bias"])
    else:
        for part in params.values():
            yield from _weights(part)


_LAYERS = {"mlp": _mlp, "cnn": _cnn, "chain": _chain}
