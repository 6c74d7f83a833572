"""The gradient and the metrics of one device on the whole batch, for losses of every kind."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mirror
from tests.support.messages import assert_message, raises
from tests.support.strategies import EXECUTORS, ONE, cpu_strategy
from tests.support.tables import rows
from tests.support.training import fit

RNG = np.random.RandomState(0)
TOKENS = {
    "x": RNG.randn(8, 5, 3).astype(np.float32),
    "y": RNG.randint(0, 4, (8, 5)),
    "labeled": np.arange(5) < np.repeat([1, 5], 4)[:, None],  # one replica has five times as many
}


def context():
    return mirror.get_replica_context()


def centered(model, batch):
    """The logits of a replica depend on the logits of the others."""
    logits = model(batch["x"])
    logits = 3 * jnp.tanh(logits - context().all_reduce("mean", logits.mean((0, 1))))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    values = jnp.where(batch["labeled"], losses, 0).sum(-1)
    return mirror.Weighted(values, batch["labeled"].sum(-1))


def dice(model, batch):
    """Its weights depend on the parameters."""
    p = jax.nn.softmax(model(batch["x"]).mean(1))
    return mirror.Weighted((p[:, 0] - 1) ** 2 + p[:, 1], 0.5 + p[:, 2])


def linear():
    return nnx.Linear(3, 4, use_bias=False, rngs=nnx.Rngs(0))


def test_quotients_have_the_gradient_of_one_device(subtests):
    every, pair = {**EXECUTORS, **ONE}, {"two": lambda: cpu_strategy(2)}
    rows = {
        "centered": (centered, {}, every),
        "dice": (dice, {}, pair),
        "pieces": (dice, {"accumulate_steps": 2}, {**pair, **ONE}),
    }
    for name, (loss_fn, options, strategies) in rows.items():

        def quotient(kernel, loss_fn=loss_fn):
            model = linear()
            model.kernel[...] = kernel
            loss = loss_fn(model, TOKENS)
            return loss.values.sum() / loss.weights.sum()

        kernel = linear().kernel[...]
        wanted = kernel - 0.5 * jax.grad(quotient)(kernel)
        for where, strategy in strategies.items():
            with subtests.test(msg=f"{name} {where}"):
                trainer = mirror.Trainer(
                    linear(), optax.sgd(0.5), loss_fn, strategy=strategy(), **options
                )
                history = fit(trainer, [TOKENS])
                np.testing.assert_allclose(history["loss"], [quotient(kernel)], rtol=1e-5)
                np.testing.assert_allclose(trainer.model.kernel[...], wanted, rtol=2e-5)


def losses(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch["x"])[:, 0], batch["y"][:, 0]
    )


def contrastive(model, batch):
    features = model(batch["x"]).mean(1)
    return -jnp.diag(jax.nn.log_softmax(features @ features.T))


def of_hardest(model, batch):
    found = losses(model, batch)
    return jnp.full(found.shape, jax.lax.top_k(found, 2)[0].mean())


def of_all(model, batch):
    """The same with the examples of all replicas: any function of them."""
    found = mirror.all_gather(losses(model, batch))
    return jnp.full(batch["y"].shape[:1], jnp.sort(found)[-2:].mean())


OF_OTHER_ROWS = {
    "contrastive": contrastive,
    "hardest": of_hardest,
    "beside collectives": lambda m, b: (
        contrastive(m, b) + mirror.all_reduce("mean", losses(m, b).mean())
    ),
    "ranks": lambda m, b: losses(m, b) * jnp.argsort(jnp.argsort(losses(m, b))),
    "next row": lambda m, b: losses(m, b) * jnp.roll(losses(m, b), 1),
    "weights": lambda m, b: mirror.Weighted(
        losses(m, b), 1 / jnp.bincount(b["y"][:, 0], length=4)[b["y"][:, 0]]
    ),
}


def moved_by(change, reduce=jnp.mean):
    """The losses of rows that a function of their gradient changes."""

    def loss_fn(model, batch):
        x = batch["x"]
        g = jax.grad(lambda x: reduce(losses(model, {**batch, "x": x})))(x)
        return losses(model, {**batch, "x": x + change(g)})

    return loss_fn


def unit(g):
    return g / (jnp.linalg.norm(g, axis=(1, 2), keepdims=True) + 1e-8)


OF_ROW_COUNT = {
    "clipped": moved_by(lambda g: jnp.clip(3 * g, -0.1, 0.1)),
    "squashed": moved_by(lambda g: jnp.tanh(3 * g)),
    "almost one": moved_by(lambda g: g * (jnp.linalg.norm(g, axis=(1, 2), keepdims=True) + 1)),
}
OF_OWN_ROW = {
    "moved by the sign": moved_by(jnp.sign),
    "moved by a unit": moved_by(unit),
    "moved by a sum": moved_by(lambda g: jnp.clip(g, -0.1, 0.1), jnp.sum),
    "own": losses,
    "gathered": of_all,
    "sorted": lambda m, b: jnp.sort(losses(m, b)),
    "there and back": lambda m, b: losses(m, b)[::-1][::-1],
    "shifted logits": lambda m, b: jax.nn.log_softmax(m(b["x"]) - m(b["x"]).max())[:, 0, 0],
    "random": lambda m, b: losses(m, b) * jax.random.permutation(jax.random.key(0), 4),
}


def first_warnings(loss_fn, devices=2, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = cpu_strategy(devices)
        fit(
            mirror.Trainer(linear(), optax.sgd(0.5), loss_fn, strategy=strategy, **options),
            [TOKENS],
        )
    return [str(each.message) for each in caught]


@rows("name", list(OF_OTHER_ROWS))
def test_losses_that_look_across_the_rows_of_a_replica_are_a_warning(name):
    for options in ({}, {"steps_per_execution": 2}):
        (message,) = first_warnings(OF_OTHER_ROWS[name], **options)
        fix = ["mirror.all_gather(x)", "require_equal=False"]
        assert_message(message, names="test_whole_batch.py", fix=fix)
    assert first_warnings(OF_OTHER_ROWS[name], require_equal=False) == []


@rows("name", list(OF_ROW_COUNT))
def test_gradients_of_means_inside_a_loss_are_a_warning(name):
    for options in ({}, {"steps_per_execution": 2}):
        (message,) = first_warnings(OF_ROW_COUNT[name], **options)
        fix = ["jax.grad(lambda x: losses(x).sum())(x)", "require_equal=False"]
        assert_message(message, names="loss_fn", fix=fix)
    assert first_warnings(OF_ROW_COUNT[name], require_equal=False) == []


BY_ROW_NUMBER = {
    "temperature": lambda m, b: losses(m, b) / np.sqrt(len(b["x"])),
    "penalty": lambda m, b: losses(m, b) + len(b["x"]) / 64 * (m.kernel[...] ** 2).sum(),
}


@rows("name", list(BY_ROW_NUMBER))
def test_losses_that_compute_with_a_number_of_rows_are_a_warning(name):
    loss_fn = BY_ROW_NUMBER[name]
    for options in ({}, {"steps_per_execution": 2}):
        (message,) = first_warnings(loss_fn, **options)
        fix = ['mirror.all_reduce("sum", mask.sum())', "require_equal=False"]
        assert_message(message, names="test_whole_batch.py", fix=fix)
    (message,) = first_warnings(loss_fn, devices=1, accumulate_steps=2)
    assert_message(message, values="2 pieces", fix="require_equal=False")
    assert first_warnings(loss_fn, require_equal=False) == []


@rows("name", ["moved", *OF_ROW_COUNT])
def test_gradients_of_means_inside_a_loss_are_a_warning_with_pieces(name):
    loss_fn = {"moved": moved_by(lambda g: 3 * g), **OF_ROW_COUNT}[name]
    for options in ({"accumulate_steps": 2}, {"micro_batch": 4, "steps_per_execution": 2}):
        (message,) = first_warnings(loss_fn, devices=1, **options)
        fix = ["jax.grad(lambda x: losses(x).sum())(x)", "require_equal=False"]
        assert_message(message, names="loss_fn", values="2 pieces", fix=fix)
    assert first_warnings(loss_fn, devices=1, accumulate_steps=2, require_equal=False) == []


@rows("name", [name for name in OF_OWN_ROW if name.startswith(("moved", "own"))])
def test_losses_that_add_up_to_the_same_are_no_warning_with_pieces(name):
    assert first_warnings(OF_OWN_ROW[name], devices=1, accumulate_steps=2) == []
    assert first_warnings(OF_OWN_ROW[name], accumulate_steps=2) == []


@rows("name", list(OF_OWN_ROW))
def test_losses_that_add_up_to_the_same_are_no_warning(name):
    assert first_warnings(OF_OWN_ROW[name]) == []


EVALUATED = {  # and how many warnings it causes
    "losses": (lambda t: t.evaluate([TOKENS] * 2), 1),
    "ranks": (lambda t: t.predict([TOKENS], lambda m, b: jnp.argsort(losses(m, b))), 1),
    "centered": (lambda t: t.predict([TOKENS], lambda m, b: m(b["x"]) - m(b["x"]).mean(0)), 1),
    "both": (lambda t: (t.evaluate([TOKENS]), t.predict([TOKENS], of_hardest)), 2),
    "row counts": (lambda t: t.predict([TOKENS], OF_ROW_COUNT["squashed"]), 1),
    "moved": (lambda t: t.predict([TOKENS], moved_by(unit)), 0),
    "own rows": (lambda t: t.predict([TOKENS], lambda m, b: {"logits": m(b["x"])}), 0),
}


@rows("name", list(EVALUATED))
def test_results_that_look_across_the_rows_of_a_replica_are_a_warning(name):
    call, count = EVALUATED[name]
    for options, wanted in (({}, count), ({"require_equal": False}, 0)):
        strategy = cpu_strategy(2)
        trainer = mirror.Trainer(
            linear(), optax.sgd(0.5), contrastive, strategy=strategy, **options
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(trainer)
        words = "gradient of their mean" if name == "row counts" else "looks across"
        assert [words in str(each.message) for each in caught] == [True] * wanted


class Steps(mirror.callbacks.Callback):
    """Counts the steps."""

    count = 0

    def on_step(self, fit):
        self.count += 1


def test_padding_of_the_last_batch_is_rejected_before_the_first_step():
    seven = jax.tree.map(lambda a: a[:7], TOKENS)
    trainer = mirror.Trainer(linear(), optax.sgd(0.5), centered, strategy=cpu_strategy(2))
    steps = Steps()
    options = {"callbacks": steps, "progress": False}
    with raises(ValueError, names="centered", values=[3, 2], fix="drop_remainder=True"):
        trainer.fit(seven, batch_size=4, **options)
    assert steps.count == 0
    trainer.fit(mirror.data.from_arrays(seven, 4, drop_remainder=True), **options)
    trainer.fit(mirror.data.from_arrays(seven, 4), steps_per_epoch=1, **options)
    assert steps.count == 2


def test_masked_sums_are_not_divided_by_a_number_with_padding():
    def loss_fn(model, batch):
        values, mask = model(batch["x"]).sum((1, 2)), mirror.example_mask(batch)
        center = mirror.all_reduce("mean", jnp.where(mask, values, 0).mean())
        return (values - center) ** 2

    seven = jax.tree.map(lambda a: a[:7], TOKENS)
    trainer = mirror.Trainer(linear(), optax.sgd(0.5), loss_fn, strategy=cpu_strategy(2))
    with raises(ValueError, names=["loss_fn", "test_whole_batch.py"], values=7, fix="where=mask"):
        fit(trainer, [seven])


INTEGERS = {  # a value of 64 examples
    "bool": np.True_,
    "uint8": np.uint8(255),
    "int8": np.int8(-128),
    "uint16": np.uint16(65535),
    "int16": np.int16(-32768),
    "int32": np.int32(100_000_000),
    "negative": np.int32(-(2**31)),
    "uint32": np.uint32(3_000_000_000),
    "largest": np.uint32(2**32 - 1),
}


def test_integers_are_counted_exactly():
    """In evaluation and in training, in one launch of several steps, as values and as weights."""
    batch: dict[str, Any] = {name: np.full(64, value) for name, value in INTEGERS.items()}
    batch["int32"][1::2] += 1
    batch["x"] = np.arange(64, dtype=np.float32).reshape(64, 1) / 64

    def loss_fn(model, batch):
        losses = (model(batch["x"])[:, 0] - 1) ** 2
        metrics = {name: batch[name] for name in INTEGERS}
        metrics["over"] = mirror.Weighted(batch["uint32"], batch["int32"])
        return mirror.Weighted(losses * batch["int32"], batch["int32"]), metrics

    kernel = nnx.Linear(1, 1, rngs=nnx.Rngs(0)).kernel[...]
    wanted = {name: batch[name].astype(object).sum() / 64 for name in INTEGERS}
    wanted["over"] = 3e9 / 100_000_000.5
    for options in ({}, {"steps_per_execution": 2, "accumulate_steps": 2}):
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        trainer = mirror.Trainer(
            model, optax.sgd(0.5), loss_fn, strategy=cpu_strategy(2), **options
        )
        found = trainer.evaluate([batch, batch])
        loss = found.pop("loss")
        errors = (batch["x"] @ kernel)[:, 0] - 1
        np.testing.assert_allclose(loss, (errors**2).mean(), rtol=1e-5)
        assert found == wanted
        history = fit(trainer, [batch])
        assert {name: history[name][0] for name in wanted} == wanted
        gradient = (2 * errors * batch["x"][:, 0]).mean()
        np.testing.assert_allclose(model.kernel[...], kernel - 0.5 * gradient, rtol=1e-5)


class HalfFloats(mirror.CrossDeviceOps):
    def reduce_implementation(self, op, values):
        is_float = lambda x: np.issubdtype(x.dtype, np.floating)  # noqa: E731
        sent = (x.astype(np.float16).astype(x.dtype) if is_float(x) else x for x in values)
        return super().reduce_implementation(op, sent)


@rows(
    "size, ops",
    {
        "float32 has only even numbers": (2**17 + 1, mirror.AllReduce()),
        "the user's ops round floats": (4098, HalfFloats()),
    },
)
def test_integers_are_counted_exactly_where_floats_are_not(size, ops):
    """Small sums of integers are sent as floats, with the loss."""
    batch = {"x": np.zeros((size, 1), np.float32), "bytes": np.full(size, 255, np.uint8)}
    trainer = mirror.Trainer(
        nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        optax.sgd(0.5),
        lambda model, batch: (model(batch["x"])[:, 0], {"bytes": batch["bytes"]}),
        strategy=cpu_strategy(2, cross_device_ops=ops),
    )
    assert trainer.evaluate([batch])["bytes"] == 255
    assert fit(trainer, [batch])["bytes"] == [255]
