"""Small training steps that need no data and no packages beyond the dependencies of mirror."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mirror._src.strategy.current_replica import all_reduce
from mirror._src.strategy.strategy import Strategy

NUM_CLASSES = 10
_WIDTH = 512
_LEARNING_RATE = 0.1


def _host_normal(seed: int) -> Callable[..., jax.Array]:
    """Returns a LeCun normal initializer that samples on the host.

    Compiling one of JAX's initializers takes seconds.
    """
    rng = np.random.default_rng(seed)

    def init(key: Any, shape: tuple[int, ...], dtype: Any = np.float32, **_: Any) -> jax.Array:
        del key
        return jnp.asarray(rng.normal(0, 1 / math.sqrt(math.prod(shape[:-1])), shape), dtype)

    return init


class MLP(nnx.Module):
    """Three linear layers, 784-512-512-10."""

    def __init__(self, seed: int = 0) -> None:
        linear = functools.partial(nnx.Linear, kernel_init=_host_normal(seed), rngs=nnx.Rngs(seed))
        self.first = linear(784, _WIDTH)
        self.second = linear(_WIDTH, _WIDTH)
        self.out = linear(_WIDTH, NUM_CLASSES)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits `(B, 10)` of inputs `(B, 784)`."""
        return self.out(nnx.relu(self.second(nnx.relu(self.first(x)))))


class CNN(nnx.Module):
    """Two strided convolutions and a linear layer, for square images with one channel.

    It has no dropout and no batch normalization. With them, n replicas would train slightly
    differently from one device, and `mirror demo` and `mirror doctor` show that they do not.

    Args:
        side: Height and width of an image; a multiple of 4.
        features: Number of channels of each convolution.
        seed: Seed of the initial parameters.
    """

    def __init__(self, side: int, features: tuple[int, int], seed: int = 0) -> None:
        init, rngs = _host_normal(seed), nnx.Rngs(seed)
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), strides=2, kernel_init=init)
        self.first = conv(1, features[0], rngs=rngs)
        self.second = conv(*features, rngs=rngs)
        self.out = nnx.Linear(
            (side // 4) ** 2 * features[1], NUM_CLASSES, kernel_init=init, rngs=rngs
        )

    def __call__(self, image: jax.Array) -> jax.Array:
        """Returns the logits `(B, 10)` of images `(B, side, side, 1)`."""
        x = nnx.relu(self.second(nnx.relu(self.first(image))))
        return self.out(x.reshape(len(x), -1))


class BuiltinStep(NamedTuple):
    """A built-in model and the batches it trains on.

    Attributes:
        make_model: Creates the model.
        shape: Shape of one example.
        batch_size: Default size of the global batch.
    """

    make_model: Callable[[], nnx.Module]
    shape: tuple[int, ...]
    batch_size: int


BUILTIN_STEPS = {
    "mlp": BuiltinStep(MLP, (784,), 256),
    "cnn": BuiltinStep(lambda: CNN(28, (16, 32)), (28, 28, 1), 128),
}


def train_step(model: Any, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    """Takes one replica's training step, and returns the loss of the global batch."""

    def loss_fn(model: Any) -> jax.Array:
        logits = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    grads, loss = all_reduce("mean", (grads, loss))
    optimizer.update(model, grads)
    return loss


def make_builtin_step(
    name: str, strategy: Strategy, batch_size: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a built-in step and its arguments; the last one is a batch on the devices."""
    builtin = BUILTIN_STEPS[name]
    with strategy.scope():
        model = builtin.make_model()
        optimizer = nnx.Optimizer(model, optax.sgd(_LEARNING_RATE, momentum=0.9), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.random((batch_size, *builtin.shape), dtype=np.float32),
        "label": rng.integers(0, NUM_CLASSES, batch_size, dtype=np.int32),
    }
    (placed,) = strategy.distribute_dataset([batch], prefetch=0)
    return train_step, (model, optimizer, placed)
