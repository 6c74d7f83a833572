"""Distributed datasets, `PerReplica` and `mirror.data` in calls of Keras models."""

import contextlib
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mirror
from tests.support.keras_models import MARKS, assert_close, compiled, deferred, keras
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy

pytestmark = MARKS

X = np.random.default_rng(0).random((8, 3), "float32")
Y = (np.arange(8) % 10).astype("int32")
METHODS = ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"]
BY_EPOCH = METHODS[:3]
FIX = "without strategy.distribute_dataset"


def halves(array):
    return mirror.PerReplica([array[:4], array[4:]])


def distributed():
    return cpu_strategy(2).distribute_dataset([(X, Y)])


def generator(*batch):
    yield batch


def py_dataset(*batch):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, i):
            return batch

    return Batches()


class Other:
    """A dataset of a type that Keras does not know."""


# Arguments of a call, the name in the message, and what the user has to do.
ARGUMENTS: dict[str, tuple[Any, str, str]] = {
    "dataset": (lambda: [distributed()], "`x`", FIX),
    "iterator": (lambda: [iter(distributed())], "`x`", FIX),
    "PerReplica": (lambda: [halves(X), halves(Y)], "`x`", FIX),
    "in a dict": (lambda: [{"a": X, "b": [halves(X)]}], "`x['b'][0]`", FIX),
    "of mirror.data": (lambda: [mirror.data.from_arrays((X, Y), 4)], "`x`", "batch_size=4"),
}
LABELS = {"labels": (lambda: [X, halves(Y)], "`y`", FIX)}
YIELDED = {
    "generator": (lambda: [generator(halves(X), halves(Y))], "PerReplica", FIX),
    "generator of labels": (lambda: [generator(X, halves(Y))], "PerReplica", FIX),
    "PyDataset": (lambda: [py_dataset(halves(X), halves(Y))], "PerReplica", FIX),
}
CASES = [(m, name, case) for m in METHODS for name, case in ARGUMENTS.items()]
CASES += [(m, name, case) for m in METHODS if "predict" not in m for name, case in LABELS.items()]
CASES += [(m, name, case) for m in BY_EPOCH for name, case in YIELDED.items()]


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_data_of_replicas_is_rejected_with_the_fix(subtests):
    """A model that takes any shape would compute with the replica axis as the batch."""
    for (method, row, case), is_inside in itertools.product(CASES, [True, False]):
        arguments, name, fix = case
        with subtests.test(method=method, row=row, is_inside=is_inside):
            with cpu_strategy(2).scope() if is_inside else contextlib.nullcontext():
                model = compiled(deferred)
            given = arguments()
            with raises(TypeError, names=name, fix=fix):
                getattr(model, method)(*given[:1] if "predict" in method else given)


def deleted():
    array = jnp.asarray(X)
    array.delete()
    return array


REJECTED = {  # by a model that is built: before, Keras looks at the batch itself
    "text": (lambda: np.array(["a"] * 8), TypeError, "encode text first"),
    "objects": (lambda: np.array([object()] * 8), TypeError, "same length"),
    "dates": (lambda: np.array(["2020-01-01"] * 8, "datetime64[D]"), TypeError, "Yield numbers"),
    "deleted": (deleted, ValueError, "Yield a new array every time"),
}


def test_batch_that_is_no_array_of_numbers_is_named(subtests):
    for (row, (make, kind, fix)), n in itertools.product(REJECTED.items(), [1, 2]):
        with subtests.test(row=row, n=n):
            with cpu_strategy(n).scope():
                model = compiled(deferred)
            model.predict_on_batch(X)
            with raises(kind, names="batch[0]", fix=fix):
                model.predict_on_batch(make())


def test_validation_data_and_weights_are_checked():
    with cpu_strategy(2).scope():
        model = compiled(deferred)
    for options, name in (
        ({"validation_data": (halves(X), Y)}, "validation_data[0]"),
        ({"validation_data": distributed()}, "validation_data"),
        ({"sample_weight": halves(np.ones(8, "float32"))}, "sample_weight"),
    ):
        with raises(TypeError, names=name, fix=FIX):
            model.fit(X, Y, verbose=0, **options)
    assert not model.built


def test_errors_of_keras_for_other_data_are_unchanged():
    with cpu_strategy(2).scope():
        model = compiled(deferred)
    with pytest.raises(ValueError, match="Unrecognized data type"):
        model.fit(Other())


def test_a_long_list_is_data():
    with cpu_strategy(2).scope():
        model = compiled(deferred)
    rows = [list(map(float, row)) for row in np.tile(X, (10, 1))]
    wanted = model.predict_on_batch(np.array(rows, "float32"))
    assert_close(model.predict(np.array(rows, "float32"), verbose=0), wanted)


def test_metrics_of_keras_take_results_of_replicas():
    """In custom loops of the guides: only datasets of models are checked."""
    mean = keras.metrics.Mean()
    mean.update_state(mirror.PerReplica([1.0, 3.0]))
    assert float(mean.result()) == 2
    np.testing.assert_array_equal(np.asarray(halves(X)), [X[:4], X[4:]])
