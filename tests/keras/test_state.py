"""The state of a Keras model from step to step: examined once, and nothing in it is visited."""

import statistics
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.support import inside
from tests.support.keras_models import MARKS, assert_close, compiled, digits, keras, numbers
from tests.support.strategies import cpu_strategy

pytestmark = MARKS


def deep(num_layers):
    layers = [keras.layers.Dense(10) for _ in range(num_layers)]
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers])


def num_calls_of_a_step(num_layers, strategy, method):
    """Returns how many functions of Python one step calls, Keras' own included."""
    with strategy.scope():
        model = compiled(lambda: deep(num_layers))
    counts, num_calls = [], 0

    def count(frame, event, argument):
        nonlocal num_calls
        num_calls += event == "call"

    class Counter(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            counts.append(num_calls)

        on_test_batch_end = on_predict_batch_end = on_train_batch_end

    x, y = digits()
    data = (x,) if method == "predict" else (x, y)
    options = {"batch_size": 16, "verbose": 0}
    getattr(model, method)(*data, **options)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        getattr(model, method)(*data, **options, callbacks=[Counter()])
    finally:
        sys.setprofile(before)
    # The first steps take what `fit` read from the variables, and find which programs shard.
    return statistics.median(np.diff(counts)[2:])


@pytest.mark.parametrize(
    ("method", "n"),
    [
        ("fit", 4),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in [("fit", 1), ("evaluate", 4)]),
    ],
)
def test_python_does_not_visit_the_variables_in_each_step(n, method):
    strategy = cpu_strategy(n)
    few, many = (num_calls_of_a_step(layers, strategy, method) for layers in (1, 30))
    assert many <= few + 10


def sharded_by_its_steps():
    """A model whose steps return a kernel sharded, as XLA may decide."""
    constrain = jax.lax.with_sharding_constraint
    sharding = None

    class Sharded(keras.Model):
        def train_step(self, state, data):
            logs, (trainable, *rest) = super().train_step(state, data)
            if sharding is not None:
                trainable = [constrain(trainable[0], sharding), *trainable[1:]]
            return logs, (trainable, *rest)

    inputs = keras.Input((8, 8, 1))
    model = Sharded(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(inputs)))
    home = model.trainable_variables[0].value.sharding
    if isinstance(home, NamedSharding):
        sharding = NamedSharding(home.mesh, PartitionSpec(home.mesh.axis_names))
    return model


@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_state_that_a_step_shards_is_mirrored_again(steps, monkeypatch):
    def trained(epochs):
        model = compiled(sharded_by_its_steps, optimizer="sgd", steps_per_execution=steps)
        x, y = digits()
        history = model.fit(x, y, batch_size=64, epochs=epochs, verbose=0, shuffle=False)
        return numbers(model, history)

    wanted = trained(2)
    mirrored = inside.count_calls(inside.replica_devices(), "mirror", monkeypatch)
    with cpu_strategy(4).scope():
        found = trained(2)
    assert_close(found, wanted)
    assert [array.shape for array in mirrored].count(
        (64, 10)
    ) == 7  # before each step but the first


def test_state_of_a_step_is_read_like_that_of_keras():
    """By a loop of a subclass: as lists, and by the functions of JAX."""
    losses = []

    class Looping(keras.Model):
        def fit(self, x, y):
            self.make_train_function()
            self.optimizer.build(self.trainable_variables)
            names = ("trainable", "non_trainable", "optimizer", "metrics")
            state = self._get_jax_state(**{f"{name}_variables": True for name in names})
            for i in range(0, 64, 16):
                logs, state = self.train_function(state, iter([(x[i : i + 16], y[i : i + 16])]))
                losses.append(float(logs["loss"]))
            assert {type(part) for part in state} == {list}
            trainable, non_trainable, *_ = state
            assert len(trainable + non_trainable) == 2
            norms = jax.jit(lambda tree: jax.tree.map(lambda w: (w**2).sum(), tree))(trainable)
            outputs, _ = self.stateless_call(trainable, non_trainable, x[:5])
            for variable, value in zip(self.trainable_variables, trainable, strict=True):
                variable.assign(value)
            assert isinstance(norms, list)
            assert len(norms) == len(trainable) == 2
            np.testing.assert_allclose(outputs, self(x[:5]), rtol=1e-5)
            return self.optimizer.learning_rate

    def looping():
        inputs = keras.Input((8, 8, 1))
        return Looping(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(inputs)))

    def trained():
        model = compiled(looping)
        model.fit(*digits())
        return numbers(model)

    wanted = trained()
    with cpu_strategy(2).scope():
        found = trained()
    assert_close(found, wanted)
    assert_close(losses[4:], losses[:4])
