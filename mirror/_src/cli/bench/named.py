"""Small steps with names, which need nothing but what mirror itself needs."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mirror._src.strategy.mirrored import get_replica_context
from mirror._src.strategy.strategy import Strategy

_NUM_CLASSES = 10
_WIDTH = 512
_FEATURES = (16, 32)
_LEARNING_RATE = 0.1


def _drawn(key: Any, shape: tuple[int, ...], dtype: Any = np.float32, **_: Any) -> jax.Array:
    """A kernel drawn on the host: to compile one of JAX's own initializers takes seconds."""
    del key
    spread = 1 / math.sqrt(math.prod(shape[:-1]))
    return jnp.asarray(np.random.default_rng(0).normal(0, spread, shape), dtype)


_Linear = functools.partial(nnx.Linear, kernel_init=_drawn)
_Conv = functools.partial(nnx.Conv, kernel_size=(3, 3), strides=2, kernel_init=_drawn)


class MLP(nnx.Module):
    """Three linear layers, 784-512-512-10."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = _Linear(784, _WIDTH, rngs=rngs)
        self.second = _Linear(_WIDTH, _WIDTH, rngs=rngs)
        self.out = _Linear(_WIDTH, _NUM_CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Rows `(B, 784)` to logits `(B, 10)`."""
        return self.out(nnx.relu(self.second(nnx.relu(self.first(x)))))


class CNN(nnx.Module):
    """Two convolutions and a linear layer, for images of 28x28."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = _Conv(1, _FEATURES[0], rngs=rngs)
        self.second = _Conv(*_FEATURES, rngs=rngs)
        self.out = _Linear(7 * 7 * _FEATURES[1], _NUM_CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Images `(B, 28, 28, 1)` to logits `(B, 10)`."""
        x = nnx.relu(self.second(nnx.relu(self.first(x))))
        return self.out(x.reshape(len(x), -1))


class BuiltinStep(NamedTuple):
    """A step with a name.

    Attributes:
        model: makes the model.
        shape: of one example.
        batch_size: of all replicas together, unless another is asked for.
    """

    model: Callable[[nnx.Rngs], nnx.Module]
    shape: tuple[int, ...]
    batch_size: int


NAMED = {"mlp": BuiltinStep(MLP, (784,), 256), "cnn": BuiltinStep(CNN, (28, 28, 1), 128)}


def train_step(model: Any, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    """One replica's training step; returns the loss of the whole batch."""

    def loss_fn(model: Any) -> jax.Array:
        logits = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    context = get_replica_context()
    assert context is not None, "a step runs in a replica"
    grads, loss = context.all_reduce("mean", (grads, loss))
    optimizer.update(model, grads)
    return loss


def make_named(
    name: str, strategy: Strategy, batch_size: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step of that name and its arguments, of which the last is a batch on the devices."""
    made = NAMED[name]
    with strategy.scope():
        model = made.model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(_LEARNING_RATE, momentum=0.9), wrt=nnx.Param)
    draw = np.random.default_rng(0)
    size = batch_size * math.prod(made.shape)
    batch = {
        "x": draw.random(size, dtype=np.float32).reshape(batch_size, *made.shape),
        "label": draw.integers(0, _NUM_CLASSES, batch_size, dtype=np.int32),
    }
    (placed,) = strategy.distribute_dataset([batch], prefetch=0)
    return train_step, (model, optimizer, placed)
