"""What becomes of a Keras model, by the scopes it was created, built, compiled and trained in."""

import contextlib
import itertools

import jax
import numpy as np
import pytest

import mirror
from tests.support import inside
from tests.support.inside import pretended_types
from tests.support.keras_models import MARKS, assert_close, compiled, keras
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy

pytestmark = MARKS

X = np.random.default_rng(0).random((8, 3), "float32")
Y = np.arange(8, dtype="int32") % 2
A, B, MIXED, OUTSIDE = "A", "B", "mixed", "-"
STEPS = ("created", "built", "compiled", "trained")
ANOTHER = "a RuntimeError"
UNSUPPORTED = "a NotImplementedError"


def outcome(created, built, compiled, trained):
    """Returns the law: A or B trains the model, or OUTSIDE, one device; or the error."""
    if MIXED in (created, compiled, trained):
        return UNSUPPORTED
    # Where the model was created decides, wherever its variables lie.
    owners = {created} - {OUTSIDE} or {built, compiled} - {OUTSIDE}
    if len(owners) > 1:
        return ANOTHER
    if owners == {MIXED}:
        return UNSUPPORTED
    owners |= {trained} - {OUTSIDE}
    return ANOTHER if len(owners) > 1 else next(iter(owners), OUTSIDE)


@pytest.fixture
def scopes():
    """Scopes by name. The axis name makes the home of the mixed devices a mesh of its own."""
    devices = jax.devices("cpu")
    with pretended_types(["CPU"] * 5 + ["GPU"]):
        yield {
            A: mirror.MirroredStrategy(devices[:2]).scope,
            B: mirror.MirroredStrategy(devices[:4]).scope,
            MIXED: mirror.MirroredStrategy(devices[4:6], axis_name="mixed").scope,
            OUTSIDE: contextlib.nullcontext,
        }


def classifier():
    class Classifier(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2, activation="softmax")

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

    return Classifier()


def sequential():
    return keras.Sequential([keras.layers.Dense(2, activation="softmax")])


def made(scopes, created, built, compiled, make=classifier):
    """Returns a model that is ready to train. Its optimizer is created outside all scopes."""
    optimizer = keras.optimizers.SGD(0.1)
    keras.utils.set_random_seed(0)
    with scopes[created]():
        model = make()
    with scopes[built]():
        model.build((None, 3))
    with scopes[compiled]():
        model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


ALL = list(itertools.product((A, B, MIXED, OUTSIDE), repeat=4))


def test_every_combination_of_scopes(scopes, subtests):
    for places in ALL:
        with subtests.test(**dict(zip(STEPS, places, strict=True))):
            assert found(scopes, *places) == outcome(*places)


def test_sequential_models_are_not_built_in_scopes_of_mixed_devices(scopes, subtests):
    """Keras creates a model then, of the same layers."""
    for places in ALL:
        if places[0] in (A, OUTSIDE) and places[1] in (A, MIXED):
            expected = UNSUPPORTED if places[1] == MIXED else outcome(*places)
            with subtests.test(**dict(zip(STEPS, places, strict=True))):
                assert found(scopes, *places, sequential) == expected


def found(scopes, created, built, compiled, trained, make=classifier):
    try:
        model = made(scopes, created, built, compiled, make)
        with scopes[trained]():
            model.make_train_function()
    except NotImplementedError:
        return UNSUPPORTED
    except RuntimeError:
        return ANOTHER
    return {0: OUTSIDE, 2: A, 4: B}[inside.keras_devices(model.train_function)]


TRAINED = [
    places
    for places in itertools.product((A, OUTSIDE), (A, B, OUTSIDE), (A, B, OUTSIDE), (A, OUTSIDE))
    if outcome(*places) not in (ANOTHER, UNSUPPORTED)
]


@pytest.mark.slow
def test_trained_models_lie_where_the_table_says(scopes):
    """For each supported row of A, B and outside, with the numbers of Keras alone."""
    wanted = made(scopes, OUTSIDE, OUTSIDE, OUTSIDE)
    wanted.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    assert len(TRAINED) > 20
    for places in TRAINED:
        model = made(scopes, *places[:3])
        with scopes[places[3]]():
            model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
        variables = [*model.variables, *model.optimizer.variables]
        count = {A: 2, B: 4, OUTSIDE: 1}[outcome(*places)]
        assert {len(v.value.devices()) for v in variables} == {count}, places
        assert_close(model.get_weights(), wanted.get_weights())


def test_messages_name_what_was_in_which_scope(scopes):
    with raises(NotImplementedError, values=["several types", "compiled"], fix="mirror.Trainer"):
        made(scopes, OUTSIDE, OUTSIDE, MIXED)
    model = made(scopes, OUTSIDE, MIXED, OUTSIDE)
    with raises(NotImplementedError, values="several types", fix="mirror.MirroredStrategy("):
        model.fit(X, Y, verbose=0)
    model = made(scopes, OUTSIDE, A, B)
    names = [repr(model.name), "model.compile", model.dense.kernel.path]
    with raises(RuntimeError, names=names, fix="clone_model"):
        model.fit(X, Y, verbose=0)


def test_one_device_may_be_the_home_of_mixed_devices(scopes):
    """The mesh is the same; models of the strategy with one device train all the same."""
    with scopes[MIXED]():
        pass
    one = mirror.MirroredStrategy(jax.devices("cpu")[4:5], axis_name="mixed")
    with one.scope():
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
    model = keras.Sequential([layer])
    model.compile("sgd", "mse")
    model.predict(X, verbose=0)
    assert model.layers[0].kernel.value.devices() == {jax.devices("cpu")[4]}


def test_model_that_is_compiled_again_outside():
    """It stays where its variables lie; without any in a scope, it is a model of Keras alone."""
    optimizer = keras.optimizers.SGD(0.1)
    model = compiled(lambda: keras.Sequential([keras.layers.Dense(2)]), metrics=[])
    with cpu_strategy(2).scope():
        model.compile(optimizer, "mse")
    model.compile(optimizer, "mse")
    model.fit(X, X[:, :2], verbose=0)
    assert inside.keras_devices(model.train_function) == 0


def test_loaded_models_are_compiled(tmp_path, scopes):
    """Keras does not compile a model whose class has a `compile` of its own."""
    model = made(scopes, A, A, A, sequential)
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    with scopes[B]():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.compiled
    loaded.fit(X, Y, verbose=0)
    assert {len(v.value.devices()) for v in loaded.trainable_variables} == {4}
