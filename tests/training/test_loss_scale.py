"""`LossScale`: gradients that float16 cannot represent, and steps that all replicas skip."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import LossScale
from tests.support.messages import raises
from tests.support.strategies import EXECUTORS, cpu_strategy
from tests.support.tables import mostly_slow
from tests.support.training import fit

RNG = np.random.RandomState(0)
X = (RNG.randint(-4, 5, (24, 4)) / 8).astype(np.float32)
Y = (RNG.randint(-8, 9, 24) / 4).astype(np.float32)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, axis_name=mirror.REPLICA_AXIS, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.seen[...] += 1
        return self.out(self.norm(self.first(x)))[:, 0].astype(jnp.float32)


def squares(model, batch):
    return batch["factor"] * (model(batch["x"]) - batch["y"]) ** 2


def weighted(model, batch):
    return mirror.Weighted(squares(model, batch), jnp.full(len(batch["y"]), 2.0))


def batch_of(x=None, factor=None, row=0):
    """Returns a batch of 8 rows, of which one may differ: on replica 0 of 2 if it is row 0."""
    batch = {"x": X[:8].copy(), "y": Y[:8].copy(), "factor": np.full(8, 1 / 16, np.float32)}
    if x is not None:
        batch["x"][row] = x
    if factor is not None:
        batch["factor"][row] = factor
    return batch


GOOD = batch_of()
# A row of one replica that makes gradients infinite or NaN.
BAD = {
    "activation": batch_of(x=6e4),
    "gradient": batch_of(factor=1e30, row=7),
    "infinite input": batch_of(x=np.inf),
    "NaN": batch_of(factor=np.nan, row=5),
}


def clipped():
    return optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.25, momentum=0.5))


def trainer_of(strategy=None, tx=None, loss_fn=squares, model=None, **kwargs):
    strategy = strategy or cpu_strategy(2)
    with strategy.scope():
        return mirror.Trainer(model or Net(), tx or clipped(), loss_fn, strategy=strategy, **kwargs)


def arrays(*objects):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(objects))]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def numbers(scale):
    return (
        float(scale.current[...]),
        int(scale.finite_steps[...]),
        int(scale.num_skipped[...]),
    )


# One decision for all replicas


BAD_BY_EXECUTOR = {"pmap": list(BAD), "staged": ["activation"]}


@pytest.mark.filterwarnings("ignore:The loss is")
@pytest.mark.parametrize("rows", mostly_slow(BAD_BY_EXECUTOR, "pmap"))
def test_overflow_on_one_replica_skips_the_step_of_all(subtests, rows):
    for executor in rows:
        strategy = EXECUTORS[executor]()
        trainer = trainer_of(strategy, optax.adam(0.1), precision="float16")
        state = jax.tree.map(np.asarray, nnx.state((trainer.model, trainer.optimizer)))
        for bad in BAD_BY_EXECUTOR[executor]:
            with subtests.test(msg=f"{executor}: {bad}"):
                nnx.update((trainer.model, trainer.optimizer), jax.tree.map(np.copy, state))
                trainer.loss_scale.reset()
                check_overflow(trainer, BAD[bad])


def check_overflow(trainer, bad):
    objects = trainer.model, trainer.optimizer
    fit(trainer, [GOOD])
    before, scale = arrays(*objects), trainer.loss_scale
    assert numbers(scale) == (2**15, 1, 0)
    history = fit(trainer, [bad])
    assert_same(arrays(*objects), before)
    assert numbers(scale) == (2**14, 0, 1)
    assert (history["loss_scale"], history["skipped"]) == ([2**15], [1])
    history = fit(trainer, [GOOD, bad, GOOD])
    assert not any(np.array_equal(a, b) for a, b in zip(arrays(*objects), before, strict=True))
    assert all(np.isfinite(x).all() for x in arrays(*objects))
    assert numbers(scale) == (2**13, 1, 2)
    np.testing.assert_allclose(history["skipped"], 1 / 3)
    assert history["loss_scale"] == [(2**14 + 2**14 + 2**13) / 3]
    trainer.strategy.check_mirrored((*objects, scale))
    assert set(trainer.evaluate([GOOD])) == {"loss"}


def linear(model, batch):
    return batch["factor"] * model.w[...]


class Weight(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))


@pytest.mark.parametrize("rows", mostly_slow(EXECUTORS, "pmap"))
def test_sum_that_overflows_in_the_collective_skips_the_step(subtests, rows):
    """The gradients of 2**127 on both replicas are finite in float32, and their sum is not."""
    for executor in rows:
        with subtests.test(msg=executor):
            scale = LossScale(2.0**127)
            trainer = trainer_of(
                EXECUTORS[executor](), optax.sgd(0.25), linear, Weight(), loss_scale=scale
            )
            for factor, weight, state in ((2, 1, (2**126, 0, 1)), (2, 0.5, (2**126, 1, 1))):
                fit(trainer, [{**GOOD, "factor": np.full(8, factor, np.float32)}])
                assert float(trainer.model.w[...]) == weight
                assert numbers(scale) == state


WAYS = {
    "plain": {},
    "weighted, accumulated and grouped": {
        "loss_fn": weighted,
        "accumulate_steps": 2,
        "steps_per_execution": 2,
    },
    "adam, sharded": {
        "strategy": lambda: cpu_strategy(4, shard="optimizer"),
        "tx": lambda: optax.chain(optax.clip_by_global_norm(0.01), optax.adam(0.1)),
    },
    "an nnx.Optimizer": {"optimizer": True},
}


class Plain(nnx.Module):
    """Without batch normalization, whose statistics depend on the pieces of a batch."""

    def __init__(self):
        self.first = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(4, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.out(self.first(x))[:, 0]


@pytest.mark.filterwarnings("ignore:The loss is")
@pytest.mark.parametrize("rows", mostly_slow(WAYS, "plain"))
def test_training_with_skipped_steps_is_one_on_the_other_batches(subtests, rows):
    """A power of 2 rounds nothing, and the transformation sees gradients without it: the same bits.

    Clipping would differ by the scale otherwise, and momentum by the skipped step.
    """
    for way in rows:
        with subtests.test(msg=way):
            check_training_with_skipped_steps_is_one_on_the_other_batches(way)


def check_training_with_skipped_steps_is_one_on_the_other_batches(way):
    kwargs = dict(WAYS[way])
    make, tx = kwargs.pop("strategy", lambda: cpu_strategy(2)), kwargs.pop("tx", clipped)
    is_passed = kwargs.pop("optimizer", False)

    def train(data, **more):
        model = Plain()
        optimizer = nnx.Optimizer(model, tx(), wrt=nnx.Param) if is_passed else tx()
        trainer = trainer_of(make(), optimizer, model=model, **kwargs, **more)
        fit(trainer, data)
        trainer.strategy.check_mirrored((trainer.model, trainer.optimizer))
        return trainer

    bad = BAD["NaN"]
    scaled = train([bad, GOOD, bad, GOOD, GOOD, bad], loss_scale=LossScale(2.0**10))
    plain = train([GOOD] * 3)
    state = arrays(plain.model, plain.optimizer)
    for a, b in zip(arrays(scaled.model, scaled.optimizer), state, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert numbers(scaled.loss_scale) == (2**7, 0, 3)


@pytest.mark.slow
def test_sharded_update_stays_sharded():
    trainer = trainer_of(
        cpu_strategy(4, shard="optimizer"), optax.adam(0.1), loss_scale=LossScale()
    )
    fit(trainer, [GOOD])
    kernel = trainer.optimizer.opt_state[0].mu["first"]["kernel"][...]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size


def test_gradients_that_float16_would_round_to_zero_train():
    """Losses of 1e-8 have gradients below 6e-8."""
    tiny = batch_of()
    tiny["factor"][:] = 1e-8

    def moved(**kwargs):
        trainer = trainer_of(tx=optax.sgd(1e7), model=Plain(), precision="float16", **kwargs)
        before = arrays(trainer.model)
        fit(trainer, [tiny])
        return [np.abs(a - b).max() for a, b in zip(arrays(trainer.model), before, strict=True)]

    assert max(moved(loss_scale=False)) < min(moved()) / 2
    exact = trainer_of(tx=optax.sgd(1e7), model=Plain())
    before = arrays(exact.model)
    fit(exact, [tiny])
    wanted = [np.abs(a - b).max() for a, b in zip(arrays(exact.model), before, strict=True)]
    np.testing.assert_allclose(moved(), wanted, rtol=0.02)


# The scale


def test_scale_grows_shrinks_and_stays_in_its_limits():
    scale = LossScale(4.0, growth_interval=2, factor=4.0, minimum=2.0)
    good, bad = {"w": jnp.ones(3)}, {"w": jnp.asarray([1, jnp.nan]), "b": jnp.ones(())}
    wanted = [
        (good, (4, 1, 0)),
        (good, (16, 0, 0)),
        (good, (16, 1, 0)),
        (bad, (4, 0, 1)),
        (bad, (2, 0, 2)),
        (bad, (2, 0, 3)),
        (good, (2, 1, 3)),
        (good, (8, 0, 3)),
    ]
    for grads, state in wanted:
        assert bool(scale.update(grads)) is (grads is good)
        assert numbers(scale) == state
    scale.reset()
    assert numbers(scale) == (4, 0, 0)
    largest = LossScale(2.0**127, growth_interval=1)
    for _ in range(3):
        largest.update(good)
    assert numbers(largest)[0] == 2.0**127


def test_loss_and_gradients_keep_their_digits(subtests):
    for dtype in ["float16", "bfloat16", "float32"]:
        with subtests.test(msg=str(dtype)):
            scale = LossScale(2.0**20)
            loss = scale.scale(jnp.asarray(3.0, dtype))
            assert (loss.dtype, float(loss)) == ("float32", 3 * 2**20)
            grads = {"w": jnp.asarray([3.0, 2.0**-4], dtype), "count": jnp.ones((), "float32")}
            unscaled = scale.unscale(grads)
            assert {name: x.dtype for name, x in unscaled.items()} == {
                "w": dtype,
                "count": "float32",
            }
            np.testing.assert_array_equal(
                unscaled["w"], (np.asarray([3.0, 2.0**-4]) / 2**20).astype(dtype)
            )
            assert bool(scale.update({}))


def test_scale_of_a_checkpoint_continues_as_without_the_interrupt(tmp_path):
    def new():
        scale = LossScale(2.0**12, growth_interval=3)
        return trainer_of(precision="float16", loss_scale=scale)

    one, two = new(), new()
    data = [BAD["gradient"], GOOD, GOOD, BAD["gradient"], GOOD]
    fit(one, data)
    one.save(tmp_path)
    assert numbers(one.loss_scale) == (2**10, 1, 2)
    assert mirror.load_checkpoint(tmp_path).arrays["loss_scale.current"] == 2**10
    two.restore(tmp_path)
    assert numbers(two.loss_scale) == (2**10, 1, 2)
    for trainer in (one, two):
        fit(trainer, [GOOD, GOOD, GOOD], initial_epoch=0)
        assert numbers(trainer.loss_scale) == (2**11, 1, 2)
    assert_same(arrays(one.model, one.optimizer), arrays(two.model, two.optimizer))


@pytest.mark.slow
def test_verify_and_other_methods_leave_the_scale_alone():
    trainer = trainer_of(precision="float16", model=Plain(), loss_fn=weighted)
    assert trainer.verify([GOOD]).largest <= 0.004
    trainer.evaluate([GOOD])
    trainer.predict([GOOD], lambda model, batch: model(batch["x"]))
    assert numbers(trainer.loss_scale) == (2**15, 0, 0)


# Gradients that are never finite


class Root(nnx.Module):
    """Its gradient is NaN, and its loss is not."""

    def __init__(self):
        self.w = nnx.Param(jnp.zeros(()))

    def __call__(self, x):
        return jnp.sqrt(self.w[...] * 0) * x[:, 0]


def stuck_trainer(minimum=1.0, **kwargs):
    scale = LossScale(4 * minimum, minimum=minimum)
    return trainer_of(model=Root(), tx=optax.sgd(0.1), loss_scale=scale, **kwargs)


@pytest.mark.parametrize("rows", mostly_slow([1, 2], 2))
def test_gradients_that_are_never_finite_warn_once(subtests, rows):
    for group in rows:
        with subtests.test(msg=str(group)):
            trainer = stuck_trainer(steps_per_execution=group)
            with pytest.warns(UserWarning, match="sqrt") as caught:
                fit(trainer, [GOOD] * 8)
            (message,) = (str(each.message) for each in caught)
            assert "NaNGuard" in message
            assert numbers(trainer.loss_scale) == (1, 0, 8)


def test_nan_guard_ends_a_training_that_never_updates(subtests):
    """Also with a minimum that float32 rounds up, and with numbers of NumPy."""
    for minimum in [1.0, 0.1, np.float32(0.1), 3]:
        with subtests.test(msg=str(minimum)):
            trainer = stuck_trainer(minimum)
            with raises(
                FloatingPointError, names="sqrt(0)", values="step 3", fix="precision='bfloat16'"
            ):
                fit(trainer, [GOOD] * 20, callbacks=mirror.callbacks.NaNGuard())


def test_nan_guard_lets_skipped_steps_pass():
    data = [batch_of(factor=1e30)] + [GOOD] * 4
    trainer = trainer_of(precision="float16")
    fit(trainer, data, callbacks=mirror.callbacks.NaNGuard())
    assert int(trainer.loss_scale.num_skipped[...]) == 1


# Steps written by hand


def step(model, optimizer, loss_scale, batch):
    def loss_fn(model):
        return loss_scale.scale(squares(model, batch).mean())

    grads = nnx.grad(loss_fn)(model)
    grads = mirror.all_reduce("mean", grads)
    return loss_scale.apply(optimizer, model, loss_scale.unscale(grads))


@pytest.mark.parametrize("rows", mostly_slow(("pmap", "staged"), "pmap"))
def test_a_step_of_the_user_skips_on_all_replicas(subtests, rows):
    for executor in rows:
        with subtests.test(msg=executor):
            strategy = EXECUTORS[executor]()
            with strategy.scope():
                model, scale = Net(), LossScale()
                optimizer = nnx.Optimizer(model, clipped(), wrt=nnx.Param)
            model.set_attributes(dtype=jnp.float16)
            params = functools.partial(arrays, optimizer)
            weights = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
            for batch, is_finite in ((BAD["gradient"], False), (GOOD, True)):
                before = params()
                (shards,) = strategy.distribute_dataset([batch])
                assert bool(strategy.run(step, (model, optimizer, scale, shards))) is is_finite
                assert is_finite or all(map(np.array_equal, params(), before))
                strategy.check_mirrored((model, optimizer, scale))
            assert numbers(scale) == (2**14, 1, 1)
            after = jax.tree.leaves(nnx.state(model, nnx.Param))
            assert not any(map(np.array_equal, after, weights))
            assert strategy.verify(step, (model, optimizer, scale, shards), rtol=0.004)


def test_update_with_gradients_of_one_replica_is_an_error():
    strategy = cpu_strategy(2)
    scale = LossScale()

    def local(scale, x):
        return scale.update({"w": x.sum()})

    (shards,) = strategy.distribute_dataset([X[:8]])
    with raises(mirror.ReplicaDivergenceError, names="scale.current"):
        strategy.run(local, (scale, shards))


# What is rejected


WRONG = {
    "not greater than 1": ({"factor": 1.0}, ValueError, "`factor`"),
    "1 in float32": ({"factor": 1 + 1e-9}, ValueError, "`factor`"),
    "0 in float32": ({"minimum": 1e-46}, ValueError, "`minimum`"),
    "infinite factor": ({"factor": math.inf}, ValueError, "`factor`"),
    "zero": ({"initial": 0}, ValueError, "`initial`"),
    "NaN": ({"initial": math.nan}, ValueError, "`initial`"),
    "beyond float32": ({"initial": 1e39}, ValueError, "`initial`"),
    "text": ({"initial": "dynamic"}, TypeError, "`initial`"),
    "negative minimum": ({"minimum": -1.0}, ValueError, "`minimum`"),
    "minimum above the start": ({"initial": 2.0, "minimum": 4.0}, ValueError, "minimum=4.0"),
    "no steps": ({"growth_interval": 0}, ValueError, "`growth_interval`"),
    "half a step": ({"growth_interval": 1.5}, TypeError, "`growth_interval`"),
}


def test_wrong_numbers_are_rejected(subtests):
    for row in WRONG:
        with subtests.test(msg=row):
            kwargs, kind, name = WRONG[row]
            with raises(kind, names=name):
                LossScale(**kwargs)


def test_wrong_loss_scale_of_a_trainer_is_rejected(subtests):
    for value, fix in [
        (1024.0, "mirror.LossScale(1024.0)"),
        ("dynamic", "mirror.LossScale()"),
        (True, "mirror.LossScale()"),
        (LossScale, "mirror.LossScale()"),
    ]:
        with subtests.test(msg=repr(value)), raises(TypeError, names="`loss_scale`", fix=fix):
            trainer_of(loss_scale=value)


@pytest.mark.parametrize("rows", mostly_slow(["loss_scale", "skipped"], "skipped"))
def test_metrics_of_the_same_names_are_an_error(subtests, rows):
    for name in rows:
        with subtests.test(msg=name):
            check_metrics_of_the_same_names_are_an_error(name)


def check_metrics_of_the_same_names_are_an_error(name):
    def loss_fn(model, batch):
        return squares(model, batch), {name: batch["y"]}

    with raises(ValueError, names=repr(name), fix="Rename"):
        fit(trainer_of(loss_fn=loss_fn, loss_scale=LossScale()), [GOOD])
    fit(trainer_of(loss_fn=loss_fn), [GOOD])


def test_trainer_has_a_scale_exactly_where_it_is_needed():
    own = LossScale(8.0)
    for precision in (None, "float32", "bfloat16", "float16"):
        assert (trainer_of(precision=precision).loss_scale is not None) is (precision == "float16")
        assert trainer_of(precision=precision, loss_scale=own).loss_scale is own
        assert trainer_of(precision=precision, loss_scale=False).loss_scale is None
    assert repr(own) == "LossScale(initial=8, growth_interval=2000, factor=2, minimum=1)"
