"""Which strategy a Keras model trains on, and messages for what cannot work."""

import gc
import itertools
import threading
import weakref

import jax
import numpy as np
import pytest

import mirror
from tests.support import fresh, inside
from tests.support.inside import pretended_types
from tests.support.keras_models import (
    MARKS,
    assert_close,
    compiled,
    deferred,
    digits,
    functional,
    keras,
    numbers,
)
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_slow

pytestmark = MARKS


def fit(model, **options):
    x, y = digits()
    options = {"batch_size": 64, "verbose": 0, "shuffle": False, **options}
    return model.fit(x, y, **options)


def devices_of(model):
    return {len(v.value.devices()) for v in [*model.variables, *model.optimizer.variables]}


def test_model_outside_every_scope_is_untouched():
    strategy = cpu_strategy(4)
    with strategy.scope():
        compiled(functional)
    model = compiled(functional)
    fit(model)
    assert inside.keras_devices(model.train_function) == 0
    assert devices_of(model) == {1}


@pytest.mark.slow
def test_two_strategies_in_one_program():
    models = []
    for n in (4, 2, 1):
        with cpu_strategy(n).scope():
            models.append(compiled(functional))
    models.append(compiled(functional))
    for _ in range(2):  # in turns
        histories = [numbers(model, fit(model)) for model in models]
        for history in histories[:-1]:
            assert_close(history, histories[-1])
    assert [devices_of(model) for model in models] == [{4}, {2}, {1}, {1}]


WAYS = {
    "all in the scope": (True, True, True),
    "fit outside": (True, True, False),
    "compiled outside": (True, False, False),
    "compiled in the scope": (False, True, False),
    "trained in the scope": (False, False, True),
}


CREATED = list(itertools.product([functional, deferred], WAYS))
QUICK = [(deferred, "fit outside"), (functional, "trained in the scope")]


@pytest.mark.parametrize("rows", mostly_slow(CREATED, *QUICK))
def test_what_must_be_in_the_scope(rows, subtests):
    for make, way in rows:
        with subtests.test(make=make.__name__, way=way):
            strategy = cpu_strategy(4)
            model: list = []

            def create():
                keras.utils.set_random_seed(0)
                model.append(make())

            steps = [
                create,
                lambda: model[0].compile("adam", keras.losses.SparseCategoricalCrossentropy(True)),
                lambda: fit(model[0]),
            ]
            for step, is_inside in zip(steps, WAYS[way], strict=True):
                if is_inside:
                    with strategy.scope():
                        step()
                else:
                    step()
            assert devices_of(model[0]) == {4}
            wanted = compiled(make, metrics=[])
            fit(wanted)
            assert_close(numbers(model[0]), numbers(wanted))


def test_model_that_was_trained_before():
    model, wanted = compiled(functional), compiled(functional)
    fit(wanted, epochs=2)
    fit(model)
    with cpu_strategy(4).scope():
        fit(model)
    assert devices_of(model) == {4}
    assert_close(numbers(model), numbers(wanted))


def test_several_replicas_on_a_device():
    """They share its part of the batch: the numbers do not depend on replicas."""
    with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"], replicas_per_device=2).scope():
        model = compiled(functional)
    wanted = compiled(functional)
    assert_close(numbers(model, fit(model)), numbers(wanted, fit(wanted)))
    assert devices_of(model) == {2}


def test_axis_name():
    with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"], axis_name="batch").scope():
        model = compiled(functional)
    fit(model)
    assert devices_of(model) == {2}


def test_one_device_strategy():
    with mirror.OneDeviceStrategy("/cpu:3").scope():
        model = compiled(functional)
    fit(model)
    model.predict(jax.device_put(digits()[0], jax.devices("cpu")[5]), verbose=0)
    (device,) = {d for v in model.variables for d in v.value.devices()}
    assert device == jax.devices("cpu")[3]


def test_models_are_released():
    with cpu_strategy(2).scope():
        model = compiled(functional)
    fit(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_scope_of_another_strategy():
    with cpu_strategy(4).scope():
        model = compiled(functional)
    with cpu_strategy(2).scope():
        for use in (fit, lambda m: m.predict(digits()[0], verbose=0)):
            with raises(
                RuntimeError, names=model.name, values=["another strategy"], fix="clone_model"
            ):
                use(model)
    fit(model)
    assert devices_of(model) == {4}


def test_model_compiled_in_the_scope_of_another_strategy():
    """The scope in which the model was created decides."""
    with cpu_strategy(4).scope():
        model = functional()
    with cpu_strategy(2).scope():
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(True))
    fit(model)
    assert devices_of(model) == {4}


def test_variables_of_several_strategies():
    """An optimizer and a layer of two scopes, in a model that was created in neither."""
    with cpu_strategy(4).scope():
        base = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
        base.add(keras.layers.Dense(10))
    model = keras.Sequential([base.layers[0], base.layers[1]])
    with cpu_strategy(2).scope():
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(True))
    names = [repr(model.name), model.layers[-1].kernel.path, "model.compile"]
    with raises(RuntimeError, names=names, fix="with strategy.scope()"):
        fit(model)


def test_devices_of_several_types():
    with pretended_types(["CPU", "GPU"]):
        strategy = mirror.MirroredStrategy(jax.devices("cpu")[:2])
        with (
            raises(NotImplementedError, values="several types", fix="mirror.MirroredStrategy("),
            strategy.scope(),
        ):
            functional()


def test_parameter_servers():
    """Creating, compiling and training reject the scope, which shows another strategy."""
    servers = inside.server_scope("ParameterServerStrategy(...)", cpu_strategy(1))
    values, fix = ["ParameterServerStrategy(...)", "parameter servers"], "mirror.Trainer"
    outside, trained = functional(), compiled(functional)
    for verb, use in {
        "created": functional,
        "compiled": lambda: outside.compile("adam", "mse"),
        "trained": lambda: fit(trained),
    }.items():
        with raises(NotImplementedError, values=[*values, verb], fix=fix), servers:
            use()
    assert mirror.has_strategy() is False
    fit(trained)


@pytest.mark.nightly
def test_import_of_keras_in_the_scope_of_parameter_servers():
    code = """
    import os
    os.environ["KERAS_BACKEND"] = "jax"
    import mirror
    from tests.support import inside
    try:
        with inside.server_scope("servers", mirror.OneDeviceStrategy("/cpu:0")):
            import keras
            keras.Sequential([keras.layers.Dense(1)])
    except NotImplementedError as error:
        print(error)
    print(mirror.has_strategy())
    """
    said = fresh.run(code, environment={"JAX_PLATFORMS": "cpu"})
    assert "parameter servers" in said
    assert "False" in said


def built_in(strategy):
    """Returns a model that was created and compiled outside, and built in the scope."""
    model = compiled(deferred)
    with strategy.scope():
        model.build((None, 8, 8, 1))
    return model


def test_model_that_was_built_in_a_scope_keeps_its_strategy():
    """Its variables tell the strategy, which is remembered when they move."""
    model = built_in(cpu_strategy(4))
    fit(model)
    model.set_weights(model.get_weights())
    model.optimizer = None
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(True))
    assert {len(v.value.devices()) for v in model.variables} == {1}
    fit(model)
    assert devices_of(model) == {4}
    model.set_weights(model.get_weights())
    with (
        raises(RuntimeError, names=model.name, values="another strategy", fix="clone_model"),
        cpu_strategy(2).scope(),
    ):
        fit(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_inside_a_replica():
    with cpu_strategy(2).scope():
        model = compiled(functional)

    def step(x):
        return model.predict(x, verbose=0)

    with raises(RuntimeError, values="inside a replica", fix="outside"):
        cpu_strategy(2).run(step, (digits()[0][:4],))


def per_replica(x):
    return mirror.PerReplica([x[:4], x[4:8]])


BATCHES = {
    "PerReplica": (lambda m, x, y: m.predict_on_batch(per_replica(x)), "model.fit(dataset)"),
    "distributed": (lambda m, x, y: m.fit(distributed(x, y)), "DistributedDataset"),
    "lengths differ": (lambda m, x, y: m.train_on_batch(x[:8], y[:7]), "7"),
    "text": (lambda m, x, y: m.predict_on_batch(np.array(["a", "b"])), ""),
}


def distributed(x, y):
    return cpu_strategy(2).distribute_dataset([(x, y)])


@pytest.mark.parametrize("names", mostly_slow(BATCHES, "PerReplica", "distributed"))
def test_what_is_no_batch(names, subtests):
    for name in names:
        with subtests.test(msg=name):
            use, text = BATCHES[name]
            with cpu_strategy(2).scope():
                model = compiled(functional)
            before = model.get_weights()
            with pytest.raises((TypeError, ValueError)) as caught:
                use(model, *digits())
            assert text in str(caught.value)
            assert_close(model.get_weights(), before)
            assert np.isfinite(fit(model).history["loss"][0])


def test_error_of_a_generator_arrives_in_the_loop():
    def broken():
        x, y = digits()
        yield x[:64], y[:64]
        yield x[64:128], y[64:128]
        raise OSError("disk on fire")

    with cpu_strategy(4).scope():
        model = compiled(functional)
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="disk on fire"), pytest.warns(UserWarning, match="shuffle"):
        model.fit(broken(), verbose=0)
    gc.collect()  # the threads in which Keras calls callbacks end when their pool is released
    for thread in set(threading.enumerate()) - before:
        thread.join(10)


@pytest.mark.nightly
@pytest.mark.dev("torch")
def test_another_backend():
    """At the line that creates the model, in a program that does not use JAX for Keras."""
    code = """
    import os
    os.environ["KERAS_BACKEND"] = "torch"
    import keras, mirror
    keras.Sequential([keras.layers.Dense(1)])
    with mirror.MirroredStrategy().scope():
        try:
            keras.Sequential([keras.layers.Dense(1)])
        except RuntimeError as error:
            print(error)
    """
    said = fresh.run(code, environment={"JAX_PLATFORMS": "cpu"})
    assert "'torch'" in said
    assert 'os.environ["KERAS_BACKEND"] = "jax"' in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["fit", *(pytest.param(h, marks=pytest.mark.nightly) for h in ("created", "frozen"))]
)
def test_import_of_keras_inside_the_scope(how):
    code = """
    import gc, os, warnings
    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    jax.config.update("jax_num_cpu_devices", 4)
    import mirror, numpy as np
    x, y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mirror.MirroredStrategy().scope():
            import keras
            model = keras.Sequential([keras.layers.Dense(1)])
            if os.environ["HOW"] != "frozen":
                model.compile("sgd", "mse")
            if "fit" in os.environ["HOW"]:
                model.fit(x, y, verbose=0)
            if os.environ["HOW"] == "frozen":
                gc.freeze()  # as programs do before they fork
    if os.environ["HOW"] == "frozen":
        assert gc.get_freeze_count()
        model.compile("sgd", "mse")
    model.fit(x, y, verbose=0)
    print(len(model.layers[0].kernel.value.devices()), "devices")
    print(*[c.message for c in caught if "Keras was first imported" in str(c.message)])
    """
    said = fresh.run(code, environment={"JAX_PLATFORMS": "cpu", "HOW": how})
    assert "4 devices" in said
    assert ("import keras before the scope" in said) == (how == "fit")


def test_a_fixed_number_of_replicas_is_refused():
    strategy = cpu_strategy(2, replicas=2)
    with strategy.scope(), raises(NotImplementedError, names="replicas=", fix="mirror.Trainer"):
        keras.Sequential([keras.layers.Dense(1)])
