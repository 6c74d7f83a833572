"""Models in training and evaluation mode: `model.eval()` cannot change an argument of a call."""

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx

import mirror
from tests.support.messages import assert_message
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

X = np.random.RandomState(0).randn(24, 4).astype(np.float32)
Y = np.argmax(X[:, :3], 1)


class Layers(nnx.Module):
    """A dense layer, batch normalization and dropout, whose modes are their attributes."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(self.norm(self.dense(x))))


class WithArgument(Layers):
    def __call__(self, x, train=True):
        x = self.norm(self.dense(x), use_running_average=not train)
        return self.last(self.dropout(x, deterministic=not train))


class Statistics(Layers):
    def __call__(self, x, training: bool = True):
        return self.last(self.norm(self.dense(x), use_running_average=not training))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x, *, deterministic):
        return self.last(self.dropout(self.dense(x), deterministic=deterministic))


class Nested(nnx.Module):
    def __init__(self, rngs):
        self.block = Block(rngs)

    def __call__(self, x):
        return self.block(x, deterministic=False)


class WithAttribute(nnx.Module):
    def __init__(self, rngs):
        self.block = Block(rngs)
        self.deterministic = False

    def __call__(self, x):
        return self.block(x, deterministic=self.deterministic)


class Optional(Layers):
    def __call__(self, x, deterministic=None):
        return self.last(self.dropout(self.dense(x), deterministic=deterministic))


class Unused(Layers):
    def __call__(self, x, train=True):
        return self.last(jax.nn.relu(self.dense(x)))


class Sampling(Layers):
    """Samples in both modes, as a variational autoencoder does."""

    def __call__(self, x):
        x = self.dense(x)
        return self.last(x + jax.random.normal(self.dropout.rngs(), x.shape))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        x = linen.Dropout(0.5, deterministic=not train)(linen.Dense(8)(x))
        return linen.Dense(3)(x)


def wrapped(rngs):
    return nnx.bridge.ToNNX(Linen(), rngs=rngs).lazy_init(X[:1])


class WrappedWithAttribute(nnx.Module):
    def __init__(self, rngs):
        self.inner = wrapped(rngs)
        self.deterministic = False

    def __call__(self, x):
        train = not self.deterministic
        return self.inner(x, train=train)


RANDOM, STATISTICS = "draws random numbers", "uses statistics of the batch"
IN_TRAINING_MODE = {
    "argument": (WithArgument, ["WithArgument", "`train`", f"{RANDOM} and {STATISTICS}"]),
    "statistics": (Statistics, ["Statistics", "`training`", f"it {STATISTICS}"]),
    "nested": (Nested, ["Block", "`deterministic`", RANDOM]),
    "Linen": (wrapped, ["Linen", "`train`", RANDOM]),
}
RIGHT = [Layers, WithAttribute, Optional, Unused, Sampling, WrappedWithAttribute]


def trainer_of(make):
    with cpu_strategy(2).scope():
        loss = "sparse_categorical_crossentropy"
        return mirror.Trainer(make(nnx.Rngs(0)), optax.sgd(0.1), loss, require_equal=False)


@rows("make, values", IN_TRAINING_MODE)
def test_evaluation_in_training_mode_warns_once(make, values):
    trainer = trainer_of(make)
    with pytest.warns(UserWarning, match="in training mode") as found:
        trainer.evaluate((X, Y), batch_size=8)
    trainer.evaluate((X, Y), batch_size=12)
    trainer.predict(X, batch_size=8)
    (warning,) = found
    assert warning.filename == __file__
    fix = "self.deterministic = False in __init__"
    assert_message(str(warning.message), values=values, fix=fix)


def test_prediction_and_validation_in_training_mode_warn():
    with pytest.warns(UserWarning, match="in training mode"):
        trainer_of(WithArgument).predict(X, batch_size=8)
    with pytest.warns(UserWarning, match="in training mode"):
        trainer_of(WithArgument).fit((X, Y), batch_size=8, validation_data=(X, Y), progress=False)


@rows("make", {make.__name__: make for make in RIGHT})
def test_evaluation_in_evaluation_mode_does_not_warn(make):
    """Warnings are errors in tests."""
    trainer = trainer_of(make)
    found = [trainer.evaluate((X, Y), batch_size=size)["loss"] for size in (8, 12, 24)]
    trainer.predict(X, batch_size=8)
    if make is not Sampling:
        np.testing.assert_allclose(found, found[0], rtol=1e-5)
