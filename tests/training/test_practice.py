"""Common training techniques: normalization, dropout, optax optimizers, bad steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import mirror
from tests.support.messages import assert_message, raises
from tests.support.steps import context, nothing, number, replica_id
from tests.support.strategies import EXECUTORS, cpu_strategy
from tests.support.tables import mostly_slow
from tests.support.variables import on_read, variable

X = np.random.RandomState(0).randn(8, 3).astype(np.float32) + 0.5
Y = X @ np.asarray([1.0, -2.0, 3.0], np.float32)
KEY = jax.random.key(7)


def rows_of(strategy, batch, **kwargs):
    (rows,) = strategy.distribute_dataset([batch], **kwargs)
    return rows


# Batch normalization


@mirror.per_replica_on_purpose
def normalized(norm, x):
    return norm(x)


@mirror.per_replica_on_purpose  # a mean of means over masks
def masked(norm, x, mask):
    return norm(x, mask=mask[:, None])


def test_batch_statistics_over_all_replicas_equal_those_of_the_whole_batch(two):
    norms = []
    for strategy in (two, cpu_strategy(1)):
        with strategy.scope():
            norm = nnx.BatchNorm(3, axis_name=mirror.REPLICA_AXIS, rngs=nnx.Rngs(0))
        out = strategy.run(normalized, (norm, rows_of(strategy, X)))
        norms.append((norm, np.concatenate(out.values)))
        strategy.check_mirrored(norm)
    (many, got), (one, wanted) = norms
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(many.mean, one.mean, rtol=1e-5)
    np.testing.assert_allclose(many.var, one.var, rtol=1e-5)
    np.testing.assert_allclose(got.mean(0), 0, atol=1e-5)


def test_batch_statistics_are_per_replica_by_default_and_running_ones_averaged(two):
    """TensorFlow lets the running statistics diverge and reads replica 0."""
    with two.scope():
        norm = nnx.BatchNorm(3, momentum=0.0, rngs=nnx.Rngs(0))
    out = two.run(normalized, (norm, rows_of(two, X)))
    for own in out.values:
        np.testing.assert_allclose(np.asarray(own).mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(norm.mean, X.reshape(2, 4, 3).mean(1).mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.var, X.reshape(2, 4, 3).var(1).mean(0), rtol=1e-4)
    two.check_mirrored(norm)


def test_batch_statistics_ignore_padding(two):
    """Exact if the replicas have equal numbers of examples: Flax averages the replicas' means."""
    mask = np.asarray([1, 1, 1, 0, 1, 1, 1, 0], bool)
    with two.scope():
        norm = nnx.BatchNorm(3, momentum=0.0, axis_name=mirror.REPLICA_AXIS, rngs=nnx.Rngs(0))
    out = two.run(masked, (norm, *rows_of(two, (X, mask))))
    np.testing.assert_allclose(norm.mean, X[mask].mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.var, X[mask].var(0), rtol=1e-4)
    np.testing.assert_allclose(np.concatenate(out.values)[mask].mean(0), 0, atol=1e-5)
    _, (x, ragged) = two.distribute_dataset([X, X[:5]], remainder="pad")
    two.run(masked, (norm, x, ragged))
    np.testing.assert_allclose(norm.mean, (X[:4].mean(0) + X[4]) / 2, rtol=1e-5)
    two.check_mirrored(norm)


def test_linen_batch_normalization_synchronizes(subtests, two):
    for axis_name in [None, mirror.REPLICA_AXIS]:
        with subtests.test(msg=str(axis_name)):
            check_linen_batch_normalization_synchronizes(two, axis_name)


def check_linen_batch_normalization_synchronizes(two, axis_name):
    norm = linen.BatchNorm(use_running_average=False, momentum=0.0, axis_name=axis_name)

    @mirror.per_replica_on_purpose
    def step(state, x):
        out, new = norm.apply(state, x, mutable=["batch_stats"])
        new = context().all_reduce("mean", new)
        return out, {**state, **mirror.ensure_mirrored(new)}

    with two.scope():
        state = linen.BatchNorm(use_running_average=True).init(jax.random.key(0), X[:1])
    out, state = two.run(step, (state, rows_of(two, X)))
    found = state["batch_stats"]
    np.testing.assert_allclose(found["mean"], X.mean(0), rtol=1e-5)
    variance = X.var(0) if axis_name else X.reshape(2, 4, 3).var(1).mean(0)
    np.testing.assert_allclose(found["var"], variance, rtol=1e-4)
    assert isinstance(out, mirror.PerReplica)


# Dropout


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(3, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x, drop):
        return self.out(drop(jax.nn.tanh(self.hidden(x))))[:, 0]


def dropped(key, x):
    draw = lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:])  # noqa: E731
    return jnp.where(jax.vmap(draw)(mirror.example_keys(key, x)), 2 * x, 0)


def shared(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)


def net_step(model, optimizer, x, y, key, drop):
    drop = model.dropout if drop is None else functools.partial(drop, key)
    loss_fn = lambda model: jnp.mean((model(x, drop) - y) ** 2)  # noqa: E731
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    grads, loss = context().all_reduce("mean", (grads, loss))
    optimizer.update(model, grads)
    return loss


def net_of(strategy):
    with strategy.scope():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)


def dropped_losses(strategy):
    state, (x, y) = net_of(strategy), rows_of(strategy, (X, Y))
    keys = [jax.random.fold_in(KEY, i) for i in range(3)]
    return [float(strategy.run(net_step, (*state, x, y, key, dropped))) for key in keys]


@pytest.fixture(scope="module")
def wanted():
    return dropped_losses(cpu_strategy(1))


@pytest.mark.parametrize("rows", mostly_slow([*EXECUTORS, "eight"], "pmap"))
def test_dropout_by_example_trains_the_same_on_any_number_of_replicas(subtests, wanted, rows):
    for name in rows:
        with subtests.test(msg=name):
            strategy = cpu_strategy(8) if name == "eight" else EXECUTORS[name]()
            np.testing.assert_allclose(dropped_losses(strategy), wanted, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:.*\bnet_step\b:UserWarning")
def test_verify_names_dropout_with_the_same_mask_on_all_replicas(two):
    batch = rows_of(two, (X, Y))
    two.verify(net_step, (*net_of(two), *batch, KEY, dropped))
    with pytest.raises(mirror.VerifyError) as caught:
        two.verify(net_step, (*net_of(two), *batch, KEY, shared))
    fix = "mirror.example_keys(key, batch)"
    assert_message(caught, names="test_practice.py", fix=fix)


def test_flax_dropout_samples_per_replica(two):
    ones = np.ones((8, 64), np.float32)
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    first, second = two.run(lambda d, x: d(x), (dropout, rows_of(two, ones))).values
    assert not np.array_equal(first, second)
    two.check_mirrored(nnx.state(dropout))


# optax


OPTIMIZERS = {
    "MultiSteps": lambda: optax.MultiSteps(
        optax.adam(0.1), every_k_schedule=2
    ).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=3),
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)),
    "schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 8)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.05),
    "masked": lambda: optax.masked(optax.sgd(0.05), {"w": True, "b": False}),
    "ema": lambda: optax.chain(optax.sgd(0.05), optax.ema(0.5)),
}


def loss_of(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


@functools.cache
def plain_step(name):
    tx = OPTIMIZERS[name]()

    def step(state, x, y):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], x, y)
        grads, loss = context().all_reduce("mean", (grads, loss))
        updates, moments = tx.update(grads, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], 0.1)
        new = {"params": params, "moments": moments, "average": average}
        return mirror.ensure_mirrored(new), loss

    return tx, step


def start(strategy, tx):
    with strategy.scope():
        params = {"w": jnp.zeros(3), "b": jnp.ones(())}
        return {"params": params, "moments": tx.init(params), "average": params}


@pytest.mark.parametrize("rows", mostly_slow(OPTIMIZERS, "apply_if_finite"))
def test_optax_optimizers_train_as_on_one_device(subtests, two, rows):
    for name in rows:
        with subtests.test(msg=name):
            tx, step = plain_step(name)
            found = []
            for strategy in (two, cpu_strategy(1)):
                state = start(strategy, tx)
                x, y = rows_of(strategy, (X, Y))
                for _ in range(4):
                    state, loss = strategy.run(step, (state, x, y), donate_argnums=0)
                strategy.check_mirrored(state)
                found.append((loss, state))
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), *found
            )
            assert np.isfinite(found[0][0])


@pytest.mark.parametrize("rate", [0.5, 1, np.float32(0.5)])
def test_number_assigned_to_a_hyperparameter_is_the_new_rate(two, rate):
    """Of a strategy and a trainer; Optax documents the assignment."""

    def made():
        tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0)
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(model, optimizer, x, y):
        grads = nnx.grad(lambda model: ((model(x)[:, 0] - y) ** 2).mean())(model)
        optimizer.update(model, context().all_reduce("mean", grads))

    def weights_after(optimizer, model, train):
        for assigned in (rate, 0.0, 0.0):
            train()
            optimizer.opt_state.hyperparams["learning_rate"] = assigned
        return model.kernel[...]

    pairs = [made(), made(), made()]
    (model, optimizer), (other, other_optimizer), (plain, plain_optimizer) = pairs
    trainer = mirror.Trainer(other, other_optimizer, "mse", strategy=two)
    run = lambda: two.run(step, (model, optimizer, *rows_of(two, (X, Y))))  # noqa: E731
    fit = lambda: trainer.fit([(X, Y[:, None])], progress=False)  # noqa: E731
    one = lambda: cpu_strategy(1).run(step, (plain, plain_optimizer, X, Y))  # noqa: E731
    expected = weights_after(plain_optimizer, plain, one)
    assert not np.allclose(expected, made()[0].kernel[...])
    for found in (weights_after(optimizer, model, run), weights_after(other_optimizer, other, fit)):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_nan_on_one_replica_reaches_all_replicas(two):
    """All replicas skip the update together, and training continues."""
    tx, step = plain_step("apply_if_finite")
    state, skipped = start(two, tx), 0
    bad = X.copy()
    bad[-1] = np.nan
    for x in (X, bad, X):
        before = np.asarray(state["params"]["w"])
        state, loss = two.run(step, (state, *rows_of(two, (x, Y))))
        skipped += x is bad
        assert np.isnan(loss) == (x is bad)
        assert np.array_equal(before, state["params"]["w"]) == (x is bad)
        assert int(state["moments"].total_notfinite) == skipped
        two.check_mirrored(state)
    assert np.isfinite(state["params"]["w"]).all()


class Scaled(nnx.Module):
    """Linear regression in float16 with a dynamic loss scale."""

    def __init__(self):
        self.w = nnx.Param(jnp.zeros(3))
        self.scale = variable(2.0**10, name="scale")
        self.good = variable(0, name="good")
        self.skipped = on_read("sum", 0)


def scaled_step(model, optimizer, x, y):
    def loss_fn(model):
        out = x.astype(jnp.float16) @ model.w[...].astype(jnp.float16)
        return jnp.mean((out - y) ** 2).astype(jnp.float32) * model.scale

    grads = nnx.grad(loss_fn)(model)
    grads = context().all_reduce("mean", jax.tree.map(lambda g: g / model.scale, grads))
    finite = jnp.all(jnp.asarray([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
    old = model.w[...]
    optimizer.update(model, jax.tree.map(lambda g: jnp.where(finite, g, 0), grads))
    model.w[...] = jnp.where(finite, model.w[...], old)
    model.good.assign(jnp.where(finite, model.good + 1, 0))
    model.scale.assign(jnp.where(finite, model.scale[...], model.scale / 2))
    model.skipped.assign_add(1 - finite.astype(int))
    return finite


def test_dynamic_loss_scale_lives_in_variables(two):
    with two.scope():
        model = Scaled()
        optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)
    huge = Y.copy()
    huge[0] = 1e30  # on replica 0 alone
    for y, scale, good in ((Y, 1024, 1), (huge, 512, 0), (Y, 512, 1)):
        finite = two.run(scaled_step, (model, optimizer, *rows_of(two, (X, y))))
        assert isinstance(finite, jax.Array)
        assert (float(model.scale), int(model.good)) == (scale, good)
        two.check_mirrored((model, optimizer))
    assert int(model.skipped) == 2  # one step, on each replica
    assert np.isfinite(model.w[...]).all()


# Wrong steps


def right(v, x):
    v.assign_add(context().all_reduce("mean", x.mean()))


def forgets(v, x):
    v.assign_add(x.mean())


def sums(v, x):
    v.assign_add(context().all_reduce("sum", x.mean()))


def scales_twice(v, x):
    loss = x.mean() / context().num_replicas_in_sync
    v.assign_add(context().all_reduce("mean", loss))


def test_errors_name_variables_of_wrong_steps(two):
    v, captured, own = variable(1.0, name="mine"), variable(1.0, name="seen"), on_read("sum", 0)
    (rows,) = rows_of(two, (X,))

    def both(v, x):
        right(v, x)
        right(captured, x)
        own.assign_add(x.shape[0])

    report = two.verify(both, (v, rows))
    assert {row.name for row in report.rows} >= {"v", "seen"}
    assert (float(v), float(captured), int(own)) == (1, 1, 0)
    names = ["forgets", "v", "x"]
    with raises(mirror.ReplicaDivergenceError, names=names, fix="all_reduce"):
        two.run(forgets, (v, rows))
    names = ["<lambda>", "seen", "x"]
    with raises(mirror.ReplicaDivergenceError, names=names, fix="all_reduce"):
        two.run(lambda x: forgets(captured, x), (rows,))
    for wrong in (sums, scales_twice):
        with raises(mirror.VerifyError, names=["rtol", "v"], values=[2, "1e-05"]):
            two.verify(wrong, (v, rows))
    with raises(mirror.VerifyError, names=["rtol", "seen"], values=[2, "1e-05"]):
        two.verify(lambda x: scales_twice(captured, x), (rows,))
    assert (float(v), float(captured), int(own)) == (1, 1, 0)


def test_verify_checks_aggregated_variables(two):
    """A mean of means equals the mean of the whole batch; a hand-written count does not."""
    mean, count = variable(0.0, "mean", name="mean"), variable(0.0, "sum", name="count")
    (rows,) = rows_of(two, (X,))
    two.verify(lambda x: nothing(mean.assign(x.mean())), (rows,))
    two.verify(lambda x: nothing(count.assign_add(float(x.shape[0]))), (rows,))
    with raises(mirror.VerifyError, names=["rtol", "count"], values=[2, "1e-05"]):
        two.verify(lambda x: nothing([count.assign_add(1.0), x]), (rows,))
    assert (float(mean), float(count)) == (0, 0)


def test_check_mirrored_names_differing_copies(two):
    with two.scope():
        v, own = variable(1.0, name="v"), on_read()
    two.run(lambda: nothing(own.assign(number())))
    two.check_mirrored({"v": v, "own": own})
    different = [jax.device_put(np.float32(i), d) for i, d in enumerate(two.devices)]
    v.set_raw_value(jax.make_array_from_single_device_arrays((), v[...].sharding, different))
    with raises(mirror.ReplicaDivergenceError, names="['v']", values=1, fix="local_results"):
        two.check_mirrored({"v": v, "own": own})
    assert replica_id() == 0
