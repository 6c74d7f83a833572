"""Losses and metrics by name: the numbers of Keras, shapes, labels and messages."""
# ruff: noqa: E501 (arguments and their message are one row)

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_slow, rows
from tests.support.training import fit

TABLES = inside.loss_tables()
RNG = np.random.RandomState(0)
LOGITS = RNG.randn(6, 3).astype("float32") * 2
CLASSES = RNG.randint(0, 3, 6)
ONE_HOT = np.eye(3, dtype="float32")[CLASSES]
LOGIT = LOGITS[:, 0]
BINARY = (RNG.rand(6) > 0.5).astype("float32")
VALUES = RNG.randn(6, 3).astype("float32")


class Scale(nnx.Module):
    """Returns its input at first, so that a test chooses the logits."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return x * self.w


def scale(name, n=2, model=None, **kwargs):
    return mirror.Trainer(
        model or Scale(), optax.sgd(0.1), name, strategy=cpu_strategy(n), **kwargs
    )


# Loss, outputs, labels, and the mean that Keras 3.12 computes with from_logits=True.
KERAS = {
    "sparse_categorical_crossentropy": (LOGITS, CLASSES, 1.954793930053711),
    "sparse_categorical_crossentropy column": (LOGITS, CLASSES[:, None].astype("uint8"), 1.954793930053711),
    "sparse_categorical_crossentropy tokens": (LOGITS.reshape(3, 2, 3), CLASSES.reshape(3, 2), 1.954793930053711),
    "categorical_crossentropy": (LOGITS, ONE_HOT, 1.954793930053711),
    "binary_crossentropy": (LOGIT, BINARY, 1.5099544525146484),
    "bce": (LOGIT, BINARY > 0, 1.5099544525146484),
    "binary_crossentropy column": (LOGIT[:, None], BINARY, 1.5099544525146484),
    "binary_crossentropy column of labels": (LOGIT, BINARY[:, None].astype(int), 1.5099544525146484),
    "binary_crossentropy of several labels": (LOGITS, ONE_HOT, 1.3584213256835938),
    "binary_focal_crossentropy": (LOGIT, BINARY, 1.196121335029602),
    "mean_squared_error": (LOGITS, VALUES, 5.28488302230835),
    "mse": (LOGITS, VALUES, 5.28488302230835),
    "mean_absolute_error": (LOGITS, VALUES, 1.959712028503418),
    "mae": (LOGITS, VALUES, 1.959712028503418),
    "mean_absolute_percentage_error": (LOGITS, VALUES, 765.6886596679688),
    "mape": (LOGITS, VALUES, 765.6886596679688),
    "mean_squared_logarithmic_error": (LOGITS, VALUES, 0.6594697833061218),
    "msle": (LOGITS, VALUES, 0.6594697833061218),
    "huber": (LOGITS, VALUES, 1.4983311891555786),
    "log_cosh": (LOGITS, VALUES, 1.3701095581054688),
    "cosine_similarity": (LOGITS, VALUES, -0.025843719020485878),
}  # fmt: skip


@pytest.mark.parametrize("rows", mostly_slow(KERAS, "sparse_categorical_crossentropy"))
def test_losses_are_those_of_keras(subtests, rows):
    for name in rows:
        with subtests.test(msg=name):
            outputs, labels, wanted = KERAS[name]
            loss = scale(name.split()[0]).evaluate((outputs, labels), batch_size=4)["loss"]
            assert loss == pytest.approx(wanted, rel=1e-5)


def test_table_is_tested_and_typed():
    names = {*TABLES.LOSSES, *TABLES.ALIASES}
    assert names == {name.split()[0] for name in KERAS} == set(TABLES.LossName.__args__)


def test_functions_of_optax_equal_their_names(subtests):
    functions = {name: loss.fn for name, loss in TABLES.LOSSES.items()}
    of_optax = {name: fn for name, fn in functions.items() if fn.__module__.startswith("optax")}
    assert len(of_optax) == 7
    for name, fn in of_optax.items():
        with subtests.test(msg=name):
            outputs, labels, wanted = KERAS[name]
            assert scale(fn).evaluate((outputs, labels), batch_size=4)["loss"] == pytest.approx(
                wanted, rel=1e-5
            )


CORRECT = (LOGITS.argmax(1) == CLASSES).mean()
SIX = RNG.randn(6, 6).astype("float32")
RANKS = (SIX[np.arange(6), CLASSES][:, None] < SIX).sum(1)
METRICS = {
    # loss, outputs, labels, metrics, and the wanted values
    "accuracy": ("sparse_categorical_crossentropy", LOGITS, CLASSES, ["accuracy"], {"accuracy": CORRECT}),
    "one name": ("sparse_categorical_crossentropy", LOGITS, CLASSES, "acc", {"acc": CORRECT}),
    "one-hot": ("categorical_crossentropy", LOGITS, ONE_HOT, ["accuracy"], {"accuracy": CORRECT}),
    "binary": ("binary_crossentropy", LOGIT[:, None], BINARY, ["accuracy"], {"accuracy": ((LOGIT > 0) == BINARY).mean()}),
    "column": ("sparse_categorical_crossentropy", LOGITS, CLASSES[:, None], ["sparse_categorical_accuracy"], {"sparse_categorical_accuracy": CORRECT}),
    "tokens": ("sparse_categorical_crossentropy", LOGITS.reshape(3, 2, 3), CLASSES.reshape(3, 2), ["accuracy"], {"accuracy": CORRECT}),
    "top 5": ("sparse_categorical_crossentropy", SIX, CLASSES, ["top_5_accuracy"], {"top_5_accuracy": (RANKS < 5).mean()}),
    "top 5 of one-hot": ("categorical_crossentropy", SIX, np.eye(6)[CLASSES], ["top_k_categorical_accuracy"], {"top_k_categorical_accuracy": (RANKS < 5).mean()}),
    "errors": ("mse", LOGITS, VALUES, ["mae", "mean_squared_error"], {"mae": np.abs(LOGITS - VALUES).mean(), "mean_squared_error": 5.28488302230835}),
    "a function": ("mse", LOGIT[:, None], BINARY, [lambda outputs, labels: outputs - labels], {"<lambda>": (LOGIT - BINARY).mean()}),
    "a dict": ("mse", LOGIT, BINARY, {"error": "mae", "mean": lambda outputs, labels: outputs}, {"error": np.abs(LOGIT - BINARY).mean(), "mean": LOGIT.mean()}),
}  # fmt: skip


def test_metrics_are_means_over_all_examples(subtests):
    for name in METRICS:
        with subtests.test(msg=name):
            loss, outputs, labels, metrics, wanted = METRICS[name]
            found = scale(loss, metrics=metrics).evaluate((outputs, labels), batch_size=4)
            del found["loss"]
            assert found == pytest.approx(wanted, rel=1e-5)


def test_named_loss_trains_like_its_function():
    def loss_fn(model, batch):
        x, y = batch
        losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
        return losses, {"accuracy": model(x).argmax(-1) == y}

    named = scale("sparse_categorical_crossentropy", 3, metrics=["accuracy"])
    by_hand = scale(loss_fn, 3)
    wanted = fit(by_hand, (LOGITS, CLASSES), 3, batch_size=4)
    assert dict(fit(named, (LOGITS, CLASSES), 3, batch_size=4)) == dict(wanted)
    np.testing.assert_array_equal(named.model.w[...], by_hand.model.w[...])


WEIGHT = np.asarray([0, 1, 2, 0.5, 1, 3], "float32")
BATCHES = {
    "tuple": ((LOGITS, CLASSES), {}),
    "labels first": ((CLASSES, LOGITS), {"labels": 0}),
    "dict": ({"image": LOGITS, "digit": CLASSES}, {"labels": "digit"}),
    "weights in a tuple": ((LOGITS, CLASSES, WEIGHT), {"sample_weight": 2}),
    "weights in a dict": ({"x": LOGITS, "w": WEIGHT, "y": CLASSES}, {"labels": "y", "sample_weight": "w"}),
    "class weights": ((LOGITS, CLASSES), {"class_weight": {0: 2.0, 2: 0.5}}),
    "class weights of columns": ((LOGITS, CLASSES[:, None]), {"class_weight": {0: 2.0, 2: 0.5}, "num_classes": 3}),
}  # fmt: skip


def test_parts_of_batches_and_weights(subtests):
    for name in BATCHES:
        with subtests.test(msg=name):
            data, options = BATCHES[name]
            losses = np.log(np.exp(LOGITS).sum(1)) - LOGITS[np.arange(6), CLASSES]
            factors = WEIGHT if "sample_weight" in options else np.ones(6)
            if "class_weight" in options:
                factors = np.asarray([2.0, 1.0, 0.5])[CLASSES]
            trainer = scale("sparse_categorical_crossentropy", **options)
            assert trainer.evaluate(data, batch_size=4)["loss"] == pytest.approx(
                (losses * factors).mean(), rel=1e-5
            )
            batches = list(mirror.data.from_arrays(data, 4))
            lists = [
                list(b) if isinstance(b, tuple) else b for b in batches
            ]  # as a torch DataLoader yields
            assert trainer.evaluate(lists)["loss"] == pytest.approx(
                (losses * factors).mean(), rel=1e-5
            )


def test_binary_labels_have_class_weights(subtests):
    """Classes are numbers, as labels are: NumPy sets all elements of `x[True]`."""
    losses = np.log1p(np.exp(-np.where(BINARY > 0, LOGIT, -LOGIT))) * np.where(BINARY > 0, 3, 1)
    for one in (1, True, np.True_, 1.0, np.float32(1)):
        with subtests.test(msg=repr(one)):
            trainer = scale("binary_crossentropy", class_weight={one: 3.0})
            found = trainer.evaluate((LOGIT[:, None], BINARY[:, None]), batch_size=4)
            assert found["loss"] == pytest.approx(losses.mean(), rel=1e-5)


LABELS = {
    # labels, options, values and fix in the message
    "too large": (CLASSES + np.asarray([0, 0, 0, 0, 0, 3]), {}, ["in [0, 2]", "3 logits", "row 1"], ()),
    "in the first batch": (CLASSES + np.asarray([3, 0, 0, 0, 0, 0]), {}, ["batch 0", "row 0", "in [0, 2]"], ()),
    "negative": (CLASSES - 3, {}, ["batch 0", "in [0, 2]", "(invalid labels in this batch: 4)"], ()),
    "column": (CLASSES[:, None] + 3, {}, ["in [0, 2]", "row 0"], ()),
    "fewer classes": (CLASSES + 1, {"num_classes": 2}, ["in [0, 1]", "num_classes=2"], ()),
    "more classes than logits": (CLASSES, {"num_classes": 10}, ["num_classes=10", "3 logits"], "one logit per class"),
}  # fmt: skip


def test_labels_out_of_range_are_rejected_before_they_are_used(subtests):
    for name, use in itertools.product(LABELS, ["fit", "evaluate", "verify"]):
        with subtests.test(msg=f"{name} {use}"):
            labels, options, values, fix = LABELS[name]
            if use == "verify" and name == "too large":
                pytest.skip("it is in the second batch, and verify uses the first")
            trainer = scale("sparse_categorical_crossentropy", **options)
            data = mirror.data.from_arrays((LOGITS, labels), 4)
            with raises(ValueError, values=values, fix=fix):
                fit(trainer, data, 2) if use == "fit" else getattr(trainer, use)(data)
            assert np.isfinite(trainer.model.w[...])


def test_binary_labels_are_from_0_to_1():
    for labels in (BINARY * 2 - 1, BINARY + np.nan):
        with raises(ValueError, values=["batch 0", "from 0 to 1"], fix="(labels > 0)"):
            fit(scale("binary_crossentropy"), (LOGIT, labels), batch_size=4)


SPARSE, ONE, BIN = (
    "sparse_categorical_crossentropy",
    "categorical_crossentropy",
    "binary_crossentropy",
)
SHAPES = {
    # loss, inputs and labels, error, values and fix
    "one-hot to sparse": (SPARSE, (LOGITS, ONE_HOT), ValueError, ["float32[2,3]", "(2,)"], "'categorical_crossentropy'"),
    "classes to one-hot": (ONE, (LOGITS, CLASSES), ValueError, ["float32[2,3]", "int32[2]"], "'sparse_categorical_crossentropy'"),
    "column to one-hot": (ONE, (LOGITS, CLASSES[:, None]), ValueError, ["int32[2,1]"], "'sparse_categorical_crossentropy'"),
    "floats to sparse": (SPARSE, (LOGITS, BINARY), TypeError, ["float32[2]"], "labels.astype('int32')"),
    "one logit to sparse": (SPARSE, (LOGIT, BINARY.astype(int)), ValueError, ["float32[2]"], "'binary_crossentropy'"),
    "column of logits to sparse": (SPARSE, (LOGIT[:, None], 0 * CLASSES), ValueError, ["float32[2,1]"], "'binary_crossentropy'"),
    "two logits to binary": (BIN, (LOGITS[:, :2], BINARY), ValueError, ["float32[2,2]", "float32[2]"], "'sparse_categorical_crossentropy'"),
    "would broadcast": ("mse", (LOGITS, VALUES[:, :1]), ValueError, ["float32[2,3]", "float32[2,1]"], ()),
    "would broadcast rows": ("mse", (LOGITS, VALUES[:, 0]), ValueError, ["float32[2,3]", "float32[2]"], ()),
    "three parts": (SPARSE, (LOGITS, CLASSES, WEIGHT), ValueError, ["a tuple of 3"], "sample_weight=2"),
    "one part": (SPARSE, LOGITS, ValueError, ["(inputs, labels)", "float64[4,3]"], "def loss_fn(model, batch):"),
    "unnamed labels": (SPARSE, {"x": LOGITS, "y": CLASSES}, ValueError, ["['x', 'y']"], "labels='y'"),
}  # fmt: skip


def test_shapes_that_do_not_match_are_rejected(subtests):
    for name in SHAPES:
        with subtests.test(msg=name):
            loss, data, kind, values, fix = SHAPES[name]
            if name == "one part":
                data = LOGITS.astype("float64")
            with raises(kind, values=values, fix=fix):
                fit(scale(loss), data, batch_size=4)


def test_parts_of_a_dict_are_named():
    data = {"x": LOGITS, "z": LOGITS, "y": CLASSES}
    with raises(ValueError, values="['x', 'y', 'z']", fix=["sample_weight='z'"]):
        fit(scale(SPARSE, labels="y"), data, batch_size=4)
    weighted = {"x": LOGITS, "w": WEIGHT, "y": CLASSES}  # JAX sorts the keys
    with raises(ValueError, values="['w', 'x', 'y']", fix=["sample_weight='w'"]):
        fit(scale(SPARSE, labels="y"), weighted, batch_size=4)
    with raises(ValueError, names="labels", values=["'label'", "['x', 'y', 'z']"]):
        fit(scale(SPARSE, labels="label"), data, batch_size=4)


class Pair(nnx.Module):
    def __call__(self, x):
        return x, x


def test_model_must_return_one_array():
    with raises(TypeError, values="tuple", fix="def loss_fn(model, batch):"):
        scale(SPARSE, model=Pair()).evaluate((LOGITS, CLASSES), batch_size=4)


ARGUMENTS = {
    # loss, options, error, values and fix
    "typo": ("sparse_categorical_cross_entropy", {}, ValueError, ["'sparse_categorical_cross_entropy'"], "Did you mean 'sparse_categorical_crossentropy'"),
    "camel case": ("MeanSquaredError", {}, ValueError, ["'MeanSquaredError'"], "Did you mean 'mean_squared_error'"),
    "unknown": ("magic", {}, ValueError, ["'magic'", "'huber'"], "(model, batch)"),
    "optimizer": ("adam", {}, ValueError, ["'adam'"], "(model, batch)"),
    "unknown metric": ("mse", {"metrics": ["mean_abs_error"]}, ValueError, ["'mean_abs_error'"], "Did you mean 'mean_absolute_error'"),
    "not a mean": (BIN, {"metrics": ["AUC"]}, ValueError, ["'AUC'"], "mirror.Metric"),
    "accuracy of values": ("mse", {"metrics": ["accuracy"]}, ValueError, ["'accuracy'", "'mse'"], "'mean_absolute_error'"),
    "binary accuracy of classes": (SPARSE, {"metrics": ["binary_accuracy"]}, ValueError, ["'binary_accuracy'"], "'accuracy'"),
    "error of classes": (SPARSE, {"metrics": ["mse"]}, ValueError, ["'mse'", "'sparse_categorical_crossentropy'"], "(outputs, labels)"),
    "metric of one argument": ("mse", {"metrics": [lambda outputs: outputs]}, TypeError, ["(outputs)", "(outputs, labels)"], ()),
    "number as metric": ("mse", {"metrics": [3]}, TypeError, ["3 (int)"], "(outputs, labels)"),
    "number of metrics": ("mse", {"metrics": 3}, TypeError, ["3 (int)"], "metrics=['accuracy']"),
    "twice": ("mse", {"metrics": ["mae", "mae"]}, ValueError, ["'mae'"], "metrics={"),
    "named loss": ("mse", {"metrics": {"loss": "mae"}}, ValueError, ["'loss'"], "metrics={"),
    "metrics of a function": (lambda model, batch: batch, {"metrics": ["accuracy"]}, TypeError, ["metrics", "<lambda>"], "return losses, {'accuracy': "),
    "classes of values": ("mse", {"num_classes": 3}, ValueError, ["num_classes=3", "'mse'"], "'sparse_categorical_crossentropy'"),
    "class weights of values": ("mse", {"class_weight": {0: 1.0}}, ValueError, ["class_weight={0: 1.0}", "'mse'"], "sample_weight"),
    "class weight too large": (BIN, {"class_weight": {2: 1.0}}, ValueError, ["class_weight", 2, "in [0, 1]"], ()),
    "function of labels": ("mse", {"labels": lambda batch: batch}, TypeError, ["labels"], "(model, batch)"),
    "another optax loss": (optax.losses.hinge_loss, {}, TypeError, ["hinge_loss"], ["def loss_fn(model, batch):", "optax.losses.hinge_loss(outputs, labels)"]),
    "a loss of Keras' form": (lambda y_true, y_pred: y_pred, {}, TypeError, ["(y_true, y_pred)"], ["def loss_fn(model, batch):", "(labels, outputs)"]),
    "batch in two arguments": (lambda model, x, y: x, {}, TypeError, ["(model, x, y)", "(model, batch)"], "x, y = batch"),
    "no batch": (lambda model: model, {}, TypeError, ["(model)", "(model, batch)"], ()),
}  # fmt: skip


def test_wrong_arguments_are_rejected_at_once(subtests):
    for name in ARGUMENTS:
        with subtests.test(msg=name):
            loss, options, kind, values, fix = ARGUMENTS[name]
            with raises(kind, values=values, fix=fix):
                scale(loss, **options)


FOREIGN = {
    ("keras.src.losses", "SparseCategoricalCrossentropy"): "'sparse_categorical_crossentropy'",
    ("keras.src.losses", "MeanSquaredError"): "'mean_squared_error'",
    ("torch.nn.modules.loss", "CrossEntropyLoss"): "'sparse_categorical_crossentropy'",
    ("torch.nn.modules.loss", "MSELoss"): "'mean_squared_error'",
    ("torch.nn.modules.loss", "CTCLoss"): "(model, batch)",
}


def test_losses_of_other_libraries_are_named(subtests):
    for module, name in FOREIGN:
        with subtests.test(msg=f"{module}.{name}"):
            check_losses_of_other_libraries_are_named(module, name)


def check_losses_of_other_libraries_are_named(module, name):
    loss = type(name, (), {"__module__": module, "__call__": lambda self, y_true, y_pred: y_true})()
    with raises(TypeError, values=[name, module.partition(".")[0]], fix=FOREIGN[module, name]):
        scale(loss)


# Predictions: the model is called on the inputs.

INPUTS = {
    "an array": ({}, lambda x, y: x),
    "a tuple": ({}, lambda x, y: (x, y)),
    "a tuple without labels": ({}, lambda x, y: (x,)),
    "a tuple with weights": ({"sample_weight": 2}, lambda x, y: (x, y, np.ones(len(x), "float32"))),
    "labels first": ({"labels": 0}, lambda x, y: (y, x)),
    "a dict": ({"labels": "label"}, lambda x, y: {"image": x, "label": y}),
    "a dict without labels": ({"labels": "label"}, lambda x, y: {"image": x}),
    "a loss function": ({"name": lambda model, batch: model(batch)[:, 0]}, lambda x, y: x),
}


@rows("options, make", INPUTS)
def test_predict_calls_the_model_on_the_inputs(options, make):
    trainer = scale(**{"name": "sparse_categorical_crossentropy", **options})
    trainer.model.w[...] = 2.0
    data = make(LOGITS, CLASSES)
    for results in (
        trainer.predict(data, batch_size=4),
        trainer.predict(mirror.data.from_arrays(data, batch_size=4)),
    ):
        np.testing.assert_array_equal(results, LOGITS * 2)


BY_FUNCTION = {"name": lambda model, batch: model(batch["x"])[:, 0]}
UNKNOWN = {
    "three entries": ({}, (LOGITS, CLASSES, CLASSES), ["'mse'"], "model(batch[0])"),
    "a dict": ({}, {"x": LOGITS, "y": CLASSES}, ["'mse'", "['x', 'y']"], "model(batch['x'])"),
    "a function": (BY_FUNCTION, {"x": LOGITS}, ["<lambda>", "['x']"], "model(batch['x'])"),
    "a function, tuple": (BY_FUNCTION, (LOGITS, CLASSES), ["<lambda>"], "model(batch[0])"),
}


@rows("options, data, names, line", UNKNOWN)
def test_predict_with_unknown_inputs_says_which_line_to_write(options, data, names, line):
    trainer = scale(**{"name": "mse", **options})
    line = f"trainer.predict(data, lambda model, batch: {line})"
    with raises(ValueError, names=names, fix=[line, "model(batch) if all of it is the inputs"]):
        trainer.predict(data, batch_size=4)


def test_predict_with_swapped_arguments_says_the_order():
    def logits_of(model, batch):
        return model(batch)

    for rest in ((), (LOGITS,)):
        with raises(TypeError, names=["data", "logits_of"], fix="trainer.predict(data, logits_of)"):
            scale("mse").predict(logits_of, *rest, batch_size=4)
