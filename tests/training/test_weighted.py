"""`mirror.Weighted`: sums over examples, divided by the summed weights of all replicas."""
# ruff: noqa: E501 (arguments and their message are one row)

import itertools
import json
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import Weighted
from tests.support import fresh, inside
from tests.support.messages import assert_message, raises
from tests.support.strategies import EXECUTORS, cpu_strategy
from tests.support.tables import mostly_slow
from tests.support.training import batches_of, fit

Objective, Sums = inside.objective().Objective, inside.objective().Sums
MetricAccumulator = inside.meter().MetricAccumulator
VOCABULARY, WIDTH, LENGTH, CLASSES = 7, 4, 5, 3
B, N = 12, 31  # the last batch has 7: no number of replicas divides it but 1
RNG = np.random.RandomState(0)
LENGTHS = RNG.randint(0, LENGTH + 1, N)
LENGTHS[:6] = 0  # so one of two replicas has no tokens at first, nor has one of two microbatches
DATA = {
    "inputs": RNG.randint(0, VOCABULARY, (N, LENGTH)),
    "targets": RNG.randint(0, VOCABULARY, (N, LENGTH)),
    "mask": np.arange(LENGTH) < LENGTHS[:, None],
    "weight": (RNG.randint(1, 5, N) / 2).astype(np.float32),
    "kind": RNG.randint(0, CLASSES, N),
}


def batches(size=B):
    return batches_of(DATA, size)


class Bigrams(nnx.Module):
    """Logits of the next token, from the one before."""

    def __init__(self):
        self.embedding = nnx.Param(np.random.RandomState(1).randn(VOCABULARY, WIDTH) / 2)
        self.kernel = nnx.Param(np.random.RandomState(2).randn(WIDTH, VOCABULARY) / 2)

    def __call__(self, inputs):
        return logits_of(self.embedding[...], self.kernel[...], inputs)


def logits_of(embedding, kernel, inputs):
    return jnp.tanh(embedding[inputs]) @ kernel


def token_losses(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.where(batch["mask"], losses, 0)


def loss_of_tokens(model, batch):
    """Losses over tokens, with a metric over tokens, one over the first tokens, one over examples."""
    logits = model(batch["inputs"])
    one = batch["mask"] & (batch["targets"] == 1)
    first = batch["mask"][:, 0]
    metrics = {
        "one": Weighted(one.sum(-1), batch["mask"].sum(-1)),
        "first": Weighted(one[:, 0] & first, first),
        "length": batch["mask"].sum(-1),
    }
    return Weighted(token_losses(logits, batch).sum(-1), batch["mask"].sum(-1)), metrics


def penalty_of(model):
    return 0.1 * jnp.sum(model.kernel[...] ** 2)


def train(strategy, tx=None, loss_fn=loss_of_tokens, model=None, **kwargs):
    tx = tx or optax.sgd(1.0)
    return mirror.Trainer(model or Bigrams(), tx, loss_fn, strategy=strategy, **kwargs)


def by_hand(tx, data, weigh=None, penalty=0.0):
    """Trains one device for one pass in plain JAX; returns the parameters and the epoch's loss."""

    def loss_fn(params, batch):
        losses = token_losses(logits_of(*params, batch["inputs"]), batch).sum(-1)
        tokens = batch["mask"].sum()
        total = (losses * (1 if weigh is None else weigh(batch))).sum()
        added = penalty * jnp.sum(params[1] ** 2)
        return total / tokens + added, (total + added * tokens, tokens)

    @jax.jit
    def step(params, state, batch):
        grads, sums = jax.grad(loss_fn, has_aux=True)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, sums

    params = jax.tree.map(jnp.asarray, (Bigrams().embedding[...], Bigrams().kernel[...]))
    state, totals = tx.init(params), np.zeros(2)
    for batch in data:
        params, state, sums = step(params, state, batch)
        totals += np.asarray(sums)
    return params, totals[0] / totals[1]


def assert_by_hand(trainer, history, wanted):
    (embedding, kernel), loss = wanted
    np.testing.assert_allclose(trainer.model.embedding[...], embedding, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(trainer.model.kernel[...], kernel, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(history["loss"], [loss], rtol=1e-5)


# One device on the whole batch

STRATEGIES = {
    "1": lambda: cpu_strategy(1),
    "2": lambda: cpu_strategy(2),
    "8": lambda: cpu_strategy(8),
    "8-vmap": lambda: cpu_strategy(1, replicas_per_device=8),
    "2-on-2": lambda: cpu_strategy(2, replicas_per_device=2),
    "2-staged": EXECUTORS["staged"],
}
OPTIMIZERS = {"sgd": optax.sgd(1.0), "adam": optax.adam(0.05)}


def test_trained_parameters_equal_plain_jax_on_one_device(subtests):
    for optimizer, tx in OPTIMIZERS.items():
        with subtests.test(msg=optimizer):
            trainer = train(cpu_strategy(8), tx)
            history = fit(trainer, batches())
            assert_by_hand(trainer, history, by_hand(tx, batches()))
            trainer.strategy.check_mirrored((trainer.model, trainer.optimizer))


WAYS = {  # accumulate_steps, steps_per_execution, strategy
    "2 pieces on 1": (2, 1, "1"),
    "3 pieces on 8": (3, 1, "8"),
    "2 pieces, 3 steps, vmap": (2, 3, "8-vmap"),
    "2 pieces, 2 steps, staged": (2, 2, "2-staged"),
    "2 on 2": (1, 1, "2-on-2"),
}


@pytest.mark.parametrize("rows", mostly_slow(WAYS, "2 pieces, 3 steps, vmap"))
def test_accumulated_and_grouped_steps_equal_one_device(subtests, rows):
    for way in rows:
        with subtests.test(msg=way):
            accumulate, at_once, strategy = WAYS[way]
            options = {"accumulate_steps": accumulate, "steps_per_execution": at_once}
            trainer = train(STRATEGIES[strategy](), **options)
            history = fit(trainer, batches())
            assert_by_hand(trainer, history, by_hand(optax.sgd(1.0), batches()))


CLASSED = {"labels": "kind", "num_classes": CLASSES, "class_weight": {0: 0.5, 2: 3.0}}


def by_kind(batch):
    return jnp.asarray([0.5, 1.0, 3.0])[batch["kind"]]


OPTIONS = {  # arguments, what multiplies an example's loss, the penalty
    "sample_weight": ({"sample_weight": "weight"}, lambda batch: batch["weight"], 0.0),
    "class_weight": (CLASSED, by_kind, 0.0),
    "penalty": ({"penalty": penalty_of}, None, 0.1),
    "all": (
        {**CLASSED, "sample_weight": "weight", "penalty": penalty_of, "accumulate_steps": 2},
        lambda batch: by_kind(batch) * batch["weight"],
        0.1,
    ),
}


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(["all"], id="all"),
        pytest.param(["sample_weight", "class_weight", "penalty"], marks=pytest.mark.nightly),
    ],
)
def test_options_multiply_losses_but_not_their_weights(subtests, rows):
    for name in rows:
        with subtests.test(msg=name):
            kwargs, weigh, penalty = OPTIONS[name]
            trainer = train(cpu_strategy(2), **kwargs)
            history = fit(trainer, batches())
            assert_by_hand(trainer, history, by_hand(optax.sgd(1.0), batches(), weigh, penalty))


def test_weights_of_1_equal_plain_losses(two):
    """With all options: the number of examples is the weight."""

    def plain(model, batch):
        return token_losses(model(batch["inputs"]), batch).mean(-1)

    def weighted(model, batch):
        return Weighted(plain(model, batch), np.ones(len(batch["inputs"]), int))

    kwargs = OPTIONS["all"][0]
    one, other = train(two, loss_fn=plain, **kwargs), train(two, loss_fn=weighted, **kwargs)
    wanted, got = fit(one, batches()), fit(other, batches())
    np.testing.assert_allclose(got["loss"], wanted["loss"], rtol=1e-6)
    np.testing.assert_allclose(other.model.kernel[...], one.model.kernel[...], atol=1e-6)


def test_perplexity_equals_numpy_over_all_tokens():
    trainer = train(STRATEGIES["2-on-2"]())
    logits = np.tanh(Bigrams().embedding[...][DATA["inputs"]]) @ Bigrams().kernel[...]
    logits = logits.astype(np.float64)
    picked = np.take_along_axis(logits, DATA["targets"][..., None], -1)[..., 0]
    losses = np.log(np.exp(logits).sum(-1)) - picked
    found = trainer.evaluate(batches())
    np.testing.assert_allclose(
        math.exp(found["loss"]), np.exp(losses[DATA["mask"]].mean()), rtol=1e-5
    )


@pytest.mark.parametrize("rows", mostly_slow([1, 2], 2))
def test_each_metric_has_its_own_denominator(subtests, eight, rows):
    """Whole numbers, so the means are exact; beside them, one over the examples."""
    for at_once in rows:
        with subtests.test(msg=str(at_once)):
            trainer = train(eight, steps_per_execution=at_once)
            one = DATA["mask"] & (DATA["targets"] == 1)
            wanted = {
                "one": one.sum() / DATA["mask"].sum(),
                "first": one[:, 0].sum() / DATA["mask"][:, 0].sum(),
                "length": LENGTHS.sum() / N,
            }
            found, trained = trainer.evaluate(batches()), fit(trainer, batches())
            assert next(iter(found)) == "loss"
            for name, value in wanted.items():
                assert found[name] == value
                assert trained[name] == [value]


def test_weighted_metric_works_beside_a_plain_loss(two):
    def loss_fn(model, batch):
        tokens = batch["mask"].sum(-1)
        return model.kernel[0, 0] * tokens, {"length": Weighted(tokens * tokens, tokens)}

    found = train(two, loss_fn=loss_fn).evaluate(batches())
    assert found["length"] == (LENGTHS**2).sum() / LENGTHS.sum()
    wanted = Bigrams().kernel[0, 0] * LENGTHS.mean()
    np.testing.assert_allclose(found["loss"], wanted, rtol=1e-6)


def test_verify_accepts_weighted_losses(two):
    assert train(two, accumulate_steps=2).verify(batches()).largest < 1e-5


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("stop", "wanted"), [(lambda w: w, 1.0), (jax.lax.stop_gradient, 0.0)])
def test_gradient_flows_through_weights(two, stop, wanted, accumulate):
    """The loss is (b * b * 6) / (b * 3) = 2 b with b = 2; with constant weights, its gradient is 4."""

    def loss_fn(model, batch):
        b = model.b[...]
        return Weighted(b * b * batch, stop(b * jnp.ones_like(batch)))

    model = nnx.Dict(b=nnx.Param(jnp.asarray(2.0)))
    options = {"penalty": lambda model: 0 * model.b[...], "accumulate_steps": accumulate}
    trainer = train(two, optax.sgd(0.5), loss_fn, model, **options)
    assert fit(trainer, [np.asarray([1.0, 2.0, 3.0], np.float32)])["loss"] == [4.0]
    assert model.b[...] == wanted


# Zero weight


def masked(*counts):
    """One batch per count; that many of its last rows have weight 1."""
    rows = [np.arange(4) >= 4 - count for count in counts]
    return [{"x": np.arange(1, 5, dtype=np.float32), "mask": row} for row in rows]


class Scale(nnx.Module):
    def __init__(self, dtype=np.float32):
        self.b = nnx.Param(np.asarray(1.0, dtype))


def scaled(model, batch):
    """The mean over the rows of the mask is linear: its gradient is the mean of `x`."""
    losses = model.b[...] * batch["x"] * batch["mask"]
    return Weighted(losses, batch["mask"]), {"seen": Weighted(batch["mask"], batch["mask"])}


@pytest.mark.parametrize("rows", mostly_slow([(1, 1), (1, 3), (2, 1), (2, 3)], (2, 1)))
def test_step_without_weight_changes_only_the_step_count(subtests, two, rows):
    for accumulate, at_once in rows:
        with subtests.test(msg=f"{accumulate} {at_once}"):
            check_step_without_weight_changes_only_the_step_count(two, accumulate, at_once)


def check_step_without_weight_changes_only_the_step_count(two, accumulate, at_once):
    options = {"accumulate_steps": accumulate, "steps_per_execution": at_once}
    trainer = train(two, optax.sgd(0.5), scaled, Scale(), penalty=lambda m: m.b[...], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = fit(trainer, masked(1, 0, 2))
    # If several steps share a launch, the launch has weight, and there is no warning.
    assert len(caught) == (at_once == 1)
    for warning in caught:
        assert warning.category is UserWarning
        assert_message(str(warning.message), names=["weights", "loss"], values=[0, 2])
    # 1 - (4 + 1) / 2, and from there - (3.5 + 1) / 2; the penalty is 1 for the first of 3 rows.
    assert trainer.model.b[...] == -1.5 - 2.25
    assert history["loss"] == [((1 * 4 + 1) + (-1.5 * 7 - 1.5 * 2)) / 3]
    assert history["seen"] == [1.0]
    assert trainer.optimizer.step[...] == 3


@pytest.mark.parametrize("rows", mostly_slow(OPTIMIZERS, "adam"))
def test_training_without_any_weight_leaves_the_parameters_finite(subtests, two, rows):
    for optimizer in rows:
        with subtests.test(msg=optimizer):
            trainer = train(two, OPTIMIZERS[optimizer], scaled, Scale())
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                history = fit(trainer, masked(0, 0))
            (warning,) = caught
            assert warning.category is UserWarning
            assert_message(str(warning.message), names=["weights", "loss"], values=[0, 1])
            assert trainer.model.b[...] == 1
            assert math.isnan(history["loss"][0])
            assert math.isnan(history["seen"][0])
            assert math.isnan(trainer.evaluate(masked(0))["loss"])


def undefined(model, batch):
    """NaN for each row, of which none has weight."""
    return Weighted(model.b[...] * batch["x"] * jnp.nan, batch["mask"])


def test_step_without_weight_ignores_nan(two):
    trainer = train(two, optax.sgd(0.5), undefined, Scale())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(trainer, masked(0))
    (warning,) = caught
    assert warning.category is UserWarning
    fix = "mirror.callbacks.NaNGuard()"
    assert_message(str(warning.message), names="loss", values=["nan", 1], fix=fix)
    assert trainer.model.b[...] == 1


def test_nan_guard_stops_at_nan_but_not_at_zero_weight(two):
    """A metric without weight in some batches does not mean that the training failed."""

    def rare(model, batch):
        return model.b[...] * batch["x"], {"rare": Weighted(batch["x"], batch["mask"])}

    def loss_fn(model, batch):
        losses, _ = rare(model, batch)
        return losses, {"rare": Weighted(batch["x"] * batch["mask"], batch["mask"])}

    guard = mirror.callbacks.NaNGuard()
    history = fit(train(two, optax.sgd(0.5), loss_fn, Scale()), masked(1, 0, 1), callbacks=guard)
    assert history["rare"] == [4.0]
    # NaN over 0, and more than 0 over 0
    for nan, metric in ((undefined, "loss"), (rare, "rare")):
        trainer = train(two, optax.sgd(0.5), nan, Scale())
        with raises(FloatingPointError, names=metric, values=["nan", 1], fix="num_classes=..."):
            fit(trainer, masked(0), callbacks=guard)


# Small floats


def test_sums_of_values_and_weights_are_at_least_32_bits(subtests):
    """And exact: 4096 of 1 are 4096, where bfloat16 ends at 256 and int8 at 127."""
    for dtype in [jnp.bfloat16, jnp.float16, jnp.float32, np.int8, np.bool_]:
        with subtests.test(msg=str(dtype)):
            check_sums_of_values_and_weights_are_at_least_32_bits(dtype)


def check_sums_of_values_and_weights_are_at_least_32_bits(dtype):

    def loss_fn(_, batch):
        return Weighted(batch.astype(jnp.bfloat16), batch), {"one": Weighted(batch, batch)}

    rows = np.ones(4096, bool)
    *_, sums = Objective(loss_fn)(None, jnp.ones(4096, dtype), rows)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    wide = jnp.float32 if is_float else jnp.int32
    assert sums.totals["loss"].dtype == jnp.float32
    assert sums.weights["loss"].dtype == sums.totals["one"].dtype == wide
    assert jax.tree.map(float, sums) == Sums(
        {"loss": 4096, "one": 4096}, 4096, {"loss": 4096, "one": 4096}
    )


@pytest.mark.parametrize(
    "rows",
    mostly_slow(
        [(np.float16, 1), (np.float16, 2), (jnp.bfloat16, 1), (jnp.bfloat16, 2)], (np.float16, 2)
    ),
)
def test_half_precision_gradients_do_not_overflow(subtests, two, rows):
    """Sums of 1024 tokens of 128 in each of 15 rows are more than float16 has; their mean is not."""
    for dtype, accumulate in rows:
        with subtests.test(msg=f"{dtype} {accumulate}"):
            check_half_precision_gradients_do_not_overflow(two, dtype, accumulate)


def check_half_precision_gradients_do_not_overflow(two, dtype, accumulate):

    def steep(model, batch):
        return Weighted(128 * model.b[...].astype(jnp.float32) * batch, batch)

    trainer = train(two, optax.sgd(1 / 128), steep, Scale(dtype), accumulate_steps=accumulate)
    fit(trainer, [np.full(15, 1024, np.float32)])
    assert trainer.model.b[...].dtype == dtype
    assert trainer.model.b[...] == 0


def test_moments_keep_the_dtype_of_half_precision_parameters(two):
    trainer = train(two, optax.adam(0.1), scaled, Scale(jnp.bfloat16))
    before = jax.tree.map(lambda x: x.dtype, nnx.state(trainer.optimizer))
    fit(trainer, masked(1, 2))
    assert jax.tree.map(lambda x: x.dtype, nnx.state(trainer.optimizer)) == before


# Padding


def test_padding_does_not_count_in_any_sum():
    """Whatever the values and weights are."""

    def loss_fn(w, batch):
        return Weighted(w * batch, batch + 1), {"batch": Weighted(batch, batch > 0)}

    objective = Objective(loss_fn, penalty=lambda w: 2 * w)
    mask = np.asarray([True, True, False])
    for last in (0.0, 1e30, np.inf, np.nan):
        losses, _, sums = objective(jnp.ones(()), jnp.asarray([1.0, 2.0, last]), mask)
        assert losses.tolist() == [1 + 2 * 2, 2 + 2 * 3, 0]
        assert jax.tree.map(float, sums) == Sums(
            {"loss": 13, "batch": 3}, 2, {"loss": 5, "batch": 2}
        )


# Resuming in the middle of an epoch


class Saves(mirror.callbacks.Callback):
    """Saves after a step, and ends the training."""

    def __init__(self, directory, at):
        self.directory, self.at = directory, at

    def on_step(self, fit):
        if fit.position.step == self.at:
            fit.trainer.save(self.directory)
            fit.stop("saved")


@pytest.mark.parametrize("rows", mostly_slow([2, 8], 2))
def test_resumed_epoch_reports_metrics_of_all_its_tokens(subtests, two, tmp_path_factory, rows):
    for num_replicas in rows:
        with subtests.test(msg=str(num_replicas)):
            tmp_path = tmp_path_factory.mktemp("row")
            data = batches(7)
            wanted = fit(train(two, optax.sgd(0.1)), data)
            fit(train(two, optax.sgd(0.1)), data, callbacks=Saves(tmp_path, 3))
            trainer = train(cpu_strategy(num_replicas), optax.sgd(0.1))
            trainer.restore(tmp_path)
            history = fit(trainer, data)
            assert list(history) == list(wanted)
            for name in wanted:
                rtol = 0 if num_replicas == 2 else 1e-6
                np.testing.assert_allclose(history[name], wanted[name], rtol=rtol)


def sums_of(loss, tokens, count=2, **metrics):
    return Sums({**metrics, "loss": loss}, count, {"loss": tokens})


def collected(meter, running=0):
    """The metrics of the launches that a meter collects now."""
    found = []
    meter.collect(running=running, then=found.append)
    return found


def test_meter_divides_by_weights_and_round_trips_through_json():
    meter = MetricAccumulator()
    for step in range(1, 4):
        meter.add(step, sums_of(np.float32(3 * step), np.int32(step), seen=np.int32(step)))
    assert [(step, means) for step, means, _ in collected(meter, 1)] == [
        (1, {"loss": 3.0, "seen": 0.5}),
        (2, {"loss": 3.0, "seen": 1.0}),
    ]
    meter.collect()
    again = MetricAccumulator(**json.loads(json.dumps(meter.to_dict())))
    again.add(4, sums_of(np.float32(0), np.int32(3), seen=np.int32(0)))
    [(_, means, empty)] = collected(again)
    assert (means, empty) == ({"loss": 0.0, "seen": 0.0}, frozenset())
    assert again.means == {"loss": 18 / 9, "seen": 6 / 8}
    assert meter.means == {"loss": 18 / 6, "seen": 6 / 6}


def test_meter_of_an_older_checkpoint_divides_by_the_number_of_examples():
    found = {"totals": {"loss": 3.0, "seen": 4}, "count": 2}
    assert MetricAccumulator(**found).means == {"loss": 1.5, "seen": 2.0}


def test_launch_without_values_and_weights_is_empty(subtests):
    for total, weight, is_empty in [(0, 0, True), (0, 1, False), (1, 0, False), (np.nan, 0, False)]:
        with subtests.test(msg=f"{total} / {weight}"):
            meter = MetricAccumulator()
            meter.add(1, sums_of(np.float32(total), np.float32(weight)))
            [(_, means, empty)] = collected(meter)
            assert empty == ({"loss"} if is_empty else set())
            assert math.isnan(means["loss"]) == (weight == 0)


# The class


def test_weighted_is_a_pytree_that_jit_and_vmap_return(two):
    batch = batches()[0]

    @jax.jit
    def one(model, inputs, targets, mask):
        example = {"targets": targets, "mask": mask}
        return Weighted(token_losses(model(inputs), example).sum(), mask.sum())

    def loss_fn(model, batch):
        parts = batch["inputs"], batch["targets"], batch["mask"]
        return jax.vmap(lambda *example: one(model, *example))(*parts)

    found = loss_fn(Bigrams(), batch)
    assert found.values.shape == found.weights.shape == (B,)
    wanted = train(two).evaluate(batches())["loss"]
    got = train(two, loss_fn=loss_fn).evaluate(batches())["loss"]
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_weighted_names_its_leaves_and_is_immutable():
    weighted = Weighted(np.ones(2), np.arange(2))
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(weighted)
    ]
    assert paths == [".values", ".weights"]
    doubled = jax.tree.map(lambda x: 2 * x, weighted)
    assert isinstance(doubled, Weighted)
    assert doubled.weights.tolist() == [0, 2]
    assert jax.tree.map(str, jax.tree.map(lambda _: object(), weighted)).values.startswith(
        "<object"
    )
    with pytest.raises(AttributeError):
        setattr(weighted, "weights", np.ones(2))  # noqa: B010 (mypy rejects the statement too)


MADE: dict[str, tuple[Any, ...]] = {
    "negative weights": ((np.ones(2), np.asarray([1, -2])), ValueError, {"names": "`weights`", "values": [0, -2]}),
    "a negative weight": ((np.ones(2), -0.5), ValueError, {"names": "`weights`", "values": [0, -0.5]}),
    "weights of NaN": ((np.ones(2), np.asarray([1, np.nan])), ValueError, {"names": "`weights`", "values": [0, "nan"]}),
    "complex weights": ((np.ones(2), np.ones(2, complex)), TypeError, {"names": "`weights`", "values": "complex128[2]", "fix": "mirror.Weighted(values, weights)"}),
    "complex values": ((jnp.ones(2, complex), np.ones(2)), TypeError, {"names": "`values`", "values": "complex64[2]", "fix": "mirror.Weighted(values, weights)"}),
    "no weights": ((np.ones(2), None), TypeError, {"names": "`weights`", "values": [None, "NoneType"], "fix": "mirror.Weighted(values, weights)"}),
    "a list": (([1.0, 2.0], np.ones(2)), TypeError, {"names": "`values`", "values": ["[1.0, 2.0]", "list"], "fix": "mirror.Weighted(values, weights)"}),
    "dates": ((np.ones(1), np.zeros(1, "datetime64[s]")), TypeError, {"names": "`weights`", "values": "datetime64[s][1]", "fix": "mirror.Weighted(values, weights)"}),
}  # fmt: skip


def test_weighted_rejects_invalid_values_and_weights(subtests):
    for name in MADE:
        with subtests.test(msg=name):
            arguments, error, wanted = MADE[name]
            with raises(error, **wanted):
                Weighted(*arguments)


SUMS = "mirror.Weighted((losses * mask).sum(axis=-1), mask.sum(axis=-1))"
LOSSES: dict[str, tuple[Any, ...]] = {
    "a mean": (lambda x, n: Weighted(x.sum(), n.sum()), ValueError, {"names": ["loss", "loss_fn"], "values": [(), 6, (6,)], "fix": SUMS}),
    "tokens": (lambda x, n: Weighted(x[:, None] * jnp.ones(5), n), ValueError, {"names": ["loss", "loss_fn"], "values": [(6, 5), 6, (6,)], "fix": "x.sum(axis=-1)"}),
    "a mask": (lambda x, n: Weighted(x, n[:, None] > jnp.arange(5)), ValueError, {"names": ["loss", "loss_fn"], "values": [(6, 5), 6, (6,)], "fix": "x.sum(axis=-1)"}),
    "one weight": (lambda x, n: Weighted(x, 5), ValueError, {"names": ["loss", "loss_fn"], "values": [(), 6, (6,)], "fix": SUMS}),
    "integers": (lambda x, n: Weighted(n, n), TypeError, {"names": "loss_fn", "values": "int32"}),
    "a column of a metric": (lambda x, n: (x, {"n": Weighted(n, n[:, None])}), ValueError, {"names": ["'n'", "loss_fn"], "values": [(6, 1), 6, (6,)], "fix": "x.sum(axis=-1)"}),
    "a mean of a metric": (lambda x, n: (x, {"n": Weighted(n.sum(), n)}), ValueError, {"names": ["'n'", "loss_fn"], "values": [(), 6, (6,)], "fix": SUMS}),
    "negative weights": (lambda x, n: Weighted(x, np.full(6, -1)), ValueError, {"names": "`weights`", "values": [0, -1]}),
    "metrics of losses": (lambda x, n: (x, Weighted(x, n)), TypeError, {"names": ["loss_fn", "Weighted"], "fix": ["dict", "losses, {'accuracy': correct}"]}),
    "a pair": (lambda x, n: ((x, n), {}), ValueError, {"names": ["loss", "loss_fn"], "values": ["tuple", 6, (6,)]}),
}  # fmt: skip


def test_errors_for_wrong_shapes_and_dtypes_name_the_loss_function(subtests, two):
    for name, use in itertools.product(LOSSES, [fit, mirror.Trainer.evaluate]):
        with subtests.test(msg=f"{use.__name__}: {name}"):
            check_errors_for_wrong_shapes_and_dtypes_name_the_loss_function(two, name, use)


def check_errors_for_wrong_shapes_and_dtypes_name_the_loss_function(two, name, use):
    make, error, wanted = LOSSES[name]

    def loss_fn(model, batch):
        losses = token_losses(model(batch["inputs"]), batch).sum(-1)
        return make(losses, batch["mask"].sum(-1))

    with raises(error, **wanted):
        use(train(two, loss_fn=loss_fn), batches())


def test_gradients_of_padded_batches_and_of_classes_are_exact_in_float64():
    code = """
        import numpy as np, optax, mirror
        from flax import nnx

        class Scale(nnx.Module):
            def __init__(self):
                self.w = nnx.Param(np.zeros(()))

        x, y = np.linspace(1, 2, 5), np.array([0, 1, 0, 1, 0])
        with mirror.MirroredStrategy(3).scope():
            trainer = mirror.Trainer(
                Scale(), optax.sgd(1.0), lambda model, batch: batch["x"] * model.w[...],
                labels="y", num_classes=2, class_weight={0: 0.1},
            )
        trainer.fit([{"x": x, "y": y}], progress=False)
        wanted = -(x * np.where(y == 0, 0.1, 1)).mean()
        np.testing.assert_allclose(trainer.model.w[...], wanted, rtol=1e-15)
    """
    fresh.run(code, environment={"JAX_NUM_CPU_DEVICES": "3", "JAX_ENABLE_X64": "1"})
