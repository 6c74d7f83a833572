"""`Trainer(require_equal=True)`: trains only if every step is proved to equal one device."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support.messages import assert_message, raises
from tests.support.strategies import cpu_strategy, each_executor
from tests.support.tables import rows

SIZE, NUM_CLASSES, AXIS = 21, 4, mirror.REPLICA_AXIS
RNG = np.random.RandomState(0)
X = RNG.randn(SIZE, 6).astype(np.float32)
Y = RNG.randint(0, NUM_CLASSES, SIZE)


class Net(nnx.Module):
    def __init__(self, rngs, rate=0.0, norm=False, axis_name=AXIS):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name=axis_name, rngs=rngs) if norm else lambda h: h
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(8, NUM_CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def losses(model, batch):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y)


def with_accuracy(model, batch):
    x, y = batch
    logits = model(x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return losses, {"accuracy": jnp.argmax(logits, -1) == y}


def noisy(model, batch):
    x, y = batch
    keys = mirror.example_keys(jax.random.key(0), x)
    return losses(model, (x + jax.vmap(lambda key: jax.random.normal(key, (6,)))(keys), y))


def weighted(model, batch):
    return mirror.Weighted(losses(model, batch), (batch[1] > 0).astype(np.float32))


def weighted_by_integers(model, batch):
    x, y = batch
    counts = y + 300
    accuracy = mirror.Weighted((jnp.argmax(model(x), -1) == y) * counts, counts)
    return mirror.Weighted(losses(model, batch) * counts, counts), {"accuracy": accuracy}


def by_its_own_sum(model, batch):
    found = losses(model, batch)
    return found**2 / jnp.where(mirror.example_mask(found), found, 0).sum()


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
EQUAL = {
    "losses": (losses, {}),
    "metrics": (with_accuracy, {}),
    "weighted": (weighted, {}),
    "weighted by integers": (weighted_by_integers, {}),
    "clipped": (losses, {"tx": CLIPPED}),
    "noise": (noisy, {}),
    "pieces": (with_accuracy, {"accumulate_steps": 2}),
    "noise in pieces": (noisy, {"accumulate_steps": 2}),
    "statistics of all": (losses, {"norm": True}),
    "groups": (losses, {"steps_per_execution": 2}),
    "half precision": (losses, {"precision": "bfloat16"}),
    "loss scale": (losses, {"precision": "float16"}),
    "class weights": (
        losses,
        {"class_weight": {0: 2.0}, "labels": lambda batch: batch[1], "num_classes": NUM_CLASSES},
    ),
    "penalty": (losses, {"penalty": lambda model: jnp.sum(model.last.kernel[...] ** 2)}),
    "named": ("sparse_categorical_crossentropy", {"metrics": ["accuracy"]}),
}


def active(model, batch, where=None):
    hidden = nnx.relu(model.first(batch[0]))
    return losses(model, batch) + 0.1 * jnp.mean(jnp.abs(hidden), where=where)


def active_examples(model, batch):
    return active(model, batch, mirror.example_mask(batch)[:, None])


def normalized_examples(model, batch):
    x, y = batch
    hidden = model.norm(model.first(x), mask=mirror.example_mask(batch)[:, None])
    return optax.softmax_cross_entropy_with_integer_labels(model.last(hidden), y)


# Equal without padding, or with a mask that is summed on each replica: not proved for all masks.
MASKED = {
    "activity": (active, {"drop": True}),
    "activity of examples": (active_examples, {}),
    "statistics of examples": (normalized_examples, {"norm": True}),
}


def trained(
    strategy,
    loss_fn,
    *,
    rate=0.0,
    norm=False,
    drop=False,
    tx=None,
    axis_name=AXIS,
    equal=True,
    **options,
):
    with strategy.scope():
        model = Net(nnx.Rngs(0), rate, norm, axis_name)
        tx = optax.adam(1e-3) if tx is None else tx
        trainer = mirror.Trainer(model, tx, loss_fn, require_equal=equal, **options)
    data = mirror.data.from_arrays((X, Y), batch_size=8, drop_remainder=norm or drop)
    return trainer.fit(data, epochs=1, progress=False)


@pytest.mark.filterwarnings("ignore:The per-example losses")
@rows("name", list(EQUAL))
def test_what_a_trainer_adds_is_proved(name, two):
    loss_fn, options = EQUAL[name]
    assert trained(two, loss_fn, **options)["loss"]


@pytest.mark.slow
@rows("strategy", each_executor)
def test_every_executor_trains(strategy):
    assert trained(strategy, losses)["loss"]


@pytest.mark.filterwarnings("ignore:The batch normalization")
def test_steps_that_differ_do_not_run(two):
    with raises(ValueError, names=["require_equal=True", "test_require_equal.py"]):
        trained(two, by_its_own_sum)
    with raises(ValueError, names="test_require_equal.py", fix="mirror.example_keys(key, batch)"):
        trained(two, losses, rate=0.5)
    with raises(ValueError, names="psum", values="test_require_equal.py"):
        trained(two, losses, norm=True, accumulate_steps=2)  # statistics of a piece


@rows("name", list(EQUAL | MASKED))
def test_trainers_do_not_warn_of_equal_steps(name, two):
    loss_fn, options = (EQUAL | MASKED)[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(two, loss_fn, equal=None, rate=0.5 * (loss_fn is losses), **options)
    assert not [each for each in caught if "one device" in str(each.message)]


def test_trainers_warn_once_of_steps_that_differ(two):
    for loss_fn, options, fixes in (
        (by_its_own_sum, {}, "require_equal=False"),
        (losses, {"norm": True, "axis_name": None}, ["axis_name=", "require_equal=False"]),
    ):
        with pytest.warns(UserWarning, match="one device") as caught:
            trained(two, loss_fn, equal=None, **options)
        (message,) = [str(each.message) for each in caught]
        assert_message(message, names=["train_step", "model.", "test_require_equal.py"], fix=fixes)
        assert trained(two, loss_fn, equal=False, **options)["loss"]


def test_one_replica_always_trains():
    assert trained(cpu_strategy(1), losses, rate=0.5)["loss"]


def test_the_argument_is_a_bool(two):
    with two.scope(), raises(TypeError, names="require_equal", values="'yes'"):
        mirror.Trainer(Net(nnx.Rngs(0)), optax.sgd(0.1), losses, require_equal="yes")
