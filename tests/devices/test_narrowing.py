"""Integers that do not fit 32 bits are errors wherever host arrays go to the devices."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support.messages import raises
from tests.support.tables import rows

LARGE = 2**32 + 3
ROWS = 4
FIX = "jax.config.update('jax_enable_x64', True)"


class Table(nnx.Module):
    def __init__(self, values):
        self.values = nnx.Variable(values)


def identity(x):
    return x


def loss_fn(model, batch):
    return (model.w[...] * batch["x"] - 0 * batch["y"]) ** 2


class Scale(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(np.ones((), np.float32))


def trainer_on(strategy, **options):
    return mirror.Trainer(Scale(), optax.sgd(0.1), loss_fn, strategy=strategy, **options)


def batch_of(y):
    return {"x": np.ones(ROWS, np.float32), "y": y}


def counts(strategy, **options):
    with strategy.scope():
        return mirror.Variable(np.zeros(ROWS, np.int32), name="v", **options)


def consumed(dataset):
    (batch,) = dataset
    return batch


PLACES = {
    "distribute_dataset": (
        lambda s, y: consumed(s.distribute_dataset([batch_of(y)]))["y"],
        "batch['y']",
    ),
    "distribute_dataset, padded": (
        lambda s, y: consumed(s.distribute_dataset([batch_of(y)], remainder="pad"))[0]["y"],
        "batch['y']",
    ),
    "a later batch": (
        lambda s, y: list(s.distribute_dataset([batch_of(y * 0), batch_of(y)]))[1]["y"],
        "batch['y']",
    ),
    "distribute_datasets_from_function": (
        lambda s, y: consumed(
            s.distribute_datasets_from_function(lambda _: [batch_of(y), batch_of(y)])
        )["y"],
        "batch['y']",
    ),
    "distribute_values_from_function": (
        lambda s, y: s.distribute_values_from_function(lambda _: {"y": y})["y"],
        "['y']",
    ),
    "from_arrays": (
        lambda s, y: consumed(
            s.distribute_dataset(mirror.data.from_arrays(batch_of(y), batch_size=ROWS))
        )["y"],
        "arrays['y']",
    ),
    "fit on arrays": (
        lambda s, y: trainer_on(s).fit(batch_of(y), batch_size=ROWS, progress=False),
        "data['y']",
    ),
    "fit on validation arrays": (
        lambda s, y: trainer_on(s).fit(
            batch_of(y * 0), batch_size=ROWS, validation_data=batch_of(y), progress=False
        ),
        "validation_data['y']",
    ),
    "fit on batches": (
        lambda s, y: trainer_on(s).fit([batch_of(y)], progress=False),
        "batch['y']",
    ),
    "fit on groups of batches": (
        lambda s, y: trainer_on(s, steps_per_execution=2).fit([batch_of(y)] * 2, progress=False),
        "batch['y']",
    ),
    "evaluate": (lambda s, y: trainer_on(s).evaluate([batch_of(y)]), "batch['y']"),
    "run": (lambda s, y: s.run(identity, (y,)), "x"),
    "run with PerReplica": (lambda s, y: s.run(identity, (mirror.PerReplica([y, y]),)), "x"),
    "a model": (lambda s, y: s.run(lambda model: model.values[...], (Table(y),)), "model.values"),
    "reduce": (lambda s, y: s.reduce("sum", mirror.PerReplica([y, y]), axis=0), "value"),
    "gather": (lambda s, y: s.gather(mirror.PerReplica([y, y]), axis=0), "value"),
    "gather unequal lengths": (lambda s, y: s.gather(mirror.PerReplica([y, y[:2]])), "value"),
    "Variable": (lambda s, y: mirror.Variable(y, name="v"), "'v'"),
    "Variable, list": (lambda s, y: mirror.Variable(y.tolist(), name="v"), "'v'"),
    "Variable, function": (lambda s, y: mirror.Variable(lambda: y, name="v"), "'v'"),
    "assign": (lambda s, y: counts(s).assign(y), "'v'"),
    "assign a number": (lambda s, y: counts(s).assign(int(y.max())), "'v'"),
    "assign_add": (lambda s, y: counts(s).assign_add(y), "'v'"),
    "assign on read": (
        lambda s, y: counts(s, synchronization="on_read", aggregation="sum").assign(y),
        "'v'",
    ),
    "item assignment": (lambda s, y: counts(s).__setitem__(..., y), "'v'"),
    "a number per replica": (
        lambda s, y: s.distribute_values_from_function(lambda _: int(y.max())),
        "fn(replica 0)",
    ),
    "init": (lambda s, y: s.init(identity, y), "identity"),
    "add_n": (lambda s, y: mirror.add_n([y, y]), "add_n"),
    "broadcast": (lambda s, y: mirror.AllReduce().broadcast(y, s.devices), "value"),
    "reduce of the collectives": (
        lambda s, y: mirror.AllReduce().reduce("max", mirror.PerReplica([y, y])),
        "value",
    ),
    "DataParallel": (lambda s, y: mirror.DataParallel(Scale(), [0, 1])(y), "Array 0"),
}
FIT_NEITHER = {
    "int64": np.array([0, 1, 2, LARGE], np.int64),
    "negative": np.array([-LARGE, 1, 2, 3], np.int64),
    "uint64": np.array([0, 1, 2, LARGE], np.uint64),
}


@rows("place", list(PLACES))
def test_integers_that_do_not_fit_are_errors(two, place):
    call, name = PLACES[place]
    value = FIT_NEITHER["int64"]
    with raises(ValueError, names=name, values=[LARGE, "int32"], fix=FIX):
        call(two, value)


@rows("kind", list(FIT_NEITHER))
def test_each_type_of_64_bits(two, kind):
    value = FIT_NEITHER[kind]
    worst = -LARGE if kind == "negative" else LARGE
    narrow = "uint32" if kind == "uint64" else "int32"
    with raises(ValueError, names="x", values=[worst, f"{value.dtype}[4]", narrow], fix=FIX):
        two.run(identity, (value,))


@rows("dtype", ["int64", "uint64", "int32", "uint32", "int8", "bool"])
def test_integers_that_fit_arrive_unchanged(two, dtype):
    """The extremes of the narrower type, too."""
    narrow = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    limits = (0, 1) if dtype == "bool" else (np.iinfo(narrow).min, np.iinfo(narrow).max)
    value = np.array([*limits, 0, 1]).astype(dtype)
    (batch,) = two.distribute_dataset([value])
    np.testing.assert_array_equal(np.asarray(batch).reshape(-1), value)
    assert batch.dtype == narrow


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_floats_are_rounded_as_by_jax(two, dtype):
    value = np.array([0.1, 1e30, 2.0**40, -0.1], dtype)
    (batch,) = two.distribute_dataset([value])
    np.testing.assert_array_equal(np.asarray(batch).reshape(-1), jax.numpy.asarray(value))


def test_variables_of_64_bits_take_what_fits():
    assert mirror.Variable(np.arange(3, dtype=np.int64)).dtype == np.int32
    assert float(mirror.Variable(LARGE, dtype="float32")[...]) == np.float32(LARGE)
    assert int(mirror.Variable(2**32 - 1, dtype="uint32")[...]) == 2**32 - 1


def test_empty_arrays_fit(two):
    assert two.run(identity, (np.ones((0, 3), np.int64),)).shape == (0, 3)


def test_64_bits_are_kept_where_they_are_enabled(two):
    with jax.enable_x64(True):
        (batch,) = two.distribute_dataset([FIT_NEITHER["int64"]], prefetch=0)
        np.testing.assert_array_equal(np.asarray(batch).reshape(-1), FIT_NEITHER["int64"])
