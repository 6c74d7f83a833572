"""Training steps on parameter servers, on real processes."""

import time

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.ps.digits import (
    Net,
    are_equal,
    arrays,
    batches,
    create,
    largest_difference,
    on_replicas,
    train_step,
)
from tests.support.messages import raises

pytestmark = pytest.mark.dev("ray")
SMALL = mirror.FixedShardsPartitioner(3)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(3e-3),
}
DATA = batches([24, 24, 22, 24, 2])


@pytest.fixture(scope="module")
def synchronous(ray_cluster):
    with mirror.ParameterServerStrategy(ps=2, workers=2, partitioner=SMALL) as strategy:
        yield strategy


def train(strategy, model, optimizer, data, step=train_step):
    coordinator = mirror.ClusterCoordinator(strategy)
    values = [coordinator.schedule(step, (model, optimizer, batch)) for batch in data]
    coordinator.join(300)
    return coordinator.fetch(values)


def require_equal_to_one_device(strategy, tx, data):
    model, optimizer = create(strategy, tx)
    losses = train(strategy, model, optimizer, data)
    (reference, wanted), reference_losses = on_replicas(1, tx, data)
    assert largest_difference(arrays(model, optimizer), arrays(reference, wanted)) < 1e-5
    np.testing.assert_allclose(losses, reference_losses, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_synchronous_training_equals_one_device(synchronous, name):
    require_equal_to_one_device(synchronous, OPTIMIZERS[name], DATA)
    assert set(synchronous.report().staleness) <= {0}


@pytest.mark.parametrize(
    ("ps", "workers", "devices"), [(1, 3, 1), pytest.param(3, 2, 2, marks=pytest.mark.nightly)]
)
def test_numbers_of_servers_and_devices_do_not_matter(ray_cluster, ps, workers, devices):
    options = {"ps": ps, "workers": workers, "devices_per_worker": devices}
    with mirror.ParameterServerStrategy(**options, partitioner=SMALL) as strategy:
        assert strategy.num_ps == ps
        require_equal_to_one_device(strategy, OPTIMIZERS["adam"], DATA)


def test_objects_have_the_values_after_join_and_continue_elsewhere(synchronous):
    tx = OPTIMIZERS["adam"]
    model, optimizer = create(synchronous, tx)
    train(synchronous, model, optimizer, DATA[:2])
    assert int(optimizer.step[...]) == 2
    one = mirror.OneDeviceStrategy("/cpu:0")
    batch = jax.tree.map(lambda x: mirror.PerReplica([x]), DATA[2])
    one.run(train_step, (model, optimizer, batch))
    train(synchronous, model, optimizer, DATA[3:])
    (reference, wanted), _ = on_replicas(1, tx, DATA)
    assert largest_difference(arrays(model, optimizer), arrays(reference, wanted)) < 1e-5


def test_batch_statistics_equal_those_of_mirrored_replicas(synchronous):
    data = batches([24, 24, 24])
    model, optimizer = create(synchronous, OPTIMIZERS["sgd"], has_noise="norm")
    train(synchronous, model, optimizer, data)
    (reference, wanted), _ = on_replicas(2, OPTIMIZERS["sgd"], data, has_noise="norm")
    assert largest_difference(arrays(model, optimizer), arrays(reference, wanted)) < 1e-5
    assert np.abs(np.asarray(model.norm.mean[...])).max() > 0


def test_noise_depends_on_the_number_of_the_update_alone(synchronous):
    def run(*pieces):
        model, optimizer = create(synchronous, OPTIMIZERS["sgd"], has_noise="dropout")
        losses = [loss for data in pieces for loss in train(synchronous, model, optimizer, data)]
        return arrays(model, optimizer), losses

    same = [DATA[0]] * 4
    weights, losses = run(same)
    assert are_equal(weights, run(same[:1], same[1:])[0])
    assert len(set(map(float, losses))) == 4


def test_evaluation_mode_that_is_set_between_steps_is_used(synchronous):
    model, optimizer = create(synchronous, optax.sgd(0.0), has_noise="dropout")
    noisy = train(synchronous, model, optimizer, [DATA[0]] * 2)
    model.eval()
    still = train(synchronous, model, optimizer, [DATA[0]] * 2)
    assert noisy[0] != noisy[1]
    assert still[0] == still[1]


def test_step_without_all_reduce_is_rejected_and_the_next_step_is_not_mixed_with_it(synchronous):
    def forgot(model, optimizer, batch):
        grads = nnx.grad(lambda m: (m(batch["x"]) ** 2).mean())(model)
        optimizer.update(model, grads)

    model, optimizer = create(synchronous, OPTIMIZERS["sgd"])
    coordinator = mirror.ClusterCoordinator(synchronous)
    coordinator.schedule(forgot, (model, optimizer, DATA[0]))
    with pytest.raises(mirror.ReplicaDivergenceError, match=r"layers\.0\.kernel"):
        coordinator.join(60)
    require_equal_to_one_device(synchronous, OPTIMIZERS["sgd"], DATA)


def half_fails(model, optimizer, batch):
    if batch["x"].shape[0] == 12:  # the second part of 25 rows
        time.sleep(0.5)  # until the first part has been pushed
        raise ValueError("the second part")
    return train_step(model, optimizer, batch)


def test_gradients_of_a_step_that_failed_are_not_those_of_the_next(synchronous):
    model, optimizer = create(synchronous, OPTIMIZERS["sgd"])
    coordinator = mirror.ClusterCoordinator(synchronous)
    coordinator.schedule(half_fails, (model, optimizer, batches([25], seed=5)[0]))
    with pytest.raises(ValueError, match="the second part"):
        coordinator.join(60)
    data = batches([25, 25])
    train(synchronous, model, optimizer, data)
    (reference, wanted), _ = on_replicas(1, OPTIMIZERS["sgd"], data)
    assert largest_difference(arrays(model, optimizer), arrays(reference, wanted)) < 1e-5


def test_per_worker_datasets_train(synchronous):
    coordinator = mirror.ClusterCoordinator(synchronous)
    model, optimizer = create(synchronous, OPTIMIZERS["sgd"])
    data = batches([12, 12, 12])
    iterator = iter(coordinator.create_per_worker_dataset(lambda: iter(data)))
    for _ in range(3):
        coordinator.schedule(train_step, (model, optimizer, iterator))
    coordinator.join(60)
    # All workers have the same dataset, so the mean is that of one.
    (reference, wanted), _ = on_replicas(1, OPTIMIZERS["sgd"], data)
    assert largest_difference(arrays(model, optimizer), arrays(reference, wanted)) < 1e-5


def test_report_says_where_variables_are_and_what_travels(synchronous):
    model, optimizer = create(synchronous, OPTIMIZERS["sgd"])
    train(synchronous, model, optimizer, DATA[:1])
    report = synchronous.report()
    rows = {name: sum(b - a for _, a, b in held) for name, held in report.placement.items()}
    assert rows == {
        "layers.0.kernel": 16,
        "layers.0.bias": 32,
        "layers.1.kernel": 32,
        "layers.1.bias": 8,
    }
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert sum(report.bytes_per_server) == size
    assert report.bytes_per_update == 2 * size
    assert "layers.0.kernel: ps" in repr(report)


@pytest.mark.parametrize("staleness", [1, 2, 5, None])
def test_gradients_are_at_most_as_stale_as_the_bound(ray_cluster, staleness):
    with mirror.ParameterServerStrategy(ps=2, workers=3, staleness=staleness) as strategy:
        model, optimizer = create(strategy, optax.sgd(0.05))
        losses = train(strategy, model, optimizer, batches([8]) * 60)
        report = strategy.report()
        assert int(optimizer.step[...]) == report.num_updates == 60
        assert sum(report.staleness.values()) == 60
        assert max(report.staleness) <= (60 if staleness is None else staleness)
        assert losses[-1] < losses[0]


def slow_on_one_worker(model, optimizer, batch):
    def wait():
        # The second part has an element less.
        time.sleep(2.0)

    if batch["x"].shape[0] == 8:
        jax.debug.callback(wait)
    return train_step(model, optimizer, batch)


def test_backup_workers_are_not_waited_for(ray_cluster):
    with mirror.ParameterServerStrategy(ps=1, workers=2, backup_workers=1) as strategy:
        model, optimizer = create(strategy, optax.sgd(0.05))
        train(strategy, model, optimizer, batches([17]), slow_on_one_worker)
        begin = time.monotonic()
        coordinator = mirror.ClusterCoordinator(strategy)
        values = [
            coordinator.schedule(slow_on_one_worker, (model, optimizer, batch))
            for batch in batches([17] * 6)
        ]
        coordinator.fetch(values)
        assert time.monotonic() - begin < 6
        coordinator.join(60)
        assert int(optimizer.step[...]) == 7


def test_trainer_evaluates_and_saves_after_its_strategy_was_closed(ray_cluster, tmp_path):
    def loss_fn(model, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])

    (data,) = batches([48])
    with mirror.ParameterServerStrategy(ps=1, workers=1) as strategy:
        with strategy.scope():
            trainer = mirror.Trainer(Net(nnx.Rngs(0)), optax.adam(3e-3), loss_fn)
        trainer.fit(data, epochs=2, batch_size=24, progress=False)
        before = trainer.evaluate(data, batch_size=24)
    assert trainer.evaluate(data, batch_size=24) == before
    trainer.save(tmp_path / "saved")
    with raises(RuntimeError, values="closed", fix="Create a new one"):
        trainer.fit(data, epochs=3, batch_size=24, progress=False)
