"""`check_mirrored` and `verify` of Keras models, and Keras models as arguments of steps."""

import contextlib

import jax
import numpy as np
import pytest

import mirror
from tests.support.keras_models import (
    MARKS,
    assert_close,
    compiled,
    deferred,
    digits,
    functional,
    keras,
    numbers,
    sequential,
    subclassed,
)
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy

pytestmark = MARKS


@pytest.fixture
def four():
    return cpu_strategy(4)


@pytest.fixture
def model(four):
    with four.scope():
        model = compiled(functional)
    x, y = digits()
    model.fit(x[:64], y[:64], verbose=0)
    return model


def corrupt(array):
    """Returns an array of which one device's copy differs."""
    copies = [np.array(shard.data) for shard in array.addressable_shards]
    copies[2].flat[0] += 1
    shards = [
        jax.device_put(c, s.device) for c, s in zip(copies, array.addressable_shards, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def test_check_mirrored(four, model):
    four.check_mirrored(model)
    four.check_mirrored({"model": model, "optimizer": model.optimizer, "more": [*model.variables]})
    kernel = model.layers[-1].kernel
    kernel.assign(corrupt(kernel.value))
    for tree in (model, model.layers[-1], kernel, [{"a": model}]):
        with raises(mirror.ReplicaDivergenceError, names=kernel.path, fix="strategy.local_results"):
            four.check_mirrored(tree)


def test_check_mirrored_sees_the_optimizer(four, model):
    slot = model.optimizer.variables[-1]
    slot.assign(corrupt(slot.value))
    with raises(mirror.ReplicaDivergenceError, names=slot.path):
        four.check_mirrored(model)


def test_check_mirrored_within_an_epoch(four):
    class Checks(keras.callbacks.Callback):
        count = 0

        def on_train_batch_end(self, batch, logs=None):
            four.check_mirrored(self.model)
            self.count += 1

    with four.scope():
        model = compiled(functional)
    checks = Checks()
    model.fit(*digits(), batch_size=64, verbose=0, callbacks=[checks])
    assert checks.count == 4


def test_check_mirrored_of_other_models(four, model):
    outside = compiled(functional)
    with raises(ValueError, names=outside.layers[-1].kernel.path, fix="strategy.scope()"):
        four.check_mirrored(outside)
    with raises(ValueError, values="no variables", fix="model.build"), four.scope():
        four.check_mirrored(keras.Sequential([keras.layers.Dense(2)]))
    with raises(ValueError, fix="strategy.scope()"):
        cpu_strategy(2).check_mirrored(model)


def test_verify_compares_logs_inside_of_others():
    class Nested(keras.Model):
        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {"loss": logs["loss"], "more": {"twice": 2 * logs["loss"]}}, state

    strategy = cpu_strategy(2)
    with strategy.scope():
        inputs = keras.Input((8, 8, 1))
        layers = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
        model = compiled(lambda: Nested(inputs, layers(inputs)))
    x, y = digits()
    report = strategy.verify(model, (x[:32], y[:32]))
    assert [row.name for row in report.rows][:2] == ["logs['loss']", "logs['twice']"]


@pytest.mark.slow
def test_verify(subtests):
    for n in [1, 4]:
        with subtests.test(n=n):
            strategy = cpu_strategy(n)
            with strategy.scope():
                model = compiled(sequential, optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
            x, y = digits()
            before = model.get_weights()
            report = strategy.verify(
                model, (x[:30], y[:30], np.linspace(0, 1, 30, dtype="float32")), rtol=1e-4
            )
            assert_close(model.get_weights(), before, atol=0)
            names = [row.name for row in report.rows]
            assert names[:2] == ["logs['accuracy']", "logs['loss']"]
            assert model.layers[0].kernel.path in names
            assert report.num_replicas == n
            strategy.check_mirrored(model)
            strategy.verify(model, (x[:32], y[:32]), rtol=1e-4)
            wanted = compiled(sequential, optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
            logs = [m.train_on_batch(x[:32], y[:32]) for m in (model, wanted)]
            assert_close(logs[0], logs[1])
            assert_close(numbers(model), numbers(wanted))


def test_verify_keeps_the_metrics_of_an_epoch(four):
    x, y = digits()
    with four.scope():
        model = compiled(functional)
    model.train_on_batch(x[:32], y[:32])
    before = model.get_metrics_result()
    four.verify(model, (x[32:64], y[32:64]), rtol=1e-4)
    assert model.get_metrics_result() == before


def test_verify_needs_layers_that_are_built(four):
    """`build` of a class without this method builds no layers."""
    x, y = digits()
    with four.scope():
        model = compiled(subclassed)
        model.built = True
    with raises(ValueError, names=model.name, fix="model(x)"):
        four.verify(model, (x[:32], y[:32]))


def test_verify_finds_a_difference(four):
    """A step whose result depends on where it runs."""
    with four.scope():
        model = compiled(functional, jit_compile=False)
    x, y = digits()

    model.train_on_batch(x[:32], y[:32])
    function = model.train_function.made

    def shifted(state, iterator):
        (batch,) = iterator
        scale = float(len(batch[0].devices()) == 4) if isinstance(batch[0], jax.Array) else 0.0
        logs, state = function(state, iter([batch]))
        return {**logs, "loss": logs["loss"] + scale}, state

    model.train_function.made = shifted
    with raises(mirror.VerifyError, names="logs['loss']", values=["4 replicas"]):
        four.verify(model, (x[:32], y[:32]))


def test_verify_needs_a_model_that_can_train(four):
    x, y = digits()
    with four.scope():
        plain = functional()
        unbuilt = compiled(deferred)
        other = compiled(functional)
    with raises(ValueError, names=plain.name, values="compiled", fix="model.compile"):
        four.verify(plain, (x, y))
    with raises(ValueError, names=unbuilt.name, values="built", fix="model.build"):
        four.verify(unbuilt, (x, y))
    for args in [(x,), (x, y, y, y)]:
        with raises(TypeError, names="args", fix="strategy.verify(model, (x, y))"):
            four.verify(other, args)
    with raises(RuntimeError, names=other.name, values="another strategy"):
        cpu_strategy(2).verify(other, (x, y))


def test_verify_needs_the_step_of_keras(four):
    class Own(keras.Model):
        def make_train_function(self, force=False):
            self.train_function = lambda state, iterator: ({"loss": 0.0}, state)

    inputs = keras.Input((8, 8, 1))
    with four.scope():
        model = compiled(lambda: Own(inputs, functional()(inputs)))
    x, y = digits()
    fix = "super().make_train_function"
    with raises(ValueError, names=[model.name, "Own"], values="make_train_function", fix=fix):
        four.verify(model, (x[:32], y[:32]))


def test_models_are_not_arguments_of_steps(four, model):
    x = digits()[0][:8]
    with raises(TypeError, names="model", fix=["model.fit", "model.stateless_call"]):
        four.run(lambda model, x: model(x), (model, x))
    with raises(TypeError, names="state['net']", fix="model.fit"):
        four.run(lambda state, x: state["net"](x), ({"net": model}, x))
    with raises(ValueError, names="'model'", fix="model.stateless_call"):
        four.run(lambda x: model(x), (x,))


def test_steps_do_not_change_models(four):
    """Otherwise, the variables would hold traced values afterwards."""
    with four.scope():
        model = compiled(sequential)
    x = digits()[0][:8]
    before = model.get_weights()
    with raises(ValueError, names="'model'", values="changes", fix="model.stateless_call"):
        four.run(lambda x: model(x, training=True), (x,))
    assert_close(model.get_weights(), before, atol=0)
    four.check_mirrored(model)
    model.fit(*digits(), verbose=0)


def test_values_of_variables_are_arguments_of_steps(four, model):
    trainable = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]
    x = digits()[0][:8]
    (batch,) = four.distribute_dataset([x])
    outputs = four.run(lambda t, o, x: model.stateless_call(t, o, x)[0], (trainable, others, batch))
    np.testing.assert_allclose(four.gather(outputs), model.predict(x, verbose=0), atol=1e-6)


def test_trainer_says_how_keras_models_train(model):
    import optax

    with raises(TypeError, names="model", fix="model.fit"):
        mirror.Trainer(model, optax.sgd(0.1), "mse")


@pytest.mark.parametrize("is_inside", [True, False])
def test_sharded_update_of_a_keras_model_is_one_warning(is_inside):
    strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"], shard="optimizer")
    with strategy.scope() if is_inside else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with strategy.scope():
        model.compile(optimizer="sgd", loss="mse")
    with pytest.warns(UserWarning, match="`shard` has no effect on the Keras model") as caught:
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert len(caught) == 1
