"""n replicas train like one device on the whole batch, and stay bitwise equal."""

import jax
import numpy as np
import pytest
from flax import nnx

import mirror
from tests.support.messages import raises
from tests.support.models import OPTIMIZERS, TRAININGS, LocalBatchNorm, batches, nnx_step
from tests.support.strategies import ON_HOST, STRATEGIES, cpu_strategy

STEPS = 20


def train(strategy, training, data, create_in_scope=True):
    if create_in_scope:
        with strategy.scope():
            state = training.create()
    else:
        state = training.create()
    losses = []
    for batch in strategy.distribute_dataset(data):
        state, loss = training.step(strategy, state, batch)
        losses.append(loss)
    return state, losses


def assert_close(got, wanted, rtol=1e-5):
    """Checks that leaves are equal, up to a part of the largest magnitude of each."""
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(wanted), strict=True
    ):
        name, a, b = jax.tree_util.keystr(path), np.asarray(a), np.asarray(b)
        largest = np.maximum(np.abs(a).max(), np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * largest, err_msg=name)


@pytest.fixture(scope="module")
def alone():
    """Trains one device on the whole batch, once per training and optimizer."""
    done = {}

    def trained(name, optimizer):
        if (name, optimizer) not in done:
            make, features = TRAININGS[name]
            training = make(OPTIMIZERS[optimizer])
            lone = mirror.OneDeviceStrategy("/cpu:0")
            state, losses = train(lone, training, batches(features, STEPS))
            parameters = jax.tree.map(np.asarray, training.parameters(state))
            done[name, optimizer] = parameters, np.asarray(losses)
        return done[name, optimizer]

    return trained


# Every executor; 24 examples divide by all numbers of replicas.
EXECUTORS = {
    "one": lambda: cpu_strategy(1),
    "pmap on 2": lambda: cpu_strategy(2),
    "pmap on 3": lambda: cpu_strategy(3),
    "pmap on 8": lambda: cpu_strategy(8),
    "vmap": lambda: cpu_strategy(1, replicas_per_device=3),
    "vmap on 2": lambda: cpu_strategy(2, replicas_per_device=2),
    "staged": lambda: cpu_strategy(4, cross_device_ops=ON_HOST),
    "staged on 2": lambda: cpu_strategy(2, replicas_per_device=2, cross_device_ops=ON_HOST),
    "sharded": lambda: cpu_strategy(4, shard="optimizer"),
}


def executors_of(name):
    """Returns two of the executors, which together cover all for the five programs."""
    first = 2 * [*TRAININGS].index(name)
    return [[*EXECUTORS][i % len(EXECUTORS)] for i in (first, first + 1)]


@pytest.mark.parametrize("name", TRAININGS)
def test_n_replicas_train_as_one_device_on_the_whole_batch(subtests, name, alone):
    for executor in executors_of(name):
        with subtests.test(msg=executor):
            check_trains_as_one_device(name, executor, alone)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRAININGS)
def test_n_replicas_train_as_one_device_by_every_other_executor(subtests, name, alone):
    for executor in EXECUTORS.keys() - {*executors_of(name)}:
        with subtests.test(msg=executor):
            check_trains_as_one_device(name, executor, alone)


def check_trains_as_one_device(name, executor, alone):
    """Any two of program, optimizer and executor meet."""
    make, features = TRAININGS[name]
    number = [*TRAININGS].index(name) + [*EXECUTORS].index(executor)
    optimizer = [*OPTIMIZERS][number % len(OPTIMIZERS)]
    training, strategy = make(OPTIMIZERS[optimizer]), EXECUTORS[executor]()
    state, losses = train(strategy, training, batches(features, STEPS))
    parameters, expected = alone(name, optimizer)
    assert_close(training.parameters(state), parameters)
    assert_close(np.asarray(losses), expected)
    strategy.check_mirrored(state)


@pytest.mark.slow
def test_training_does_not_depend_on_where_the_model_is_created(subtests, two):
    for name in TRAININGS:
        with subtests.test(msg=name):
            make, features = TRAININGS[name]
            data, training = batches(features, 3), make(OPTIMIZERS["adam"])
            inside, _ = train(two, training, data)
            outside, _ = train(two, training, data, create_in_scope=False)
            for a, b in zip(
                jax.tree.leaves(training.parameters(inside)),
                jax.tree.leaves(training.parameters(outside)),
                strict=True,
            ):
                np.testing.assert_array_equal(a, b)
            two.check_mirrored(outside)


def test_model_and_optimizer_may_be_created_in_different_places(two):
    orders, training = [], TRAININGS["nnx-MLP"][0](OPTIMIZERS["adam"])
    for model_in, optimizer_in in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        model, optimizer = training.create()
        if model_in:
            with two.scope():
                model = nnx.clone(model)
        if optimizer_in:
            with two.scope():
                optimizer = nnx.clone(optimizer)
        for batch in two.distribute_dataset(batches((12,), 3)):
            two.run(nnx_step, (model, optimizer, batch))
        two.check_mirrored((model, optimizer))
        orders.append(jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model))))
    for other in orders[1:]:
        jax.tree.map(np.testing.assert_array_equal, orders[0], other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* differs from one device")
def test_local_batch_statistics_differ_from_one_device_but_the_replicas_stay_equal(eight):
    """Each replica normalizes with its own batch; running statistics are the mean over replicas."""
    with eight.scope():
        model = LocalBatchNorm(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, OPTIMIZERS["sgd"](), wrt=nnx.Param)
    (batch,) = eight.distribute_dataset(batches((12,), 1))
    before = np.asarray(model.first(np.asarray(batch["image"])))  # (8, 3, 32)
    eight.run(nnx_step, (model, optimizer, batch))
    eight.check_mirrored((model, optimizer))
    momentum = model.norm.momentum
    wanted = (1 - momentum) * before.mean(1).mean(0)
    np.testing.assert_allclose(model.norm.mean[...], wanted, rtol=1e-4, atol=1e-6)
    fix = "axis_name=mirror.REPLICA_AXIS"
    with raises(mirror.VerifyError, names="rtol", values=[8, 1e-5], fix=fix):
        eight.verify(nnx_step, (model, optimizer, batch))


def test_one_replica_returns_the_same_types(subtests):
    """Code written on one device meets the same types on eight."""
    for layout, make in STRATEGIES.items():
        with subtests.test(msg=layout):
            strategy = make()

            def step(x, y):
                context = mirror.get_replica_context()
                return {
                    "mirrored": context.all_reduce("sum", x),
                    "own": x,
                    "argument": y,
                    "constant": 3,
                    "id": context.replica_id_in_sync_group,
                }

            n = strategy.num_replicas_in_sync
            out = strategy.run(step, (mirror.PerReplica([np.ones(2)] * n), np.ones(2)))
            assert isinstance(out["own"], mirror.PerReplica)
            assert isinstance(out["id"], mirror.PerReplica)
            for name in ("mirrored", "argument", "constant"):
                assert isinstance(out[name], jax.Array), name
            np.testing.assert_array_equal(out["id"], np.arange(n))
            np.testing.assert_array_equal(out["mirrored"], [n, n])


def test_dropout_samples_per_replica_and_keeps_the_stored_key(eight):
    with eight.scope():
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    key = jax.random.key_data(dropout.rngs.key[...])

    def step(dropout, x):
        return dropout(x)

    masks = [np.asarray(eight.run(step, (dropout, np.ones(64)))) for _ in range(2)]
    rows = np.concatenate(masks)
    assert len(np.unique(rows, axis=0)) == 16, "two replicas or two steps drew the same mask"
    assert int(dropout.rngs.count[...]) == 2
    np.testing.assert_array_equal(jax.random.key_data(dropout.rngs.key[...]), key)
    eight.check_mirrored(dropout)
