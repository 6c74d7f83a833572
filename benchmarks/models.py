"""The models: each as an nnx module and as a function of a plain pytree, with the same maths."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

Array = jax.Array
PyTree = Any
Batch = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """One model, in two spellings.

    Attributes:
        create: makes the nnx module.
        apply: logits of the module's parameters as a plain pytree, and a batch of inputs.
        features: the shape of one input.
        classes: the number of labels.
        batch_size: examples in a global batch.
    """

    create: Callable[[nnx.Rngs], nnx.Module]
    apply: Callable[[PyTree, Array], Array]
    features: tuple[int, ...]
    classes: int
    batch_size: int

    def batch(self) -> Batch:
        """A global batch of random data, on the host."""
        rng = np.random.RandomState(0)
        shape = (self.batch_size, *self.features)
        return {
            "image": rng.standard_normal(shape).astype(np.float32),
            "label": rng.randint(0, self.classes, self.batch_size).astype(np.int32),
        }

    def initial_params(self) -> PyTree:
        """The parameters to start with, as host arrays in nested dicts: zero biases, LeCun kernels.

        Drawn by NumPy: flax compiles a program for each shape, and takes longer than the step.
        """
        rng = np.random.RandomState(1)
        abstract = params_of(nnx.eval_shape(lambda: self.create(nnx.Rngs(0))))
        return jax.tree.map(lambda leaf: _drawn(rng, leaf.shape), abstract)

    def module(self) -> nnx.Module:
        """The nnx module with these parameters, made as JAX makes arrays at the moment."""
        graphdef, state = nnx.split(nnx.eval_shape(lambda: self.create(nnx.Rngs(0))))
        nnx.replace_by_pure_dict(state, jax.tree.map(jnp.array, self.initial_params()))
        return nnx.merge(graphdef, state)


def _drawn(rng: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
    scale = 0.0 if len(shape) == 1 else np.prod(shape[:-1]) ** -0.5
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def params_of(module: nnx.Module) -> PyTree:
    """The module's parameters as a plain pytree."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def optimizer() -> optax.GradientTransformation:
    """Adam. A gradient below this `eps` is rounding noise, which would make the contenders differ.

    The usual 1e-8 turns noise into whole steps of the learning rate, up or down.
    """
    return optax.adam(1e-3, eps=1e-5)


def loss_of(logits: Array, label: Array) -> Array:
    """The mean loss of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


class MLP(nnx.Module):
    """Dense layers with ReLU in between."""

    def __init__(self, sizes: Sequence[int], rngs: nnx.Rngs) -> None:
        pairs = itertools.pairwise(sizes)
        self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in pairs])

    def __call__(self, x: Array) -> Array:
        """Logits."""
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


def apply_mlp(params: PyTree, x: Array) -> Array:
    layers = params["layers"]
    for i in range(len(layers)):
        x = x @ layers[i]["kernel"] + layers[i]["bias"]
        x = jax.nn.relu(x) if i < len(layers) - 1 else x
    return x


class CNN(nnx.Module):
    """Two convolutions with pooling, two dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.convs = nnx.List(
            [nnx.Conv(1, 8, (3, 3), rngs=rngs), nnx.Conv(8, 16, (3, 3), rngs=rngs)]
        )
        self.hidden = nnx.Linear(7 * 7 * 16, 64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Logits."""
        for conv in self.convs:
            x = nnx.max_pool(jax.nn.relu(conv(x)), (2, 2), strides=(2, 2))
        return self.out(jax.nn.relu(self.hidden(x.reshape(x.shape[0], -1))))


def apply_cnn(params: PyTree, x: Array) -> Array:
    for i in range(2):
        conv = params["convs"][i]
        x = jax.lax.conv_general_dilated(
            x, conv["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = nnx.max_pool(jax.nn.relu(x + conv["bias"]), (2, 2), strides=(2, 2))
    hidden, out = params["hidden"], params["out"]
    x = jax.nn.relu(x.reshape(x.shape[0], -1) @ hidden["kernel"] + hidden["bias"])
    return x @ out["kernel"] + out["bias"]


class Chain(nnx.Module):
    """A residual chain of square matrices, without biases: many leaves of one small size."""

    def __init__(self, length: int, width: int, rngs: nnx.Rngs) -> None:
        draw = nnx.initializers.lecun_normal()
        self.weights = nnx.List(
            [nnx.Param(draw(rngs.params(), (width, width))) for _ in range(length)]
        )

    def __call__(self, x: Array) -> Array:
        """Logits."""
        for weight in self.weights:
            x = x + 0.1 * jnp.tanh(x @ weight[...])
        return x


def apply_chain(params: PyTree, x: Array) -> Array:
    for i in range(len(params["weights"])):
        x = x + 0.1 * jnp.tanh(x @ params["weights"][i])
    return x


def mlp(sizes: Sequence[int], batch_size: int) -> Model:
    """An MLP with layers of these sizes."""
    create = lambda rngs: MLP(sizes, rngs)  # noqa: E731
    return Model(create, apply_mlp, (sizes[0],), sizes[-1], batch_size)


BY_NAME: dict[str, Model] = {
    "narrow": mlp([784, *[64] * 8, 10], 64),
    "wide": mlp([784, 512, 512, 10], 256),
    "cnn": Model(CNN, apply_cnn, (28, 28, 1), 10, 128),
    "leaves": Model(lambda rngs: Chain(100, 64, rngs), apply_chain, (64,), 64, 64),
    "small": mlp([32, *[32] * 20, 10], 32),
    "deep": mlp([16] * 101, 64),
}
