"""Keras models of any structure: several inputs and outputs, states, penalties, shared layers."""

from typing import Any

import numpy as np
import pytest

from tests.support import inside, packages
from tests.support.keras_models import MARKS, assert_close, compiled, digits, keras, numbers
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_slow

pytestmark = MARKS

torch = packages.optional("torch")
ROWS, SIZE = 50, 24  # the last batch has 2 examples


def rows():
    x, y = digits()
    x, y = x[:ROWS].reshape(ROWS, 64), y[:ROWS]
    return x[:, :32], x[:, 32:], y


def features():
    return keras.Input((32,), name="left"), keras.Input((32,), name="right")


def classes(name="classes"):
    return keras.layers.Dense(10, name=name)


def penalized():
    inputs = keras.Input((32,), name="left")
    hidden = keras.layers.Dense(
        8, "relu", kernel_regularizer="l2", activity_regularizer=keras.regularizers.L1(1e-2)
    )(inputs)
    return keras.Model(inputs, classes()(hidden))


def recurrent():
    """Its state goes from batch to batch, so that all batches have one size."""
    inputs = keras.Input((8, 4), batch_size=16)
    return keras.Model(inputs, classes()(keras.layers.LSTM(6, stateful=True)(inputs)))


def of_two():
    left, right = features()
    both = keras.layers.concatenate([left, keras.layers.Dense(5)(right)])
    return keras.Model([left, right], classes()(both))


def of_names():
    left, right = features()
    both = keras.layers.concatenate([left, right])
    return keras.Model({"left": left, "right": right}, classes()(both))


def pooled():
    layers = [keras.Input((8, 8, 1)), keras.layers.Conv2D(4, 3), keras.layers.MaxPool2D()]
    return keras.Sequential([*layers, keras.layers.Flatten(), classes()])


@pytest.mark.parametrize("num_devices", [1, 2])
def test_slow_operations_are_replaced_as_in_other_steps(num_devices, monkeypatch):
    x, y = digits()
    batch = (x[:16].reshape(16, 8, 8, 1), y[:16], None)
    texts = {}
    for setting in ("", "xla"):
        monkeypatch.setenv("MIRROR_LOWERING", setting)
        with cpu_strategy(num_devices).scope():
            model = compiled(pooled)
        model.fit(*batch[:2], batch_size=16, verbose=0)
        texts[setting] = inside.lowered_keras_step(model, batch)
    assert "select_and_scatter" in texts["xla"]
    assert "select_and_scatter" not in texts[""]


def with_shared_layers():
    left, right = features()
    encode = keras.Sequential([keras.layers.Dense(6, "relu"), keras.layers.LayerNormalization()])
    return keras.Model([left, right], classes()(keras.layers.add([encode(left), encode(right)])))


def of_tokens():
    inputs = keras.Input((32,), dtype="int32")
    embedded = keras.layers.Embedding(17, 4, mask_zero=True)(inputs)
    return keras.Model(inputs, classes()(keras.layers.LSTM(6)(embedded)))


def with_heads():
    left, right = features()
    hidden = keras.layers.Dense(8, "relu")(keras.layers.concatenate([left, right]))
    return keras.Model([left, right], {"classes": classes()(hidden), "sum": classes("sum")(hidden)})


def listed_heads():
    left, right = features()
    hidden = keras.layers.Dense(8, "relu")(keras.layers.concatenate([left, right]))
    return keras.Model(
        [left, right], [classes()(hidden), keras.layers.Dense(1, name="sum")(hidden)]
    )


def named(**options):
    left, right, y = rows()
    return {"x": {"left": left, "right": right}, "y": y, **options}


def listed(**options):
    left, right, y = rows()
    return {"x": [left, right], "y": y, **options}


def heads(**options):
    left, right, y = rows()
    sums = np.eye(10, dtype="float32")[y]
    return {"x": [left, right], "y": {"classes": y, "sum": sums}, **options}


def sparse():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def weights():
    return np.linspace(0, 2, ROWS, dtype="float32")


def tokens():
    left, _, y = rows()
    return {"x": (left * 16).astype("int32"), "y": y}


def sequences():
    left, _, y = rows()
    return {"x": left[:48].reshape(48, 8, 4), "y": y[:48], "batch_size": 16, "shuffle": False}


def loader():
    left, _, y = rows()
    data = torch.utils.data.TensorDataset(torch.from_numpy(left), torch.from_numpy(y).long())
    return {"x": torch.utils.data.DataLoader(data, batch_size=SIZE), "y": None, "batch_size": None}


# A model, its data, and the options of `compile`.
GRAPHS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "penalties": (penalized, lambda: {"x": rows()[0], "y": rows()[2]}, {}),
    "two inputs": (of_two, listed, {}),
    "inputs by name": (of_names, named, {}),
    "sample weights": (of_names, lambda: named(sample_weight=weights()), {}),
    "shared layers": (with_shared_layers, listed, {}),
    "tokens with a mask": (of_tokens, tokens, {}),
    "stateful": (recurrent, sequences, {}),
    "outputs by name": (
        with_heads,
        heads,
        {
            "loss": {"classes": sparse, "sum": lambda: "mse"},
            "loss_weights": {"classes": 1.0, "sum": 0.25},
            "metrics": {"classes": ["accuracy"], "sum": ["mae"]},
        },
    ),
    "weights by output": (
        with_heads,
        lambda: heads(sample_weight={"classes": weights(), "sum": weights()[::-1].copy()}),
        {"loss": {"classes": sparse, "sum": lambda: "mse"}, "metrics": None},
    ),
    "listed outputs": (
        listed_heads,
        lambda: listed(y=[rows()[2], rows()[0].sum(1)]),
        {"loss": [sparse, lambda: "mae"], "metrics": None},
    ),
}
SLOW = ["stateful", "outputs by name"]
QUICK = ["inputs by name"]
NIGHTLY = [name for name in GRAPHS if name not in QUICK + SLOW]
# A loader of torch, for which this package is needed too.
TORCH: dict[str, tuple[Any, Any, dict[str, Any]]] = {"torch loader": (penalized, loader, {})}


def losses_of(given):
    if isinstance(given, dict):
        return {name: make() for name, make in given.items()}
    return [make() for make in given]


def run(name, n=1):
    make, data, options = {**GRAPHS, **TORCH}[name]
    if "loss" in options:
        options = {**options, "loss": losses_of(options["loss"])}
    model = compiled(make, **options)
    given = {"batch_size": SIZE, "verbose": 0, **data()}
    history = model.fit(epochs=2, **given)
    assert {len(v.value.devices()) for v in model.trainable_variables} == {n}
    given.pop("shuffle", None)
    found = model.evaluate(**given, return_dict=True)
    predicted = model.predict(given["x"], batch_size=given["batch_size"], verbose=0)
    return numbers(model, history) | {"evaluate": found, "predict": predicted}


@pytest.mark.filterwarnings("ignore:.*examples cannot be split", "ignore:.*shuffle=True.*")
@pytest.mark.parametrize("names", mostly_slow(GRAPHS, *QUICK, nightly=NIGHTLY))
def test_numbers_are_those_of_one_device(names, subtests):
    for name in names:
        with subtests.test(msg=name):
            wanted = run(name)
            with cpu_strategy(4).scope():
                found = run(name, 4)
            assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.dev("torch")
@pytest.mark.filterwarnings("ignore:.*examples cannot be split", "ignore:.*shuffle=True.*")
def test_batches_of_torch():
    (name,) = TORCH
    wanted = run(name)
    with cpu_strategy(4).scope():
        assert_close(run(name, 4), wanted)
