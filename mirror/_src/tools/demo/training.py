"""The model of the demo, its loss, and the `mirror.Trainer` that trains it."""

import argparse
import math
from typing import Any

import jax
import optax

import mirror
from mirror._src.tools.builtin_steps import CNN
from mirror._src.tools.demo.data import SIDE

_FEATURES = (32, 64)
_LEARNING_RATE = 0.1


def loss_fn(model: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the per-example losses, and whether each image is classified correctly."""
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


def make_trainer(
    strategy: mirror.Strategy, options: argparse.Namespace, num_images: int
) -> mirror.Trainer:
    """Returns a trainer with a new model."""
    with strategy.scope():
        return mirror.Trainer(
            CNN(SIDE, _FEATURES, options.seed), _optimizer(options, num_images), loss_fn
        )


def _optimizer(options: argparse.Namespace, num_images: int) -> optax.GradientTransformation:
    """Returns SGD with momentum, whose steps are linear in the gradient.

    Why not Adam: it divides by the magnitude of the gradient, so the rounding error of a gradient
    near zero becomes as large as a whole step. A first step of Adam differs from one device by up
    to 2e-4, a step of this optimizer by less than 1e-6.
    """
    steps = math.ceil(num_images / options.batch_size) * options.epochs
    return optax.sgd(optax.cosine_decay_schedule(_LEARNING_RATE, steps), momentum=0.9)
