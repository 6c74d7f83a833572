"""The workloads in JAX, as nnx modules and as equivalent functions of plain pytrees."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks import workloads
from benchmarks.workloads import LEARNING_RATE, RESIDUAL, Conv, Workload

Array = jax.Array
PyTree = Any
Batch = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """One workload as an nnx module and as a function.

    Attributes:
        workload: Initial parameters and batch.
        create: Creates the nnx module.
        apply: Returns the logits, given the parameters as a plain pytree and a batch of inputs.
    """

    workload: Workload
    create: Callable[[nnx.Rngs], nnx.Module]
    apply: Callable[[PyTree, Array], Array]

    def batch(self) -> Batch:
        """Returns the global batch, on the host."""
        return self.workload.batch()

    def module(self) -> nnx.Module:
        """Returns the nnx module with the initial parameters."""
        graphdef, state = nnx.split(nnx.eval_shape(lambda: self.create(nnx.Rngs(0))))
        initial = jax.tree.map(jnp.array, self.workload.initial_params())
        nnx.replace_by_pure_dict(state, initial)
        return nnx.merge(graphdef, state)


def params_of(module: nnx.Module) -> PyTree:
    """Returns the module's parameters as a plain pytree."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def optimizer(model: Model) -> optax.GradientTransformation:
    """Returns the optimizer of all contenders in JAX."""
    return optax.adam(LEARNING_RATE, eps=model.workload.epsilon)


def loss_of(logits: Array, label: Array) -> Array:
    """Returns the mean loss of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


class MLP(nnx.Module):
    """Dense layers with ReLU in between."""

    def __init__(self, sizes: Sequence[int], rngs: nnx.Rngs) -> None:
        pairs = itertools.pairwise(sizes)
        self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in pairs])

    def __call__(self, x: Array) -> Array:
        """Returns the logits."""
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


def apply_mlp(params: PyTree, x: Array) -> Array:
    layers = params["layers"]
    for i in range(len(layers)):
        x = x @ layers[i]["kernel"] + layers[i]["bias"]
        x = jax.nn.relu(x) if i < len(layers) - 1 else x
    return x


class CNN(MLP):
    """Convolutions, then dense layers."""

    def __init__(self, workload: Workload, rngs: nnx.Rngs) -> None:
        super().__init__(workload.dense_sizes, rngs)
        self.workload = workload
        self.convs = nnx.List([_conv(conv, rngs) for conv in workload.convs])

    def __call__(self, x: Array) -> Array:
        """Returns the logits."""
        for conv, layer in zip(self.workload.convs, self.convs, strict=True):
            x = _activated(conv, layer(x))
        return super().__call__(_flat(self.workload, x))


def _conv(conv: Conv, rngs: nnx.Rngs) -> nnx.Conv:
    return nnx.Conv(
        conv.inputs,
        conv.features,
        (conv.size, conv.size),
        strides=conv.stride,
        padding=conv.padding,
        feature_group_count=conv.groups,
        rngs=rngs,
    )


def _activated(conv: Conv, x: Array) -> Array:
    x = jax.nn.relu(x)
    return nnx.max_pool(x, (2, 2), strides=(2, 2)) if conv.is_pooled else x


def _flat(workload: Workload, x: Array) -> Array:
    return x.mean((1, 2)) if workload.is_averaged else x.reshape(x.shape[0], -1)


def apply_cnn(workload: Workload, params: PyTree, x: Array) -> Array:
    for i, conv in enumerate(workload.convs):
        layer = params["convs"][i]
        x = jax.lax.conv_general_dilated(
            x,
            layer["kernel"],
            (conv.stride, conv.stride),
            conv.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=conv.groups,
        )
        x = _activated(conv, x + layer["bias"])
    return apply_mlp(params, _flat(workload, x))


class Chain(nnx.Module):
    """A residual chain of square matrices, without biases: many leaves of one small size."""

    def __init__(self, sizes: Sequence[int], rngs: nnx.Rngs) -> None:
        length, width = sizes
        init = nnx.initializers.lecun_normal()
        self.weights = nnx.List(
            [nnx.Param(init(rngs.params(), (width, width))) for _ in range(length)]
        )

    def __call__(self, x: Array) -> Array:
        """Returns the logits."""
        for weight in self.weights:
            x = x + RESIDUAL * jnp.tanh(x @ weight[...])
        return x


def apply_chain(params: PyTree, x: Array) -> Array:
    for i in range(len(params["weights"])):
        x = x + RESIDUAL * jnp.tanh(x @ params["weights"][i])
    return x


def model_of(workload: Workload) -> Model:
    """Returns the workload in JAX."""
    if workload.kind == "cnn":
        return Model(
            workload, functools.partial(CNN, workload), functools.partial(apply_cnn, workload)
        )
    module, apply = {"mlp": (MLP, apply_mlp), "chain": (Chain, apply_chain)}[workload.kind]
    return Model(workload, lambda rngs: module(workload.sizes, rngs), apply)


BY_NAME = {name: model_of(workload) for name, workload in workloads.BY_NAME.items()}
