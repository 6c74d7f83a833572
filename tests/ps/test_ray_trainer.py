"""`Trainer` with `ParameterServerStrategy`, on real processes."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.datasets import load_digits

import mirror
from tests.ps.digits import are_equal
from tests.ps.trained import (
    SMALL,
    create,
    data,
    fit,
    loss_fn,
    on_one_device,
    require_same,
    values,
)

pytestmark = [pytest.mark.slow, pytest.mark.dev("ray")]


@pytest.fixture
def strategy(on_ray):
    return on_ray


OF_TRAINER = {"sample_weight", "accumulate_steps", "loss", "penalty", "labels", "num_classes"}


def require_equal_to_one_device(strategy, *args, **options):
    of_trainer = {k: v for k, v in options.items() if k in OF_TRAINER}
    of_fit = {k: v for k, v in options.items() if k not in OF_TRAINER}
    trainer, other = create(strategy, *args, **of_trainer), on_one_device(*args, **of_trainer)
    fit(trainer, **of_fit)
    fit(other, **of_fit)
    require_same(trainer, other)
    return trainer


@pytest.mark.parametrize("name", ["momentum"])
def test_synchronous_training_equals_one_device(strategy, name):
    validation = data(10, seed=1)
    trainer = require_equal_to_one_device(strategy, name, validation_data=validation)
    assert "val_accuracy" in trainer._position.history
    assert repr(trainer).count("ParameterServerStrategy(2 replicas)")


def test_check_of_padding_does_not_count_as_a_change(strategy, caplog):
    fit(create(strategy), epochs=2)
    assert "was changed in the main program" not in caplog.text


@pytest.mark.nightly
def test_numbers_of_servers_and_devices_do_not_matter(ray_cluster):
    options = {"ps": 3, "workers": 2, "devices_per_worker": 2}
    with mirror.ps.ParameterServerStrategy(**options, partitioner=SMALL) as strategy:
        require_equal_to_one_device(strategy)
        require_equal_to_one_device(strategy, data=data(7), batch_size=3)
        require_equal_to_one_device(strategy, accumulate_steps=2)


def weighted_loss(model, batch):
    losses, metrics = loss_fn(model, batch)
    return mirror.Weighted(losses * batch["weight"], batch["weight"]), metrics


def noisy_loss(model, batch):
    keys = mirror.example_keys(jax.random.key(0), batch)
    noise = jax.vmap(lambda key: jax.random.normal(key, batch["x"].shape[1:]))(keys)
    return loss_fn(model, {**batch, "x": batch["x"] + noise})


def penalty(model):
    return 1e-2 * sum((p**2).sum() for p in jax.tree.leaves(nnx.state(model, nnx.Param)))


NIGHTLY = [
    {"sample_weight": "weight"},
    {"loss": weighted_loss, "penalty": penalty},
    {"steps_per_epoch": 3, "epochs": 3},
    # The second part of a batch has no weight.
    {"loss": weighted_loss, "data": data(24) | {"weight": np.repeat(np.float32([1, 0]), 12)}},
]


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_steps": 2, "loss": weighted_loss},
        {"labels": "y", "num_classes": 8},
        {"loss": noisy_loss},
        *(pytest.param(options, marks=pytest.mark.nightly) for options in NIGHTLY),
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_options_equal_one_device(strategy, options):
    require_equal_to_one_device(strategy, **options)


def named(strategy, **options):
    return create(
        strategy, "sgd", loss="sparse_categorical_crossentropy", metrics=["accuracy"], **options
    )


def test_named_losses_equal_one_device_and_check_labels(strategy):
    trainer, other = named(strategy), named(mirror.OneDeviceStrategy("/cpu:0"))
    for each in (trainer, other):
        examples = data()
        pairs = examples["x"], examples["y"]
        fit(each, data=pairs)
        examples["y"][30] = 8
        with pytest.raises(ValueError, match=r"must be in \[0, 7\].*row 6 is 8"):
            fit(each, data=pairs, shuffle=False, epochs=3)
        examples["y"][30] = 7
        fit(each, data=pairs, shuffle=False, epochs=3)
    require_same(trainer, other)
    assert int(trainer.optimizer.step[...]) == trainer._position.step

    fresh = named(strategy)
    examples["y"][0] = 8
    with pytest.raises(ValueError, match=r"must be in \[0, 7\]"):
        fit(fresh, data=pairs)


@pytest.mark.nightly
def test_half_precision_is_that_of_one_device(strategy):
    def exact_loss(model, batch):
        logits = model(batch["x"]).astype(np.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    trainer = create(strategy, loss=exact_loss, precision="bfloat16")
    other = on_one_device(loss=exact_loss, precision="bfloat16")
    fit(trainer)
    fit(other)
    assert trainer.model.layers[0].kernel.dtype == np.float32
    require_same(trainer, other, 0.03)
    exact = on_one_device(loss=exact_loss)
    fit(exact)
    with pytest.raises(AssertionError):
        require_same(exact, trainer)
    with pytest.warns(UserWarning, match="losses of loss_fn are bfloat16"):
        fit(create(strategy, precision="bfloat16"))


def test_loss_without_gradients_is_a_warning(strategy):
    def constant(model, batch):
        return jax.lax.stop_gradient(model(batch["x"])[:, 0])

    with pytest.warns(UserWarning, match="gradients are 0"):
        fit(create(strategy, loss=constant))


def test_trainer_evaluates_and_predicts_after_training(strategy):
    trainer, other = create(strategy), on_one_device()
    for each in (trainer, other):
        fit(each)
    examples = data(30, seed=2)
    found = trainer.evaluate(examples, batch_size=8)
    assert found == pytest.approx(other.evaluate(examples, batch_size=8), abs=1e-5)

    def logits(model, batch):
        return model(batch["x"])

    found = trainer.predict(examples, logits, batch_size=8)
    np.testing.assert_allclose(found, other.predict(examples, logits, batch_size=8), atol=1e-4)
    assert "Linear" in str(trainer.summary(examples))


def test_verify_compares_with_one_device_and_changes_nothing(strategy):
    trainer = create(strategy)
    fit(trainer)
    before = values(trainer)
    report = trainer.verify(data(), batch_size=25)
    assert report.num_replicas == 2
    assert report.largest < 1e-5
    assert are_equal(values(trainer), before)

    def coupled(model, batch):
        logits = model(batch["x"] - batch["x"].mean(0))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    wrong = create(strategy, loss=coupled)
    before = values(wrong)
    with pytest.raises(mirror.VerifyError, match="layers"):
        wrong.verify(data(), batch_size=24)
    assert are_equal(values(wrong), before)


class Reader(mirror.callbacks.Callback):
    """Reads the model in every hook."""

    def __init__(self):
        self.steps, self.epochs, self.counts = [], [], []

    def on_step(self, fit):
        self.steps.append(np.array(fit.trainer.model.layers[1].bias[...]))
        self.counts.append(int(fit.trainer.optimizer.step[...]) - fit.position.step)

    def on_epoch_end(self, fit, logs):
        self.epochs.append(np.array(fit.trainer.model.layers[1].bias[...]))
        logs["own"] = fit.trainer.evaluate(data(10, seed=3), batch_size=5)["loss"]


def test_callbacks_read_the_model_as_it_is(strategy):
    readers = Reader(), Reader()
    trainer, other = create(strategy), on_one_device()
    for each, reader in zip((trainer, other), readers, strict=True):
        fit(each, callbacks=reader)
    assert readers[0].counts == [0] * 8
    np.testing.assert_allclose(readers[0].steps, readers[1].steps, atol=1e-5)
    np.testing.assert_allclose(readers[0].epochs, readers[1].epochs, atol=1e-5)
    require_same(trainer, other)


class Slower(mirror.callbacks.Callback):
    """Changes the learning rate during an epoch."""

    def on_step(self, fit):
        if fit.position.step == 5:
            rate = fit.trainer.optimizer.opt_state.hyperparams["learning_rate"]
            rate[...] = rate[...] / 10


def test_callbacks_may_change_the_optimizer(strategy):
    tx = optax.inject_hyperparams(optax.sgd)(0.5)
    require_equal_to_one_device(strategy, tx, callbacks=Slower())


@pytest.mark.nightly
def test_two_trainers_take_turns(strategy):
    trainers = create(strategy, "adam"), create(strategy, "momentum", has_noise="norm")
    for epochs in (1, 2, 3):
        for trainer in trainers:
            fit(trainer, epochs=epochs, initial_epoch=epochs - 1)
    alone = create(strategy, "momentum", has_noise="norm")
    fit(alone, epochs=3)
    assert are_equal(values(alone), values(trainers[1]))
    other = on_one_device("adam")
    fit(other, epochs=3)
    assert int(trainers[0].optimizer.step[...]) == 12
    np.testing.assert_allclose(
        trainers[0].model.layers[0].kernel[...], other.model.layers[0].kernel[...], atol=1e-5
    )


@pytest.mark.nightly
def test_model_of_another_strategy_is_trained_further(strategy):
    first = create(mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]))
    fit(first)
    second = mirror.Trainer(first.model, first.optimizer, loss_fn, strategy=strategy)
    fit(second)
    third = mirror.Trainer(
        second.model, second.optimizer, loss_fn, strategy=mirror.OneDeviceStrategy("/cpu:1")
    )
    fit(third)
    other = on_one_device()
    for _ in range(3):
        fit(other)
    require_same(third, other)


def test_checkpoints_fit_other_strategies(strategy, tmp_path):
    """One epoch each, on two servers, with two replicas, on one server and one worker."""
    callback = mirror.callbacks.Checkpoint(tmp_path, every_steps=3, keep=None)
    fit(create(strategy), epochs=1, callbacks=callback)
    second = create(mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]))
    second.restore(tmp_path)
    fit(second, epochs=2, callbacks=mirror.callbacks.Checkpoint(tmp_path))
    with mirror.ps.ParameterServerStrategy(ps=1, workers=1) as other:
        third = create(other)
        third.restore(tmp_path)
        fit(third, epochs=3)
        # From the middle of the first epoch.
        fourth = create(other)
        fourth.restore(tmp_path, step=3)
        fit(fourth, epochs=3)
    undisturbed = on_one_device()
    fit(undisturbed, epochs=3)
    require_same(third, undisturbed)
    require_same(fourth, undisturbed)


@pytest.mark.nightly
def test_trainer_reads_its_model_after_the_strategy_was_closed(ray_cluster, tmp_path):
    with mirror.ps.ParameterServerStrategy(ps=1, workers=1) as strategy:
        trainer = create(strategy)
        fit(trainer)
    other = on_one_device()
    fit(other)
    require_same(trainer, other)
    found = trainer.evaluate(data(), batch_size=9)
    assert found == pytest.approx(other.evaluate(data(), batch_size=9), abs=1e-5)
    trainer.save(tmp_path)
    step, before = trainer._position.step, values(trainer)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="strategy has been closed"):
            fit(trainer)
        with pytest.raises(RuntimeError, match="strategy has been closed"):
            trainer.verify(data(), batch_size=24)
    assert are_equal(values(trainer), before)
    assert trainer._position.step == step


def digits():
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))  # the last ones are of other writers
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
    return {"x": x[:1437], "y": y[:1437]}, {"x": x[1437:], "y": y[1437:]}


@pytest.mark.nightly
@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_asynchronous_training_classifies_digits(ray_cluster, staleness):
    train, test = digits()
    found = []
    with mirror.ps.ParameterServerStrategy(ps=2, workers=2, staleness=staleness) as strategy:
        for seed in range(3):
            rngs = nnx.Rngs(seed)
            with strategy.scope():
                model = nnx.Sequential(
                    nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs)
                )
                trainer = mirror.Trainer(model, optax.adam(5e-3), loss_fn)
            history = trainer.fit(train, epochs=8, batch_size=48, seed=seed, progress=False)
            assert trainer._position.step == int(trainer.optimizer.step[...]) == 8 * 30
            assert len(history["loss"]) == 8
            found.append(trainer.evaluate(test, batch_size=360)["accuracy"])
        assert max(strategy.report().staleness) <= staleness
    assert np.median(found) >= 0.96
