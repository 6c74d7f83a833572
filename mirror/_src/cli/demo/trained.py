"""The two ways to train that the demo shows: by `mirror.Trainer`, and by hand.

A `mirror.Trainer` wants an `nnx.Module` and losses for each image, and does the rest.
"""

import abc
from typing import Any, final

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mirror
from mirror._src.cli.demo import loop
from mirror._src.cli.demo.data import Digits
from mirror._src.cli.demo.models import (
    CNN,
    IMAGE_SHAPE,
    LinenCNN,
    make_training,
    plain_net,
    plain_params,
)
from mirror._src.cli.demo.options import Api, Options

_RTOL = 1e-5


def loss_fn(model: Any, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, Any]]:
    """The loss of each image, and whether it was recognised: both `(B,)`."""
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


class PlainNet(nnx.Module):
    """A plain function and its parameters, as a module."""

    def __init__(self, seed: int) -> None:
        self.params = nnx.data(jax.tree.map(nnx.Param, plain_params(seed)))

    def __call__(self, image: jax.Array) -> jax.Array:
        """Images `(B, 8, 8, 1)` to logits `(B, 10)`."""
        is_param = lambda node: isinstance(node, nnx.Param)  # noqa: E731
        params = jax.tree.map(lambda p: p[...], self.params, is_leaf=is_param)
        return plain_net(params, image)


def make_module(api: Api, seed: int) -> nnx.Module:
    """The net, as an `nnx.Module`, however it is written."""
    if api == "nnx":
        return CNN(rngs=nnx.Rngs(seed))
    if api == "linen":
        module = nnx.bridge.ToNNX(LinenCNN(), rngs=nnx.Rngs(seed))
        return module.lazy_init(jnp.zeros(IMAGE_SHAPE))
    return PlainNet(seed)


class Trained(abc.ABC):
    """A net that is going to be trained."""

    @abc.abstractmethod
    def fit(self, train: Digits, test: Digits, options: Options) -> mirror.History:
        """Trains, and tests after each epoch."""

    @abc.abstractmethod
    def verify(self, train: Digits, options: Options) -> mirror.VerifyReport:
        """Compares a step on all replicas with one device's.

        Raises:
            ReplicaMismatchError: they differ.
        """

    @property
    @abc.abstractmethod
    def state(self) -> Any:
        """All that is mirrored."""


@final
class ByTrainer(Trained):
    """A net trained by a `mirror.Trainer`."""

    def __init__(self, tx: optax.GradientTransformation, options: Options) -> None:
        self._trainer = mirror.Trainer(make_module(options.api, options.seed), tx, loss_fn)

    def fit(self, train: Digits, test: Digits, options: Options) -> mirror.History:
        """Trains, and tests after each epoch."""
        data = train.batches(options.batch_size, shuffle=True, seed=options.seed)
        return self._trainer.fit(
            data, options.epochs, validation_data=test.batches(options.batch_size)
        )

    def verify(self, train: Digits, options: Options) -> mirror.VerifyReport:
        """Compares a step on all replicas with one device's."""
        return self._trainer.verify(train.batches(options.batch_size), rtol=_RTOL)

    @property
    def state(self) -> Any:
        """The model and the optimizer."""
        return self._trainer.model, self._trainer.optimizer


@final
class ByHand(Trained):
    """A net trained by the loop in `loop`."""

    def __init__(self, tx: optax.GradientTransformation, options: Options) -> None:
        self._strategy = mirror.get_strategy()
        self._training = make_training(options.api, tx, options.seed)

    def fit(self, train: Digits, test: Digits, options: Options) -> mirror.History:
        """Trains, and tests after each epoch."""
        return loop.fit(self._strategy, self._training, train, test, options)

    def verify(self, train: Digits, options: Options) -> mirror.VerifyReport:
        """Compares a step on all replicas with one device's."""
        data = train.batches(options.batch_size)
        batches = self._strategy.distribute_dataset(data, remainder="pad", prefetch=0)
        arguments = (*self._training.state, *next(iter(batches)))
        return self._strategy.verify(self._training.step, arguments, rtol=_RTOL)

    @property
    def state(self) -> Any:
        """Parameters and optimizer state."""
        return self._training.state


def make_trained(tx: optax.GradientTransformation, options: Options) -> Trained:
    """A new net, to be trained in the way that was asked for; call it in the scope."""
    return ByTrainer(tx, options) if options.trainer == "fit" else ByHand(tx, options)
