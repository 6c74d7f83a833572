"""The state of a Keras model from step to step: examined once, and nothing in it is visited."""

import functools
import statistics
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.support import inside
from tests.support.keras_models import MARKS, assert_close, compiled, digits, keras, numbers
from tests.support.messages import raises
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


flat = functools.partial(deep, 1)


@pytest.mark.parametrize("moment", ["before the launch", "after the launch"])
def test_model_keeps_its_weights_if_a_step_is_interrupted(moment, monkeypatch):
    """The step has donated the arrays that Keras would write back."""
    strategy = cpu_strategy(2)
    x, y = digits()
    with strategy.scope():
        model = compiled(flat)
    steps = 0

    def interrupted(function, *arguments):
        nonlocal steps
        steps += 1
        if steps == 3 and moment == "before the launch":
            raise KeyboardInterrupt
        results = step(function, *arguments)
        if steps == 3:
            raise KeyboardInterrupt
        return results

    kind = inside.keras_step().StepFunction
    step = kind._step
    monkeypatch.setattr(kind, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    done = 2 if moment == "before the launch" else 3
    wanted = compiled(flat)
    wanted.fit(x[: 16 * done], y[: 16 * done], batch_size=16, shuffle=False, verbose=0)
    assert_close(numbers(model), numbers(wanted))
    history = model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    again = wanted.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert_close(numbers(model, history), numbers(wanted, again))


def test_one_array_of_two_variables_is_donated_once():
    """Keras assigns the averages of `use_ema` to the weights at the end of `fit`.

    Without a strategy, the second `fit` fails then (Keras 3.15).
    """
    x, y = digits()
    found = []
    for n in (1, 2):
        with cpu_strategy(n).scope():
            model = compiled(flat, optimizer=keras.optimizers.SGD(0.1, use_ema=True))
        for _ in range(2):
            history = model.fit(x[:32], y[:32], batch_size=16, shuffle=False, verbose=0)
        found.append(numbers(model, history))
    assert_close(*found)


def test_array_that_another_model_has_donated_is_rejected():
    """Host devices would wait forever for the one that rejects it."""
    x, y = digits()
    with cpu_strategy(2).scope():
        first, second = compiled(flat), compiled(flat)
    first.fit(x[:32], y[:32], verbose=0)
    second.layers[-1].kernel.assign(first.layers[-1].kernel.value)
    first.fit(x[:32], y[:32], verbose=0)
    path = second.layers[-1].kernel.path
    with raises(ValueError, names=[path, second.name], fix="variable.assign(numpy.array("):
        second.fit(x[:32], y[:32], verbose=0)


def test_error_of_a_callback_that_compiles_again_is_raised():
    """The state of the last step is then of another optimizer."""

    class Compiles(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.compile("sgd", "mse")
            raise OSError("disk on fire")

    x, y = digits()
    with cpu_strategy(2).scope():
        model = compiled(flat)
    with pytest.raises(OSError, match="disk on fire"):
        model.fit(x[:32], y[:32], verbose=0, callbacks=[Compiles()])


def test_interrupted_step_restores_all_variables_of_one_step(monkeypatch):
    """JAX does not donate a variable that a step only writes: it keeps the array of before."""

    class Writes(keras.layers.Layer):
        def build(self, shape):
            self.last = self.add_weight(shape=(), trainable=False, initializer="zeros")

        def call(self, x):
            self.last.assign(keras.ops.sum(x))
            return x

    def writes():
        layers = [Writes(), keras.layers.Flatten(), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])

    step_class = inside.keras_step().StepFunction
    step, steps = step_class._step, []

    def interrupted(*arguments):
        results = step(*arguments)
        steps.append(results)
        if len(steps) == 2:
            raise KeyboardInterrupt
        return results

    x, y = digits()
    wanted = compiled(writes)
    wanted.fit(x[:32], y[:32], batch_size=16, shuffle=False, verbose=0)
    with cpu_strategy(2).scope():
        model = compiled(writes)
    monkeypatch.setattr(step_class, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert_close(numbers(model), numbers(wanted))
