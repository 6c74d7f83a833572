"""The workloads as Keras models, for any backend of Keras."""

from collections.abc import Iterator, Sequence
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
    params = workload.initial_params()
    for i, conv in enumerate(workload.convs):
        if conv.is_depthwise:
            params["convs"][i]["kernel"] = params["convs"][i]["kernel"].swapaxes(2, 3)
    net.set_weights(list(_weights(params)))
    return net


def optimizer(workload: Workload) -> keras.optimizers.Optimizer:
    """Returns Adam with the hyperparameters of all contenders."""
    return keras.optimizers.Adam(LEARNING_RATE, epsilon=workload.epsilon)


def _mlp(workload: Workload) -> list[keras.layers.Layer]:
    return _dense(workload.sizes)


def _dense(sizes: Sequence[int]) -> list[keras.layers.Layer]:
    dense = keras.layers.Dense
    return [*(dense(size, activation="relu") for size in sizes[1:-1]), dense(sizes[-1])]


def _cnn(workload: Workload) -> list[keras.layers.Layer]:
    layers: list[keras.layers.Layer] = []
    for conv in workload.convs:
        options = {"padding": conv.padding.lower(), "strides": conv.stride, "activation": "relu"}
        if conv.is_depthwise:
            layers.append(keras.layers.DepthwiseConv2D(conv.size, **options))
        else:
            layers.append(keras.layers.Conv2D(conv.features, conv.size, **options))
        if conv.is_pooled:
            layers.append(keras.layers.MaxPooling2D(2))
    is_averaged = workload.is_averaged
    flat = keras.layers.GlobalAveragePooling2D() if is_averaged else keras.layers.Flatten()
    return [*layers, flat, *_dense(workload.dense_sizes)]


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
