"""Steps ported from other libraries and `jax.pmap`: axis names, static leaves and mistakes."""

import warnings
from typing import Any

import flax.jax_utils
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax

import mirror
from mirror import PerReplica
from tests.support.messages import assert_message, raises
from tests.support.strategies import ON_HOST, cpu_strategy

EXECUTORS = {
    "one": {"num_devices": 1},
    "pmap": {"num_devices": 2},
    "pairs": {"num_devices": 2, "replicas_per_device": 2},
    "staged": {"num_devices": 2, "cross_device_ops": ON_HOST},
}


def batch_for(strategy, shape=(2, 3)):
    n = strategy.num_replicas_in_sync
    rows = np.random.RandomState(0).randn(n * shape[0], *shape[1:]).astype(np.float32)
    (batch,) = strategy.distribute_dataset([rows])
    return batch, rows


class Normalized(linen.Module):
    axis_name: str

    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)


@pytest.mark.slow
def test_pmap_step_runs_under_its_own_axis_name(subtests):
    for executor, layout in EXECUTORS.items():
        with subtests.test(msg=executor):
            check_pmap_step_runs_under_its_own_axis_name(layout)


def check_pmap_step_runs_under_its_own_axis_name(layout):
    strategy = cpu_strategy(**layout, axis_name="batch")
    batch, rows = batch_for(strategy)
    model = Normalized("batch")
    variables = Normalized(None).init(jax.random.key(0), rows)

    def step(variables, x):
        y, updates = model.apply(variables, x, mutable=["batch_stats"])
        context = mirror.get_replica_context()
        total = lax.psum(x.sum(), "batch"), context.all_reduce("sum", x.sum())
        return y, updates, total, context.replica_id_in_sync_group

    y, updates, total, ids = strategy.run(step, (variables, batch))
    alone, wanted = Normalized(None).apply(variables, rows, mutable=["batch_stats"])
    np.testing.assert_allclose(np.concatenate(y.values), alone, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates, wanted)
    np.testing.assert_allclose(total, rows.sum(), rtol=1e-5)
    np.testing.assert_array_equal(ids, np.arange(strategy.num_replicas_in_sync))
    strategy.verify(lambda v, x: lax.pmean(x.mean(0), "batch"), (variables, batch))
    np.testing.assert_allclose(strategy.reduce("sum", batch, axis=(0, 1)), rows.sum(), rtol=1e-5)
    strategy.check_mirrored(updates)


def test_axis_name_must_be_a_string(subtests):
    for name, error, values in [("", ValueError, []), (3, TypeError, [3, "int"])]:
        with subtests.test(msg=f"{name}, {error}, {values}"):
            for make in (
                mirror.MirroredStrategy,
                lambda **k: mirror.OneDeviceStrategy("/cpu:0", **k),
            ):
                with raises(error, names="axis_name", values=values, fix="axis_name='batch'"):
                    make(axis_name=name)


SLIPS = {
    "another axis": (
        lambda x: lax.pmean(x, "batch"),
        {
            "names": ["<lambda>", "'batch'", "'replica'"],
            "fix": ["mirror.REPLICA_AXIS", "mirror.MirroredStrategy(axis_name='batch')"],
        },
    ),
    "pmap": (
        jax.pmap(lambda x: lax.pmean(x, "batch"), axis_name="batch"),
        {"names": "jax.pmap", "fix": "@jax.pmap"},
    ),
    "nnx.pmap": (nnx.pmap(lambda x: x, axis_name="batch"), {"names": ["jax.pmap", "nnx.pmap"]}),
    "pcast": (
        lambda x: lax.pcast(x, mirror.REPLICA_AXIS, to="varying"),
        {"names": ["<lambda>", "jax.lax.pcast"], "fix": "all_reduce("},
    ),
    "pmap inside": (lambda x: jax.pmap(jnp.sin)(x), {"names": ["<lambda>", "jax.pmap"]}),
}


def test_errors_name_leftovers_of_a_pmap_program(subtests):
    for slip in SLIPS:
        for executor, layout in EXECUTORS.items():
            with subtests.test(msg=f"{slip}, {executor}"):
                strategy = cpu_strategy(**layout)
                step, wanted = SLIPS[slip]
                with raises(ValueError, **wanted):
                    strategy.run(step, (batch_for(strategy)[0],))


def test_errors_name_replicated_state():
    strategy = cpu_strategy(2)
    state = flax.jax_utils.replicate({"w": jnp.ones(3)}, jax.devices("cpu")[:2])
    found = ["float32[2,3]", 2]
    with raises(ValueError, names="state['w']", values=found, fix="unreplicate(state)"):
        strategy.run(lambda state, x: state["w"] * x, (state, batch_for(strategy)[0]))


def test_static_leaves_are_returned_unchanged(subtests):
    for executor, layout in EXECUTORS.items():
        with subtests.test(msg=executor):
            check_static_leaves_are_returned_unchanged(layout)


def check_static_leaves_are_returned_unchanged(layout):
    strategy = cpu_strategy(**layout)
    given = {"f": jnp.tanh, "s": "text", "flag": True, "none": None, "w": jnp.ones(3)}
    traced = []

    def step(state, x):
        traced.append(1)
        assert state["flag"] is True
        w = state["w"] + lax.pmean(state["f"](x).mean(0), mirror.REPLICA_AXIS)
        return {**state, "w": w}, state["s"], False

    state = given
    for _ in range(3):
        state, text, flag = strategy.run(step, (state, batch_for(strategy)[0]))
    assert len(traced) == 1
    assert (text, flag) == ("text", False)
    assert {k: v for k, v in state.items() if k != "w"} == {
        k: v for k, v in given.items() if k != "w"
    }
    assert isinstance(state["w"], jax.Array)
    report = strategy.verify(step, (state, batch_for(strategy)[0]))
    assert "result[0]['w']" in str(report)


@pytest.mark.nightly
def test_run_accepts_equinox_models(subtests):
    for executor, layout in EXECUTORS.items():
        with subtests.test(msg=executor):
            check_run_accepts_equinox_models(layout)


def check_run_accepts_equinox_models(layout):
    pytest.importorskip("equinox")
    import equinox as eqx

    strategy = cpu_strategy(**layout)

    class Net(eqx.Module):
        conv: eqx.nn.Conv1d
        pool: eqx.nn.MaxPool1d
        drop: eqx.nn.Dropout
        rate: float
        flag: bool
        act: Any

        def __call__(self, x):
            assert type(self.rate) is float, "a number of a module is a setting"
            assert type(self.drop.p) is float
            x = self.pool(self.act(self.conv(x[None])))
            return jnp.sum(self.drop(x, inference=self.flag)) * self.rate

    net = Net(
        eqx.nn.Conv1d(1, 2, 1, key=jax.random.key(0)),
        eqx.nn.MaxPool1d(2),
        eqx.nn.Dropout(0.5),
        0.5,
        True,
        jax.nn.relu,
    )
    adam = optax.adam(1e-2)
    traced = []

    def step(net, state, x):
        traced.append(1)

        def loss(net):
            return jnp.mean(jax.vmap(net)(x) ** 2)

        grads = eqx.filter_grad(loss)(net)
        grads = mirror.all_reduce("mean", grads)
        updates, state = adam.update(grads, state, net)
        return eqx.apply_updates(net, updates), state

    state = adam.init(eqx.filter(net, eqx.is_array))
    batch, rows = batch_for(strategy)
    alone, alone_state = net, state
    for _ in range(3):
        net, state = strategy.run(step, (net, state, batch))
    assert len(traced) == 1
    assert (net.rate, net.flag, net.act, net.drop.p) == (0.5, True, jax.nn.relu, 0.5)
    one = cpu_strategy(1)
    (whole,) = one.distribute_dataset([rows])
    for _ in range(3):
        alone, alone_state = one.run(step, (alone, alone_state, whole))
    np.testing.assert_allclose(net.conv.weight, alone.conv.weight, rtol=1e-5)
    strategy.verify(step, (net, state, batch))
    changed = eqx.tree_at(lambda net: net.rate, net, 0.25)
    strategy.run(step, (changed, state, batch))
    assert len(traced) > 3 - (strategy.num_replicas_in_sync == 1), "a new number is a new program"

    def broken(net, state, x):
        grads = eqx.filter_grad(lambda net: jnp.mean(jax.vmap(net)(x) ** 2))(net)
        updates, state = adam.update(grads, state, net)
        return eqx.apply_updates(net, updates), state

    wanted = {"names": ["broken", "net.conv.weight"], "fix": "all_reduce"}
    with raises(mirror.ReplicaDivergenceError, **wanted):
        strategy.run(broken, (net, state, batch), donate_argnums=(0, 1))


def test_equal_static_numbers_of_different_types_compile_separately(subtests):
    for value in [0.0, -0.0, float("nan"), 1, 1.0, True]:
        with subtests.test(msg=f"{value}"):
            check_equal_static_numbers_of_different_types_compile_separately(value)


def check_equal_static_numbers_of_different_types_compile_separately(value):
    pytest.importorskip("equinox")
    import equinox as eqx

    class Held(eqx.Module):
        value: Any

    strategy = cpu_strategy(1)
    show = lambda held: (held, jnp.copysign(1.0, held.value))  # noqa: E731
    for first in (0.0, -0.0, 1, 1.0, True):
        strategy.run(show, (Held(first),))
    held, sign = strategy.run(show, (Held(value),))
    assert type(held.value) is type(value)
    assert repr(held.value) == repr(value)
    assert float(sign) == np.copysign(1, value)


def shared_noise(x):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0.0).mean()


def own_noise(x):
    key = mirror.get_replica_context().fold_in(jax.random.key(0))
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0).mean()


def noisy_weights(x):
    w = jnp.ones(x.shape[-1]) + 0.1 * jax.random.normal(jax.random.key(0), x.shape[-1:])
    return (x @ w).mean()


def masked(layer):
    """Returns a step that trains weights with a random mask, as DropConnect does."""

    def step(x):
        mask = jax.random.bernoulli(jax.random.key(0), 0.5, WEIGHTS.shape)
        grads = jax.grad(lambda w: (layer(x, w * mask) ** 2).mean())(WEIGHTS)
        return mirror.all_reduce("mean", grads)

    return step


WEIGHTS = jnp.ones((3, 3))
LAYERS = {
    "dense": lambda x, w: x @ w,
    "transposed": lambda x, w: x @ w.T,
    "of sequences": lambda x, w: jnp.stack([x, x], 1) @ w,
    "summed": lambda x, w: jax.vmap(lambda r: r * w)(x),
    "convolution": lambda x, w: jax.lax.conv(x[:, :, None], w[:, :, None], (1,), "SAME"),
}


def reduced(x):
    return mirror.all_reduce("mean", x.mean())


def pure(x):
    y = jax.pure_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), np.float32))
    return y + mirror.all_reduce("mean", x.mean())


def pure_and_reduced(x):
    y = jax.pure_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), np.float32))
    return mirror.all_reduce("mean", x.mean() + y)


# name: the step, whether its batch is distributed, and what the warning holds, if there is one,
# beside the names of the step and of this file
WARNED = {
    "dropout with one key": (shared_noise, True, {"values": 2, "fix": "fold_in"}),
    "dropout with its own key": (own_noise, True, None),
    "noise on weights": (noisy_weights, True, None),
    **{f"mask of weights, {name}": (masked(f), True, None) for name, f in LAYERS.items()},
    "mask of summed examples": (
        lambda x: (x.sum(-1) * jax.random.normal(jax.random.key(0), x.shape[:1])).mean(),
        True,
        {"values": 2, "fix": "fold_in"},
    ),
    "a whole batch": (reduced, False, {"values": 2, "fix": "distribute_dataset"}),
    "a distributed batch": (reduced, True, None),
    "a pure callback": (pure, True, {"fix": ["pure_callback", "all_reduce"]}),
    "a pure callback, reduced": (pure_and_reduced, True, None),
}


def test_likely_mistakes_are_warned_of_once(subtests):
    for name in WARNED:
        for num_devices in [1, 2]:
            with subtests.test(msg=f"{name}, {num_devices}"):
                check_likely_mistakes_are_warned_of_once(name, num_devices)


def check_likely_mistakes_are_warned_of_once(name, num_devices):
    step, distributed, wanted = WARNED[name]
    strategy = cpu_strategy(num_devices)
    batch, rows = batch_for(strategy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for shape in ((2, 3), (2, 3), (4, 3)):
            batch, rows = batch_for(strategy, shape)
            strategy.run(step, (batch if distributed else rows,))
    messages = [str(w.message) for w in caught]
    if wanted is None or num_devices == 1:
        assert not messages
        return
    (message,) = messages
    assert_message(message, names=[step.__name__, "test_ported_steps.py"], **wanted)
    assert caught[0].filename == __file__


def test_shared_gradients_equal_those_of_the_whole_batch(subtests):
    for executor, layout in EXECUTORS.items():
        with subtests.test(msg=executor):
            check_shared_gradients_equal_those_of_the_whole_batch(layout)


def check_shared_gradients_equal_those_of_the_whole_batch(layout):
    strategy = cpu_strategy(**layout)
    batch, rows = batch_for(strategy, (4, 3))

    def step(w, x):
        context = mirror.get_replica_context()
        plain = lambda w: context.all_reduce("mean", jnp.mean((x @ w) ** 2))  # noqa: E731
        shared = lambda w: plain(context.shared({"w": w, "n": 3})["w"])  # noqa: E731
        total = lambda w: context.all_reduce("sum", jnp.sum((x @ w) ** 2)) / len(rows)  # noqa: E731
        own = jax.grad(plain)(w)
        reduced = context.all_reduce("mean", (own, jax.grad(total)(w)))
        return jax.grad(shared)(w), own, reduced

    w = jnp.ones(3)
    whole, own, reduced = strategy.run(step, (w, batch))
    wanted = jax.grad(lambda w: jnp.mean((rows @ w) ** 2))(w)
    for gradient in (whole, *reduced):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5)
    assert isinstance(own, PerReplica)


def test_line_search_with_an_unshared_gradient_names_what_to_share(two):
    batch, _ = batch_for(two)

    def search(w, x):
        value = lambda w: lax.pmean(jnp.mean((x @ w - 1) ** 2), mirror.REPLICA_AXIS)  # noqa: E731
        grad = jax.grad(value)
        return lax.while_loop(
            lambda w: jnp.sum(grad(w) ** 2) > 1e-3, lambda w: w - 0.1 * grad(w), w
        )

    with raises(mirror.ReplicaDivergenceError, fix="replica_context.shared(params)"):
        two.run(search, (jnp.ones(3), batch))
