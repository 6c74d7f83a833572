"""Keras models and real digits, for the tests of models under `strategy.scope()`."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.packages import optional

keras: Any = optional("keras")

# From Keras itself, where it reads variables.
WARNINGS = ("ignore:__array__ implementation:DeprecationWarning",)
MARKS = [pytest.mark.dev("keras"), pytest.mark.filterwarnings(*WARNINGS)]


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns 256 images of digits `(256, 8, 8, 1)` from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (data.images[:256, :, :, None] / 16).astype("float32")
    return images, data.target[:256].astype("int32")


def sequential() -> Any:
    """A convolutional net with dropout and batch normalization."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )


def deferred() -> Any:
    """A model without the shape of its input: it is built by its first batch."""
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])


def functional() -> Any:
    """A model with a residual connection."""
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Flatten()(inputs)
    hidden = keras.layers.Dense(64, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.add([hidden, x])))


def subclassed() -> Any:
    """A subclass of `keras.Model`."""

    class Classifier(keras.Model):
        def __init__(self):
            super().__init__()
            self.flatten = keras.layers.Flatten()
            self.out = keras.layers.Dense(10)

        def call(self, x):
            return self.out(self.flatten(x))

    return Classifier()


def compiled(make: Callable[[], Any] = sequential, **options: Any) -> Any:
    """Returns a model with fixed initial weights, compiled."""
    keras.utils.set_random_seed(0)
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    given = {"optimizer": "adam", "loss": loss, "metrics": ["accuracy"], **options}
    model.compile(**given)
    return model


def numbers(model: Any, history: Any = None) -> dict[str, Any]:
    """Returns the weights of a model, and its history."""
    values = {f"weight {i}": weight for i, weight in enumerate(model.get_weights())}
    return values | ({} if history is None else dict(history.history))


def assert_close(some: Any, wanted: Any, atol: float = 2e-6) -> None:
    """Checks that two dicts, lists or arrays hold the same numbers, up to rounding."""
    if isinstance(wanted, dict):
        assert some.keys() == wanted.keys()
        some, wanted = list(some.values()), list(wanted.values())
    if isinstance(wanted, list | tuple):
        assert len(some) == len(wanted)
        for a, b in zip(some, wanted, strict=True):
            assert_close(a, b, atol)
    else:
        np.testing.assert_allclose(np.asarray(some), np.asarray(wanted), rtol=1e-6, atol=atol)
