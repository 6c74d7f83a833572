"""`mirror.callbacks.EMA`: averages that each update moves, evaluated, saved and restored."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import callbacks
from tests.support.inside import strategy_in_slices
from tests.support.messages import raises
from tests.support.strategies import EXECUTORS, PAIRS, cpu_strategy
from tests.support.tables import mostly_slow, rows

DECAY, STEPS = 0.8, 5
X = np.random.RandomState(0).randn(40, 3).astype("float32")
DATA = (X, X[:, :1] - X[:, 1:2])


class Net(nnx.Module):
    """Has weights that are trained, and others that are not."""

    def __init__(self):
        self.frozen = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(4, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.out(nnx.tanh(self.frozen(x)))


def trainer_of(strategy, ema, **options) -> mirror.Trainer:
    with strategy.scope():
        net = Net()
        optimizer = ema.optimizer(net, optax.adam(0.1), wrt=nnx.PathContains("out"))
        return mirror.Trainer(net, optimizer, "mse", **options)


def fit(trainer, epochs, *added) -> mirror.History:
    return trainer.fit(DATA, epochs, batch_size=8, callbacks=added, progress=False)


def weights_of(model) -> dict:
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))


class Averages(callbacks.Callback):
    """Computes the averages on the host, from the weights after each step."""

    def __init__(self, model):
        self.expected = weights_of(model)

    def on_step(self, fit):
        new = weights_of(fit.trainer.model)
        self.expected = jax.tree.map(
            lambda a, b: np.float32(DECAY) * a + np.float32(1 - DECAY) * b, self.expected, new
        )


STRATEGIES = {
    **EXECUTORS,
    **PAIRS,
    "sharded": lambda: cpu_strategy(2, shard="optimizer"),
    "in slices": lambda: strategy_in_slices(jax.devices("cpu")[:2]),
}


@pytest.mark.parametrize("names", mostly_slow(STRATEGIES, "pmap", "sharded"))
def test_each_update_moves_the_averages(names, subtests):
    for name in names:
        with subtests.test(msg=name):
            ema = callbacks.EMA(DATA, batch_size=16, decay=DECAY)
            trainer = trainer_of(STRATEGIES[name](), ema)
            averages = Averages(trainer.model)
            history = fit(trainer, 2, averages, ema, callbacks.EarlyStopping("ema_loss", 9))
            model, before = trainer.model, weights_of(trainer.model)
            with ema.weights(trainer):
                found = weights_of(trainer.model)
                assert trainer.evaluate(DATA, batch_size=16)["loss"] == history["ema_loss"][-1]
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, averages.expected
            )
            assert trainer.model is model
            jax.tree.map(np.testing.assert_array_equal, weights_of(trainer.model), before)
            assert history["ema_loss"][-1] != trainer.evaluate(DATA, batch_size=16)["loss"]


def test_groups_move_them_in_each_update():
    ema, ends = callbacks.EMA(decay=DECAY), []
    for group in (1, STEPS):
        trainer = trainer_of(cpu_strategy(2), ema, steps_per_execution=group)
        assert [*fit(trainer, 2, ema)] == ["loss"]
        with ema.weights(trainer):
            ends.append(weights_of(trainer.model))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *ends)


def test_a_resumed_training_has_them(tmp_path):
    ema, ends = callbacks.EMA(decay=DECAY), []
    fit(trainer_of(cpu_strategy(2), ema), 1, ema, callbacks.Checkpoint(tmp_path))
    for is_resumed in (False, True):
        trainer = trainer_of(cpu_strategy(2), ema)
        if is_resumed:
            trainer.restore(tmp_path)
        fit(trainer, 2, ema)
        with ema.weights(trainer):
            ends.append(weights_of(trainer.model))
    jax.tree.map(np.testing.assert_array_equal, *ends)


@rows("decay", [1, -0.1, "0.9", True])
def test_decay_is_from_0_to_1(decay):
    with raises(ValueError, names="decay", values=repr(decay)):
        callbacks.EMA(decay=decay)


def test_other_optimizers_are_an_error():
    with cpu_strategy(1).scope():
        trainer = mirror.Trainer(Net(), optax.sgd(0.1), "mse")
    with raises(TypeError, values="Optimizer", fix="ema.optimizer(model, tx)"):
        fit(trainer, 1, callbacks.EMA(decay=DECAY))


def test_training_the_averages_is_an_error():
    ema = callbacks.EMA(decay=DECAY)
    trainer = trainer_of(cpu_strategy(2), ema)
    with raises(RuntimeError, names="ema.weights"), ema.weights(trainer):
        fit(trainer, 1)
