"""`Trainer(micro_batch=...)`: pieces that fit into a memory, with the results of whole batches."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy

SIZE, WIDTH = 44, 128  # 22 examples for each of two replicas
X = np.random.RandomState(0).randn(SIZE, 64).astype(np.float32)
Y = (np.arange(SIZE) % 3).astype(np.int32)
CLOSE = {"rtol": 2e-5, "atol": 1e-6}  # pieces are added up in another order


class Net(nnx.Module):
    """Needs more memory for each example than for its parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(1, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.sin(self.inner(x[..., None])).mean(axis=1))


def a_trainer(n: int = 2, loss="sparse_categorical_crossentropy", **options) -> mirror.Trainer:
    with cpu_strategy(n).scope():
        return mirror.Trainer(Net(nnx.Rngs(0)), optax.adam(0.1), loss, **options)


def fit(trainer: mirror.Trainer, batch_size: int = SIZE, epochs: int = 2) -> mirror.History:
    options = {"batch_size": batch_size, "shuffle": False, "progress": False}
    return trainer.fit((X, Y), epochs, **options)


def chosen(limit: int, caplog, **options) -> tuple[mirror.Trainer, mirror.History]:
    trainer = a_trainer(micro_batch="auto", memory_limit=limit, **options)
    caplog.clear()
    return trainer, fit(trainer)


def peak(pieces: int) -> int:
    """Returns the estimated bytes per device of a step with a number of pieces."""
    trainer = a_trainer(accumulate_steps=pieces)
    return inside.memory_of_step(trainer, (X, Y))


def test_largest_micro_batch_that_fits_is_chosen(subtests, caplog):
    caplog.set_level(logging.INFO, "mirror")
    whole = a_trainer()
    expected = fit(whole)
    peaks = {pieces: peak(pieces) for pieces in (1, 2, 3, 4)}
    assert peaks[1] > 1.5 * peaks[2] > peaks[3] > peaks[4]
    for pieces, size in {1: 22, 2: 11, 3: 8, 4: 6}.items():
        with subtests.test(msg=f"{pieces} pieces"):
            trainer, history = chosen(peaks[pieces], caplog)
            assert trainer.accumulate_steps == pieces
            assert f"{size} examples per replica at a time" in caplog.text
            np.testing.assert_allclose(history["loss"], expected["loss"], **CLOSE)
            states = [jax.tree.leaves(nnx.state(t.model)) for t in (trainer, whole)]
            for one, other in zip(*states, strict=True):
                np.testing.assert_allclose(one, other, **CLOSE)
    with subtests.test(msg="one byte less"):
        assert chosen(peaks[2] - 1, caplog)[0].accumulate_steps == 3


def test_estimate_is_made_once_for_batches_of_a_shape(caplog):
    caplog.set_level(logging.INFO, "mirror")
    trainer, _ = chosen(peak(2), caplog)
    assert caplog.text.count("at a time") == 1
    fit(trainer)
    assert caplog.text.count("at a time") == 1
    fit(trainer, SIZE // 2)
    assert caplog.text.count("at a time") == 2
    assert trainer.accumulate_steps == 1


def test_groups_and_iterators_are_estimated_without_losing_a_batch(caplog):
    trainer = a_trainer(micro_batch="auto", memory_limit=2**40, steps_per_execution=2)
    batches = [(X[i : i + 11], Y[i : i + 11]) for i in range(0, SIZE, 11)]
    history = trainer.fit(iter(batches), progress=False)
    straight = a_trainer()
    np.testing.assert_allclose(
        history["loss"], straight.fit(batches, progress=False)["loss"], **CLOSE
    )


def test_number_of_examples_chooses_the_pieces():
    trainer = a_trainer(micro_batch=8)
    fit(trainer)
    assert trainer.accumulate_steps == 3
    expected = fit(a_trainer(accumulate_steps=3))
    assert fit(a_trainer(micro_batch=8))["loss"] == expected["loss"]


def test_step_that_never_fits_is_an_error():
    with raises(ValueError, names="one example at a time", values="1.0 KiB"):
        fit(a_trainer(micro_batch="auto", memory_limit=1024))


def test_loss_across_examples_is_an_error():
    def loss_fn(model, batch):
        logits = model(batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits - logits.mean(0), batch[1])

    with raises(ValueError, names=["loss_fn", "micro_batch"], fix="Omit micro_batch"):
        fit(a_trainer(loss=loss_fn, micro_batch=11))


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({"micro_batch": "auto"}, ValueError, ["memory_limit", "CPU"]),
        ({"micro_batch": "auto", "memory_limit": 0}, ValueError, ["memory_limit", "0"]),
        ({"micro_batch": "auto", "memory_limit": 1.5}, TypeError, ["memory_limit", "1.5"]),
        ({"micro_batch": 0}, ValueError, ["micro_batch", "0", '"auto"']),
        ({"micro_batch": "largest"}, TypeError, ["micro_batch", "'largest'", '"auto"']),
        ({"micro_batch": 4, "memory_limit": 8}, ValueError, ["memory_limit", '"auto"']),
        ({"memory_limit": 8}, TypeError, ["micro_batch"]),
        ({"micro_batch": 4, "accumulate_steps": 2}, ValueError, ["accumulate_steps"]),
    ],
)
def test_bad_arguments_are_named(options, error, parts):
    with raises(error, names=parts):
        a_trainer(**options)
