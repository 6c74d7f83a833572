"""`mirror.testing`: the asserts find and name errors."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import testing
from tests.support import inside
from tests.support.copies import with_one_bit_flipped
from tests.support.messages import assert_message, raises
from tests.support.models import MLP, batches, linen_step, linen_training, nnx_step
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows
from tests.support.waiting import wait_until

BATCH = batches(MLP.features, 1)[0]

asserts, plugin_support = inside.asserts_and_support()


def per_replica(strategy, batch=BATCH):
    (batch,) = strategy.distribute_dataset([batch], prefetch=0)
    return batch


def nnx_state(strategy):
    with strategy.scope():
        model = MLP(rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def plain_step(params, batch, *, reduce="mean"):
    def loss_fn(params):
        return jnp.mean((batch["image"] @ params["w"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    grads, loss = mirror.all_reduce(reduce, (grads, loss))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def sum_step(params, batch):
    return plain_step(params, batch, reduce="sum")


def forgetful_step(params, batch):
    params, _ = plain_step(params, batch)
    return mirror.ensure_mirrored(jax.tree.map(lambda p: p + batch["image"].mean(), params))


def lonely_step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(batch["image"] @ p["w"]))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def loss_step(params, batch):
    loss = jnp.mean((batch["image"] @ params["w"]) ** 2)
    return mirror.all_reduce("mean", loss)


PARAMS = {"w": np.ones((12, 3), np.float32) / 12}


# assert_mirrored


def test_mirrored_state_passes_in_and_outside_its_scope(two):
    state = nnx_state(two)
    testing.assert_mirrored(state, two)
    with two.scope():
        testing.assert_mirrored(state)


WRONG: dict[str, tuple] = {
    "differs": (
        lambda s: with_one_bit_flipped(s, np.ones(3, np.float32), 1, 0),
        {"names": "['x']", "values": 1, "fix": "strategy.local_results"},
    ),
    "PerReplica": (
        lambda s: mirror.PerReplica([np.ones(2)] * 2),
        {"names": "['x']", "fix": "PerReplica"},
    ),
    "elsewhere": (
        lambda s: jax.device_put(1.0, jax.devices()[7]),
        {"names": "['x']", "fix": "strategy.scope()"},
    ),
}


@rows("what", list(WRONG))
def test_assert_mirrored_names_the_leaves(what, two):
    make, said = WRONG[what]
    with raises(AssertionError, **said):
        testing.assert_mirrored({"good": 1.0, "x": make(two)}, two)


def test_assert_mirrored_requires_a_strategy():
    takes = "assert_mirrored(tree, strategy)"
    with raises(RuntimeError, names="assert_mirrored", fix=["scope", takes]):
        testing.assert_mirrored(1.0)
    fix = "mirror.MirroredStrategy()"
    with raises(TypeError, names="strategy", values="3 (int)", fix=fix):
        testing.assert_mirrored(1.0, 3)
    with raises(TypeError, names="strategy", values="3 (int)", fix=fix):
        train(plain_step, strategy=3)


# assert_trains_like_one_device


def train(step, *, strategy, args=None, **kwargs):
    args = (PARAMS, BATCH) if args is None else args
    return testing.assert_trains_like_one_device(step, args, strategy, **kwargs)


def names(report):
    return [row.name for row in report.rows]


def test_nnx_objects_are_trained_by_reference_and_left_unchanged(two):
    state = nnx_state(two)
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(state)))
    report = train(nnx_step, strategy=two, args=(*state, per_replica(two)), steps=2)
    assert names(report)[:2] == ["result['step 1']", "result['step 2']"]
    assert "model.first.kernel" in names(report)
    assert report.largest > 0
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(state)))


@pytest.mark.slow
def test_linen_state_is_carried_between_steps(two):
    state = linen_training(lambda: optax.sgd(0.1)).create()
    report = train(linen_step, strategy=two, args=(state, per_replica(two)), steps=2)
    assert "result['state'].params['Dense_0']['kernel']" in names(report)
    assert "result['step 2'][0]" in names(report)


@rows("executor", ["pmap", "vmap", "staged"])
def test_state_is_carried_between_steps(executor):
    """Three steps change the weights as much as three hand-written ones."""
    strategy = plugin_support.make_strategy(executor, 3, jax.devices("cpu"))
    args = (PARAMS, per_replica(strategy))
    seen = []
    for steps in (1, 3):
        several = asserts._repeated(plain_step, steps, True)
        seen.append(np.asarray(strategy.run(several, args)["state"]["w"]))
        train(plain_step, strategy=strategy, args=args, steps=steps)
    params = PARAMS
    for i in range(3):
        params, _ = strategy.run(plain_step, (params, args[1]))
        if i == 0:
            np.testing.assert_allclose(params["w"], seen[0], rtol=1e-6)
    np.testing.assert_allclose(params["w"], seen[1], rtol=1e-5)
    assert abs(seen[1] - seen[0]).max() > 1e-3


@pytest.mark.parametrize(
    "step",
    [plain_step, lambda *a: plain_step(*a)[0], functools.partial(plain_step)],
    ids=["first", "alone", "partial"],
)
def test_state_is_found_in_the_result_of_a_step(step, two):
    report = train(step, strategy=two, args=(PARAMS, per_replica(two)), steps=1)
    assert names(report)[0] == "result['state']['w']"


RETURNS_STATE = "step(state, batch) -> (state, loss)"
FAILING: dict[str, tuple] = {
    "a sum": (sum_step, {"names": ["result['state']['w']", "rtol"], "values": [2, 1e-5]}),
    "no all-reduce": (forgetful_step, {"names": "['w']", "fix": "ensure_mirrored"}),
    "no all-reduce, undeclared": (
        lonely_step,
        {"names": ["lonely_step", "params['w']"], "values": "batch['image']", "fix": "all_reduce"},
    ),
    "no state": (loss_step, {"values": 3, "fix": RETURNS_STATE}),
}


@rows("what", list(FAILING))
def test_differing_training_fails(what, two):
    step, said = FAILING[what]
    with raises(AssertionError, **said):
        train(step, strategy=two, args=(PARAMS, per_replica(two)))


def test_single_array_that_differs_is_named(two):
    def lonely(w, image):
        return w - jax.grad(lambda w: jnp.mean(image @ w))(w)

    with raises(AssertionError, names=["lonely", "w"], fix="all_reduce"):
        train(lonely, strategy=two, args=(PARAMS["w"], per_replica(two)["image"]))


def scaled_step(scale, x):
    return mirror.all_reduce("mean", (x * scale).mean())


@pytest.mark.parametrize("first", [0.5, "batch"])
def test_numbers_and_batches_are_not_state(first, two):
    """A result with their shape is a result of the step, not the argument of the next step."""
    batch = mirror.PerReplica([np.float32([1, 2])] * 2)
    args = (batch if first == "batch" else first, batch)
    with raises(AssertionError, values=1, fix=RETURNS_STATE):
        train(scaled_step, strategy=two, args=args, steps=1)


@rows(
    "steps, error, values",
    [
        (0, ValueError, 0),
        (True, TypeError, "True (bool)"),
        (2.0, TypeError, "2.0 (float)"),
    ],
)
def test_steps_are_counted(steps, error, values, two):
    with raises(error, names="steps", values=values):
        train(plain_step, strategy=two, steps=steps)


def test_wrong_arguments_raise_a_type_error(two):
    with raises(TypeError, names="args"):
        train(plain_step, strategy=two, args=PARAMS)


def test_repeated_comparison_compiles_once(two):
    """Without a warning of repeated compilation."""
    for _ in range(12):
        train(plain_step, strategy=two, args=(PARAMS, per_replica(two)), steps=1)


# What the plugin uses


def test_force_host_devices_accepts_existing_devices():
    plugin_support.force_host_devices(8, "the test")


def test_error_names_who_set_the_host_devices(monkeypatch):
    in_code = ["jax_num_cpu_devices=8", "conftest.py"]
    with raises(RuntimeError, names="the test", values=[4, 8], fix=in_code):
        plugin_support.force_host_devices(4, "the test")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    with raises(RuntimeError, names="the test", values=[4, 8], fix="JAX_NUM_CPU_DEVICES=8"):
        plugin_support.force_host_devices(4, "the test")


@rows(
    "executor, n, devices, replicas, ops",
    [
        ("pmap", 2, 2, 2, "AllReduce"),
        ("vmap", 3, 1, 3, "AllReduce"),
        ("staged", 2, 2, 2, "ReductionToOneDevice"),
        ("pmap", None, 8, 8, "AllReduce"),
        ("vmap", None, 1, 8, "AllReduce"),
        ("staged", None, 8, 8, "ReductionToOneDevice"),
    ],
)
def test_make_strategy_selects_the_executor(executor, n, devices, replicas, ops):
    found = plugin_support.devices_for_tests(on_host=True)
    assert found == plugin_support.devices_for_tests(on_host=False) == tuple(jax.devices())
    strategy = plugin_support.make_strategy(executor, n, found)
    assert len(set(strategy.devices)) == devices
    assert strategy.num_replicas_in_sync == replicas
    assert type(strategy.cross_device_ops).__name__ == ops


def test_pending_launches_name_the_late_devices():
    strategy, late = cpu_strategy(4), threading.Event()

    def wait(replica):
        assert replica != 1 or late.wait(900)
        return np.float32(replica)

    def step(x):
        context = mirror.get_replica_context()
        x = context.all_reduce("sum", x)
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return x + jax.pure_callback(wait, shape, context.replica_id_in_sync_group)

    results = []
    # `run` returns when the callbacks have.
    thread = threading.Thread(
        target=lambda: results.append(strategy.run(step, (mirror.PerReplica([1.0] * 4),)))
    )
    thread.start()
    try:
        ended = "runs replica 1 on (/device:CPU:1), replicas 0, 2, 3 ended"
        wait_until(lambda: ended in str(plugin_support.state_of_launches()))
        launch, *_, callback = plugin_support.state_of_launches()
        assert_message(launch, values=["step (test_asserts.py:", ended])
        assert "replica 1 at test_asserts.py:" in callback
    finally:
        late.set()
        thread.join(900)
    assert float(strategy.reduce("sum", results[0])) == 4 * 4 + 6
    jax.block_until_ready(strategy.reduce("sum", 1.0))
    assert plugin_support.state_of_launches() == []
