"""Keras models on n devices compute what they compute on one device without mirror."""

import numpy as np
import pytest

from tests.support import inside
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
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_slow

pytestmark = MARKS

MODELS = {"sequential": sequential, "deferred": deferred, "functional": functional}
MODELS["subclassed"] = subclassed


def fit(model, **options):
    x, y = digits()
    return model.fit(x, y, **{"batch_size": 64, "epochs": 2, "verbose": 0, **options})


def by_batches(model):
    x, y = digits()
    logs = [model.train_on_batch(x[i : i + 32], y[i : i + 32]) for i in range(0, 128, 32)]
    return {
        "train": logs,
        "test": model.test_on_batch(x[:30], y[:30]),
        "predict": model.predict_on_batch(x[:7]),
    }


def test_each_program_compiles_once(monkeypatch):
    """The smaller last batch too: a watch does not take its compilation for a launch that hangs."""
    compiles, step = [], inside.keras_step()
    launch = step.launch

    def recorded(*args, **options):
        compiles.append(options["compiles"])
        return launch(*args, **options)

    monkeypatch.setattr(step, "launch", recorded)
    with cpu_strategy(2).scope():
        model = compiled(functional)
    x, y = digits()
    model.fit(x[:80], y[:80], batch_size=32, epochs=2, verbose=0)
    assert compiles == [True, False, True, False, False, False]


def custom_train_step():
    class Scaled(keras.Model):
        """Its loss is doubled, and it counts its steps."""

        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {**logs, "doubled": 2 * logs["loss"]}, state

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training=training)
            return 0.5 * loss

    inputs = keras.Input((8, 8, 1))
    outputs = keras.layers.Dense(10)(keras.layers.Flatten()(inputs))
    return Scaled(inputs, outputs)


def batches():
    x, y = digits()
    while True:
        for start in range(0, 256, 48):  # the last batch has 16 examples
            yield x[start : start + 48], y[start : start + 48]


def sequence(*, overwrites=False):
    """Four batches of 64 examples.

    Args:
        overwrites: Whether all batches are the same two arrays, while a step may still read them.
    """
    x, y = np.empty((64, 8, 8, 1), "float32"), np.empty(64, "int32")

    class Sequence(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            images, labels = (part[i * 64 : i * 64 + 64] for part in digits())
            if not overwrites:
                return images.copy(), labels.copy()
            x[:], y[:] = images, labels
            return x, y

    return Sequence()


def validation():
    return {"validation_data": digits(), "validation_batch_size": 100}


def weights_of(y):
    return np.linspace(0, 2, len(y), dtype="float32")


# What a program does with a compiled model. It returns the numbers to compare.
USES = {
    "fit": lambda m: numbers(m, fit(m)),
    "uneven": lambda m: numbers(m, fit(m, batch_size=50)),
    "validation_split": lambda m: numbers(m, fit(m, validation_split=0.2, batch_size=40)),
    "validation_data": lambda m: numbers(m, fit(m, **validation())),
    "sample_weight": lambda m: numbers(m, fit(m, sample_weight=weights_of(digits()[1]))),
    "class_weight": lambda m: numbers(m, fit(m, class_weight={i: 1 + i / 5 for i in range(10)})),
    "generator": lambda m: numbers(m, m.fit(batches(), steps_per_epoch=6, epochs=2, verbose=0)),
    "PyDataset": lambda m: numbers(m, m.fit(sequence(), epochs=2, verbose=0, shuffle=False)),
    "evaluate": lambda m: dict(enumerate(m.evaluate(*digits(), batch_size=50, verbose=0))),
    "predict": lambda m: {"y": m.predict(digits()[0], batch_size=36, verbose=0)},
    "by batches": by_batches,
}  # fmt: skip


def model_for(use):
    return compiled(sequential if use in ("fit", "uneven") else functional)


# Each use on four devices, and on one, where nothing is split.
ROWS = [(use, 4) for use in USES] + [
    ("fit", 1),
    ("by batches", 1),
    ("generator", 1),
    ("predict", 1),
]
QUICK = [("class_weight", 4), ("predict", 4), ("PyDataset", 4), ("by batches", 1)]
SLOW = [("uneven", 4), ("validation_data", 4), ("by batches", 4)]
NIGHTLY = [row for row in ROWS if row not in QUICK + SLOW]


@pytest.mark.filterwarnings("ignore:.*shuffle=True.*", "ignore:.*examples cannot be split")
@pytest.mark.parametrize("rows", mostly_slow(ROWS, *QUICK, nightly=NIGHTLY))
def test_numbers_are_those_of_one_device(rows, subtests):
    for use, n in rows:
        with subtests.test(use=use, n=n):
            with cpu_strategy(n).scope():
                model = model_for(use)
            assert_close(USES[use](model), USES[use](model_for(use)))
            assert {len(v.value.devices()) for v in model.trainable_variables} == {n}


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_dataset_may_overwrite_its_batch(n):
    """The reference has new arrays: without mirror, a step may read an overwritten one."""
    wanted = compiled(functional)
    wanted = numbers(wanted, wanted.fit(sequence(), epochs=3, shuffle=False, verbose=0))
    with cpu_strategy(n).scope():
        model = compiled(functional)
    history = model.fit(sequence(overwrites=True), epochs=3, shuffle=False, verbose=0)
    assert_close(numbers(model, history), wanted)


@pytest.mark.parametrize(
    "kinds", mostly_slow([*MODELS, "custom train_step"], "functional", "subclassed")
)
def test_kinds_of_models(kinds, subtests):
    for kind in kinds:
        with subtests.test(kind=kind):
            make = {**MODELS, "custom train_step": custom_train_step}[kind]
            wanted = compiled(make)
            wanted = numbers(wanted, fit(wanted, epochs=1))
            with cpu_strategy(4).scope():
                model = compiled(make)
            assert_close(numbers(model, fit(model, epochs=1)), wanted)
            assert all(len(v.value.devices()) == 4 for v in model.variables)


OPTIONS = {
    "run_eagerly": {"run_eagerly": True},
    "jit_compile=False": {"jit_compile": False},
    "steps_per_execution": {"steps_per_execution": 3},
    "sgd": {"optimizer": "sgd"},
    "weighted metrics": {"weighted_metrics": ["accuracy"]},
    "ema": {},
    "auc": {"loss": "categorical_crossentropy", "metrics": ["auc", "f1_score"]},
}
FEW_OPTIONS = {"jit_compile=False", "steps_per_execution"}


@pytest.mark.parametrize("names", mostly_slow(OPTIONS, nightly=OPTIONS.keys() - FEW_OPTIONS))
def test_options_of_compile(names, subtests):
    for name in names:
        with subtests.test(msg=name):
            x, y = digits()
            x, y = x[:50], y[:50]
            if name == "auc":
                y = keras.utils.to_categorical(y, 10)

            def run():
                options = dict(OPTIONS[name])
                if name == "ema":
                    options["optimizer"] = keras.optimizers.SGD(0.1, use_ema=True)
                model = compiled(functional, **options)
                weights = np.linspace(0, 1, 50, dtype="float32")
                history = model.fit(x, y, batch_size=24, verbose=0, sample_weight=weights)
                return numbers(model, history) | {
                    "evaluate": model.evaluate(x, y, batch_size=24, verbose=0),
                    "predict": model.predict(x, batch_size=24, verbose=0),
                }

            wanted = run()
            with cpu_strategy(4).scope():
                assert_close(run(), wanted)


def test_step_is_split_over_the_devices():
    """Each device computes its shard of the batch: inside a step, nothing has all examples."""
    with cpu_strategy(4).scope():
        model = compiled(functional)
    seen = []
    made = None

    class Spy(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            nonlocal made
            made = self.model.train_function.compiled

            def spied(state, batch):
                seen.append([leaf.sharding.shard_shape(leaf.shape)[0] for leaf in batch[:2]])
                return made(state, batch)

            self.model.train_function.compiled = spied

    x, y = digits()
    model.fit(x[:100], y[:100], batch_size=64, verbose=0, callbacks=[Spy()])
    assert seen == [[16, 16], [9, 9]]  # 64 and 36 examples
    assert made is not None


def test_batches_that_never_divide_warn_once_with_sizes_that_do():
    with cpu_strategy(4).scope():
        model = compiled(functional)
    with pytest.warns(UserWarning, match=r"50 examples .* 4 devices.* 48 or 52") as caught:
        fit(model, batch_size=50)
    fit(model, batch_size=50)  # a second warning would be an error
    assert len(caught) == 1
    assert caught[0].filename.endswith("test_training.py")


@pytest.mark.parametrize("sizes", mostly_slow([1, 10, 64, 256], 256))
def test_one_batch_of_any_size_does_not_warn(sizes, subtests):
    for size in sizes:
        with subtests.test(size=size):
            with cpu_strategy(4).scope():
                model = compiled(functional)
            x, y = digits()
            for _ in range(3):
                assert model.predict(x[:size], batch_size=64, verbose=0).shape == (size, 10)
                model.evaluate(x[: size + 3], y[: size + 3], batch_size=64, verbose=0)


def test_callbacks_of_keras(tmp_path):
    def run(folder):
        model = compiled(functional)
        best = {"monitor": "loss", "min_delta": 10, "patience": 1}
        callbacks = [
            keras.callbacks.ModelCheckpoint(
                str(folder / "{epoch}.weights.h5"), save_weights_only=True
            ),
            keras.callbacks.LearningRateScheduler(lambda epoch: 1e-2 / (1 + epoch)),
            keras.callbacks.EarlyStopping(restore_best_weights=True, **best),
            keras.callbacks.ReduceLROnPlateau(**best),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda step, logs: losses.append(float(logs["loss"]))
            ),
        ]
        losses: list[float] = []
        history = fit(model, epochs=4, callbacks=callbacks)
        model.load_weights(str(folder / "1.weights.h5"))
        log = np.genfromtxt(folder / "log.csv", delimiter=",", skip_header=1)
        return {"losses": losses, "log": log, **numbers(model, history)}

    (tmp_path / "plain").mkdir()
    (tmp_path / "scope").mkdir()
    wanted = run(tmp_path / "plain")
    with cpu_strategy(4).scope():
        assert_close(run(tmp_path / "scope"), wanted)


def test_models_are_saved_and_loaded(tmp_path):
    path = str(tmp_path / "model.keras")
    with cpu_strategy(4).scope():
        model = compiled(functional)
    fit(model, epochs=1)
    model.save(path)
    x, _ = digits()
    wanted = model.predict(x, verbose=0)
    alone = keras.models.load_model(path)
    with cpu_strategy(2).scope():
        loaded = keras.models.load_model(path)
        cloned = keras.models.clone_model(model)
    cloned.set_weights(model.get_weights())
    for other, n in ((alone, 1), (loaded, 2), (cloned, 2)):
        np.testing.assert_allclose(other.predict(x, verbose=0), wanted, atol=1e-6)
        assert {len(v.value.devices()) for v in other.trainable_variables} == {n}
    in_order = {"epochs": 1, "shuffle": False}
    assert_close(fit(loaded, **in_order).history, fit(alone, **in_order).history)


def test_weights_loaded_outside_the_scope_of_a_model_without_optimizer(tmp_path):
    """All its variables are then on one device; the model still belongs to the scope."""
    path = str(tmp_path / "model.weights.h5")
    functional().save_weights(path)
    with cpu_strategy(4).scope():
        model = functional()
    model.load_weights(path)
    x, _ = digits()
    model.predict(x, verbose=0)
    assert all(len(v.value.devices()) == 4 for v in model.variables)
