"""What the hooks rely on in Keras. A release that moves it fails here, by name."""

import ast
import inspect
import subprocess
import sys

import numpy as np
import pytest

from tests.support import fresh, import_graph, inside
from tests.support.keras_models import MARKS, compiled, deferred, digits, functional, keras
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_slow

pytestmark = MARKS
hooks, keras_library = inside.keras_hooks()

STEPS = {  # calls of a model, and the kind of function that each of them makes
    "fit": ("train", lambda model, x, y: model.fit(x, y, verbose=0)),
    "train_on_batch": ("train", lambda model, x, y: model.train_on_batch(x, y)),
    "evaluate": ("test", lambda model, x, y: model.evaluate(x, y, verbose=0)),
    "test_on_batch": ("test", lambda model, x, y: model.test_on_batch(x, y)),
    "predict": ("predict", lambda model, x, y: model.predict(x, verbose=0)),
    "predict_on_batch": ("predict", lambda model, x, y: model.predict_on_batch(x)),
}
STATE = {"train": 4, "test": 3, "predict": 2}


def test_keras_has_the_methods_that_are_hooked(subtests):
    for kind in hooks.KINDS:
        with subtests.test(kind=kind):
            method = inspect.unwrap(getattr(keras.Model, f"make_{kind}_function"))
            assert list(inspect.signature(method).parameters) == ["self", "force"]
            assert getattr(functional(), f"{kind}_function") is None


def test_keras_calls_the_hooked_methods_with_this_state(subtests):
    """The state is a tuple of lists of arrays, in the order that `strategy.verify` relies on."""
    for method in STEPS:
        with subtests.test(method=method):
            kind, call = STEPS[method]
            model, seen = compiled(functional), []
            x, y = digits()
            call(model, x[:32], y[:32])  # builds the optimizer and the metrics
            inner = getattr(model, f"{kind}_function")
            variables = [model.trainable_variables, model.non_trainable_variables]
            variables += [model.optimizer.variables] if kind == "train" else []
            variables += [model.metrics_variables] if kind != "predict" else []

            def function(state, iterator):
                seen.append([[value.shape for value in part] for part in state])
                assert isinstance(state, tuple)
                results, new = inner(state, iterator)
                assert [len(part) for part in new] == [len(part) for part in state]
                return results, new

            setattr(model, f"{kind}_function", function)
            call(model, x[:32], y[:32])
            assert seen == [[[v.shape for v in group] for group in variables]]
            assert len(seen[0]) == STATE[kind]


@pytest.mark.parametrize("methods", mostly_slow(STEPS, "predict", "fit"))
def test_methods_use_all_devices(methods, subtests):
    for method in methods:
        with subtests.test(method=method):
            kind, call = STEPS[method]
            with cpu_strategy(2).scope():
                model = compiled(functional)
            call(model, *digits())
            assert inside.keras_devices(getattr(model, f"{kind}_function")) == 2
            assert {len(v.value.devices()) for v in model.trainable_variables} == {2}


CREATED = {
    "Sequential": deferred,
    "functional": functional,
    "subclass": lambda: type("Own", (keras.Model,), {})(),
    "from_config": lambda: keras.Sequential.from_config(small().get_config()),
    "clone_model": lambda: keras.models.clone_model(small()),
}


def small():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


def test_creating_a_model_calls_the_hook(monkeypatch, subtests):
    for kind in CREATED:
        with subtests.test(kind=kind):
            strategy, claimed = cpu_strategy(2), []
            with strategy.scope():
                pass
            monkeypatch.setattr(hooks, "claim", claimed.append)
            model = CREATED[kind]()
            assert any(each is model for each in claimed)


def test_keras_has_the_public_names_that_are_used():
    assert keras_library.library() is keras
    assert keras_library.backend() == keras.backend.backend() == "jax"
    model = compiled(functional)
    for value in (model, model.layers[-1], model.optimizer, keras.metrics.Mean()):
        assert keras_library.has_variables(value)
        variables = keras_library.variables_of(value)
        assert variables
        assert all(keras_library.has_variables(v) and v.path for v in variables)
    assert not keras_library.has_variables(np.ones(3))
    assert callable(model.jax_state_sync)
    assert (model.steps_per_execution, model.run_eagerly, model.jit_compile) == (1, False, True)
    assert (model.built, model.compiled, model.optimizer.built) == (True, True, False)


def test_one_module_looks_up_names_of_keras():
    """It alone finds the module; the others get models from their callers."""
    for name, tree in import_graph.modules().items():
        for node in ast.walk(tree):
            imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(each.partition(".")[0] == "keras" for each in imported), name
        looks_up = "modules.get('keras')" in ast.unparse(tree)
        assert looks_up == (name == "_src.base.keras_library")


@pytest.mark.slow
def test_import_of_mirror_does_not_import_keras():
    code = "import sys, mirror\nwith mirror.MirroredStrategy().scope(): pass\n"
    code += "print([name for name in sys.modules if name.startswith(('keras', 'tensorflow'))])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=fresh.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_hooks_are_set_once():
    with cpu_strategy(2).scope():
        made = keras.Model.make_train_function
    with cpu_strategy(4).scope():
        assert keras.Model.make_train_function is made


def test_the_state_that_a_step_returns_is_not_compared_again(monkeypatch):
    """With many small arrays, that would be a fifth of the time of a step on one device."""
    with cpu_strategy(2).scope():
        model = compiled(functional)
    x, y = digits()
    compared: list = []

    class Counts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            compared.append(0)

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 6:  # a callback that changes the state: it is mirrored again
                self.model.optimizer.learning_rate = 1e-4

    class Compared(list):
        def append(self, result):
            if compared:
                compared[-1] += 1

    inside.count_calls(inside.replica_devices(), "is_mirrored", monkeypatch, Compared())
    model.fit(x, y, batch_size=32, verbose=0, callbacks=[Counts()])
    assert len(compared) == 8
    assert compared[0] > 0  # in the second step, after the first: other shardings
    assert compared[1:5] == [0] * 4
    assert compared[5] > 0
    assert model.optimizer.learning_rate.value.sharding.is_fully_replicated
