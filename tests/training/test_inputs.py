"""In-memory arrays as the data of a `Trainer`: batches, validation, resuming and messages."""
# ruff: noqa: E501 (arguments and their message are one row)

import itertools
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.messages import assert_message, raises
from tests.support.packages import optional
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_slow, rows
from tests.support.training import fit

torch: Any = optional("torch")

N = 10
X = np.random.RandomState(0).randn(N, 3).astype(np.float32)
Y = (X @ [1.0, -2.0, 0.5]).astype(np.float32)


class Line(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.zeros(3))

    def __call__(self, x):
        return x @ self.w


def inputs_of(batch):
    """Returns inputs and labels of a dict, a tuple, or an array of both."""
    if isinstance(batch, dict):
        return batch["x"], batch["y"]
    return batch if isinstance(batch, tuple) else (batch[:, :3], batch[:, 3])


def squares(model, batch):
    x, y = inputs_of(batch)
    return (model(x) - y) ** 2


def new(n=2, loss_fn=squares, **options):
    return mirror.Trainer(Line(), optax.sgd(0.05), loss_fn, strategy=cpu_strategy(n), **options)


KINDS = {
    "dict": {"x": X, "y": Y},
    "tuple": (X, Y),
    "array": np.c_[X, Y],
    "jax": (jnp.asarray(X), jnp.asarray(Y)),
    "torch": torch and (torch.from_numpy(X), torch.from_numpy(Y)),
}


def weights(trainer):
    return np.asarray(trainer.model.w[...])


@pytest.mark.parametrize(
    "kind",
    [
        "tuple",
        pytest.param("dict", marks=pytest.mark.slow),
        pytest.param("array", marks=pytest.mark.slow),
        pytest.param("jax", marks=pytest.mark.slow),
        pytest.param("torch", marks=pytest.mark.dev("torch")),
    ],
)
def test_arrays_train_like_from_arrays(kind):
    """Bitwise: it is the same dataset."""
    arrays = KINDS[kind]
    ours, by_hand = new(), new()
    history = fit(ours, arrays, 3, batch_size=4)
    wanted = fit(by_hand, mirror.data.from_arrays(arrays, 4, shuffle=True), 3)
    assert history["loss"] == wanted["loss"]
    np.testing.assert_array_equal(weights(ours), weights(by_hand))
    plain = mirror.data.from_arrays(arrays, 4)
    assert ours.evaluate(arrays, batch_size=4) == by_hand.evaluate(plain)
    rows = ours.predict(arrays, lambda model, batch: model(inputs_of(batch)[0]), batch_size=4)
    np.testing.assert_allclose(rows, X @ weights(ours), rtol=1e-4, atol=1e-6)
    assert ours.verify(arrays, batch_size=4).largest < 1e-5


@pytest.mark.parametrize(
    "rows",
    mostly_slow([{"shuffle": False}, {"seed": 7}, {"shuffle": True, "seed": 3}], {"seed": 7}),
)
def test_options_are_those_of_from_arrays(subtests, rows):
    for options in rows:
        with subtests.test(msg=str(options)):
            ours, by_hand = new(), new()
            fit(ours, (X, Y), 2, batch_size=4, **options)
            fit(by_hand, mirror.data.from_arrays((X, Y), 4, **{"shuffle": True, **options}), 2)
            np.testing.assert_array_equal(weights(ours), weights(by_hand))


@pytest.mark.parametrize(
    "rows", mostly_slow([(0.2, 2), (0.25, 3), (0.01, 1), (0.75, 8)], (0.25, 3))
)
def test_validation_split_holds_out_the_last_examples(subtests, rows):
    """As in Keras: the number that `floor(n * (1 - fraction))` leaves, before shuffling."""
    for fraction, held_out in rows:
        with subtests.test(msg=str(fraction)):
            ours, by_hand = new(), new()
            history = fit(ours, (X, Y), 2, batch_size=4, validation_split=fraction)
            end = N - held_out
            wanted = fit(
                by_hand, (X[:end], Y[:end]), 2, batch_size=4, validation_data=(X[end:], Y[end:])
            )
            assert dict(history) == dict(wanted)
            assert history["val_loss"][-1] == pytest.approx(
                np.mean((X[end:] @ weights(ours) - Y[end:]) ** 2), rel=1e-5
            )


def test_validation_data_may_be_a_dataset():
    data = mirror.data.from_arrays((X, Y), 3)
    history = fit(new(), (X, Y), 1, batch_size=4, validation_data=data)
    wanted = fit(new(), (X, Y), 1, batch_size=4, validation_data=(X, Y))
    assert history["val_loss"] == pytest.approx(wanted["val_loss"], rel=1e-5)


@pytest.mark.parametrize("rows", mostly_slow([1, 2, 4, 5], 2))
def test_training_resumes_within_a_shuffled_epoch(subtests, rows):
    """After a stop, a second `fit` with the same arrays sees exactly the remaining examples."""
    for stop_at in rows:
        with subtests.test(msg=str(stop_at)):
            check_training_resumes_within_a_shuffled_epoch(stop_at)


def check_training_resumes_within_a_shuffled_epoch(stop_at):

    class Interrupt(mirror.callbacks.Callback):
        def on_step(self, fit):
            if fit.position.step == stop_at:
                raise KeyError("interrupted")

    whole, parts = new(), new()
    wanted = fit(whole, (X, Y), 3, batch_size=4)
    with pytest.raises(KeyError, match="interrupted"):
        fit(parts, (X, Y), 3, batch_size=4, callbacks=Interrupt())
    history = fit(parts, (X, Y), 3, batch_size=4)
    assert history["loss"] == wanted["loss"]
    np.testing.assert_array_equal(weights(parts), weights(whole))


def test_a_tuple_of_batches_is_a_dataset():
    batches = tuple({"x": X[i : i + 5], "y": Y[i : i + 5]} for i in (0, 5))
    ours, by_hand = new(), new()
    fit(ours, batches)
    fit(by_hand, list(batches))
    np.testing.assert_array_equal(weights(ours), weights(by_hand))


def test_nested_arrays_need_only_a_batch_size():
    def nested(model, batch):
        features, y = batch
        return (model(features["x"]) - y) ** 2

    history = fit(new(loss_fn=nested), ({"x": X}, Y), 2, batch_size=4)
    assert history["loss"] == fit(new(), (X, Y), 2, batch_size=4)["loss"]


DATASET = mirror.data.from_arrays((X, Y), 5)
PAIR = ["tuple", "float32[10,3]", "float32[10]"]
BAD = {
    # data, options, error, values and the fix in its message
    "no batch size": ((X, Y), {}, ValueError, PAIR, "trainer.fit(data, batch_size=32)"),
    "no batch size, dict": ({"x": X, "y": Y}, {}, ValueError, ["'x': float32[10,3]"], "batch_size=32"),
    "no batch size, array": (X, {}, ValueError, ["float32[10,3]"], "batch_size=32"),
    "batch size 0": ((X, Y), {"batch_size": 0}, ValueError, ["batch_size", 0], ()),
    "batch size 0.5": ((X, Y), {"batch_size": 0.5}, TypeError, ["batch_size", 0.5], ()),
    "lengths": ((X, Y[:9]), {"batch_size": 4}, ValueError, ["data[0]", "data[1]", "float32[9]"], ()),
    "labels in a list": ((X, Y.tolist()), {"batch_size": 4}, ValueError, ["data[1][0]"], "np.asarray(list)"),
    "no rows": ((X[:0], Y[:0]), {"batch_size": 4}, ValueError, ["data[0]", "float32[0,3]"], ()),
    "from_arrays": (DATASET, {"batch_size": 4}, ValueError, ["batch_size=4", "batch_size=5"], "mirror.data.from_arrays"),
    "list of arrays": ([X, Y], {"batch_size": 4}, ValueError, ["batch_size=4", "a list of 2 batches"], "(x, y)"),
    "batches": ([(X, Y)], {"batch_size": 4}, ValueError, ["batch_size=4"], "trainer.fit((x, y), batch_size=32)"),
    "generator": (((X, Y) for _ in range(1)), {"batch_size": 4}, ValueError, ["batch_size=4", "generator"], ()),
    "seed": ([(X, Y)], {"seed": 0}, ValueError, ["seed=0"], "trainer.fit((x, y), batch_size=32)"),
    "shuffle": ([(X, Y)], {"shuffle": False}, ValueError, ["shuffle=False"], ()),
    "shuffle of batches": ((X, Y), {"batch_size": 4, "shuffle": "batch"}, TypeError, ["shuffle", "'batch' (str)"], ()),
    "split of batches": ([(X, Y)], {"validation_split": 0.5}, ValueError, ["validation_split=0.5"], ()),
    "split of 1": ((X, Y), {"batch_size": 4, "validation_split": 1}, ValueError, ["validation_split", 1], "validation_split=0.2"),
    "split of -1": ((X, Y), {"batch_size": 4, "validation_split": -0.1}, ValueError, ["validation_split", -0.1], ()),
    "split of text": ((X, Y), {"batch_size": 4, "validation_split": "0.1"}, TypeError, ["validation_split", "'0.1' (str)"], ()),
    "split of all": ((X, Y), {"batch_size": 4, "validation_split": 0.95}, ValueError, ["validation_split=0.95", 10, 0], ()),
    "split and data": ((X, Y), {"batch_size": 4, "validation_split": 0.5, "validation_data": (X, Y)}, ValueError, ["validation_split=0.5", "validation_data"], ()),
    "validation arrays": ([(X, Y)], {"validation_data": (X, Y)}, ValueError, ["validation_data", "float32[10,3]"], "mirror.data.from_arrays(validation_data, batch_size=32)"),
    "validation lengths": ((X, Y), {"batch_size": 4, "validation_data": (X, Y[:3])}, ValueError, ["validation_data[0]", "validation_data[1]", "float32[3]"], ()),
    "validation_steps alone": ([(X, Y)], {"validation_steps": 2}, ValueError, ["validation_steps=2"], "validation_data="),
    "no validation_steps": ([(X, Y)], {"validation_data": [(X, Y)], "validation_steps": 0}, ValueError, ["validation_steps", 0], ()),
    "validation_steps of text": ([(X, Y)], {"validation_data": [(X, Y)], "validation_steps": "2"}, TypeError, ["validation_steps", "'2' (str)"], ()),
    "splits": ({"train": [(X, Y)], "test": [(X, Y)]}, {}, TypeError, ["dict"], "['train']"),
}  # fmt: skip


def test_wrong_data_are_rejected_before_the_first_step(subtests):
    for name in BAD:
        with subtests.test(msg=name):
            data, options, kind, values, fix = BAD[name]
            trainer = new()
            with raises(kind, values=values, fix=fix):
                fit(trainer, data, 2, **options)
            assert not weights(trainer).any()


def test_other_methods_name_their_line(subtests):
    for method in ["evaluate", "predict", "verify"]:
        with subtests.test(msg=method):
            check_other_methods_name_their_line(method)


def check_other_methods_name_their_line(method):
    trainer = new()
    call = getattr(trainer, method)
    with raises(ValueError, values=PAIR, fix=f"trainer.{method}("):
        call((X, Y))
    with raises(ValueError, values=["batch_size=4", "batch_size=5"]):
        call(DATASET, batch_size=4)


# Data without an end


class Endless:
    """Batches without an end and without a length; a mistake in `fit` must not hang the tests."""

    num_read = 0

    def __iter__(self):
        for _ in range(2000):
            self.num_read += 1
            yield X, Y
        pytest.fail("read 2000 batches")


class SaysSo(Endless):
    def __len__(self):
        raise TypeError("The dataset is infinite.")  # tf.data.Dataset.repeat()


class Longest(Endless):
    def __len__(self):
        return sys.maxsize  # grain.MapDataset.repeat()


ENDLESS = {
    "cycle": lambda: itertools.cycle([(X, Y)]),
    "repeat": lambda: itertools.repeat((X, Y)),
    "TensorFlow": SaysSo,
    "Grain": Longest,
    "distributed": lambda: cpu_strategy(2).distribute_dataset(itertools.cycle([(X, Y)])),
}


@rows("make", ENDLESS)
def test_data_that_repeats_forever_must_be_limited(make):
    trainer = new()
    with raises(ValueError, names="validation_data", fix="trainer.fit(..., validation_steps="):
        fit(trainer, [(X, Y)], validation_data=make())
    with raises(ValueError, names="data", fix="trainer.fit(..., steps_per_epoch="):
        fit(trainer, make())
    assert not weights(trainer).any()
    with raises(ValueError, names="data", fix="trainer.evaluate(itertools.islice(data"):
        trainer.evaluate(make())
    with raises(ValueError, names="data", fix="trainer.predict(itertools.islice(data"):
        trainer.predict(make(), lambda model, batch: model(batch[0]))


@rows("make", {**ENDLESS, "unknown": Endless, "generator": lambda: iter(Endless())})
def test_validation_steps_limit_data_without_an_end(make):
    trainer, other = new(), new()
    data = make()
    history = fit(trainer, [(X, Y)], validation_data=data, validation_steps=3)
    expected = fit(other, [(X, Y)], validation_data=[(X, Y)])
    np.testing.assert_allclose(history["val_loss"], expected["val_loss"], rtol=1e-6)


def test_validation_steps_are_the_first_batches_of_data_and_the_next_ones_of_an_iterator():
    arrays = [np.full((4, 1), i, np.float32) for i in range(6)]
    loss = lambda model, batch: 0 * model(batch[:, :1] * X[:1]) + batch[:, 0]  # noqa: E731
    data = {"list": arrays, "iterator": iter(arrays), "short": arrays[:1]}
    losses = {
        name: fit(new(loss_fn=loss), [arrays[0]], 3, validation_data=each, validation_steps=2)
        for name, each in data.items()
    }
    assert losses["list"]["val_loss"] == [0.5, 0.5, 0.5]
    assert losses["iterator"]["val_loss"] == [0.5, 2.5, 4.5]
    assert losses["short"]["val_loss"] == [0, 0, 0]


@rows("group", [1, 3])
def test_second_fit_continues_an_iterator_where_the_first_has_ended(group):
    """Batches that the first had loaded ahead were lost."""
    arrays = [np.full((4, 1), i, np.float32) for i in range(10)]
    loss = lambda model, batch: 0 * model(batch[:, :1] * X[:1]) + batch[:, 0]  # noqa: E731
    trainer, data = new(loss_fn=loss, steps_per_execution=group), iter([arrays[0][:0], *arrays])
    assert fit(trainer, data, 2, steps_per_epoch=2)["loss"] == [0.5, 2.5]
    assert fit(trainer, data, 1, steps_per_epoch=4)["loss"] == [5.5]
    assert [batch[0, 0] for batch in data] == [8, 9]


def test_validation_that_is_suspiciously_long_warns_once():
    class Long(Endless):
        def __iter__(self):
            return itertools.islice(super().__iter__(), 256)

    class Counted(Long):
        def __len__(self):
            return 256

    trainer = new()
    fit(trainer, [(X, Y)] * 26, validation_data=Long())
    fit(trainer, [(X, Y)], validation_data=Long(), validation_steps=256)
    fit(trainer, [(X, Y)], validation_data=Counted())
    with pytest.warns(UserWarning, match="validation_steps") as caught:
        fit(trainer, [(X, Y)], 2, validation_data=Long())
    (warning,) = caught
    fix = "trainer.fit(..., validation_steps="
    assert_message(str(warning.message), names="validation_data", values=[256, 1], fix=fix)


def test_validation_that_begins_again_is_an_error_after_the_warning():
    class Again(Endless):
        def __iter__(self):
            batches = [(X + i, Y) for i in range(50)]
            return itertools.chain.from_iterable(itertools.repeat(batches))

    with (
        pytest.warns(UserWarning, match="validation_steps"),
        raises(ValueError, names="validation_data", values=[301], fix="validation_steps="),
    ):
        fit(new(), [(X, Y)], validation_data=Again())


CALLS_OF_MANY_BATCHES = {
    "evaluate": lambda data: new().evaluate(data),
    "predict": lambda data: new().predict(data, lambda model, batch: model(batch[0])),
}


@pytest.mark.parametrize("method", CALLS_OF_MANY_BATCHES)
def test_many_batches_of_unknown_length_are_said(method, monkeypatch, capfd):
    """A generator without an end is read forever."""
    inside.expect_batches(3, monkeypatch)
    for data in ([(X, Y)] * 4, iter([(X, Y)] * 4), ((X, Y) for _ in range(2))):
        CALLS_OF_MANY_BATCHES[method](data)
        assert capfd.readouterr().err == ""
    CALLS_OF_MANY_BATCHES[method]((X, Y) for _ in range(4))
    fix = f"trainer.{method}(itertools.islice(data"
    assert_message(capfd.readouterr().err, names="`data`", values=3, fix=fix)
