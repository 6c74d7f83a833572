"""Training steps on parameter servers, on real processes."""

import jax
import optax
import pytest
from flax import nnx

import mirror
from tests.ps.digits import (
    arrays,
    batches,
    create,
    largest_difference,
    on_replicas,
    train_step,
)

pytestmark = [pytest.mark.slow, pytest.mark.dev("ray")]
SMALL = mirror.ps.FixedShardsPartitioner(3)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(3e-3),
}
DATA = batches([24, 24, 22, 24, 2])


def train(strategy, model, optimizer, data, step=train_step):
    coordinator = mirror.ps.ClusterCoordinator(strategy)
    values = [coordinator.schedule(step, (model, optimizer, batch)) for batch in data]
    coordinator.join(900)
    return coordinator.fetch(values)


def test_objects_have_the_values_after_join_and_continue_elsewhere(one_worker):
    tx = OPTIMIZERS["adam"]
    model, optimizer = create(one_worker, tx)
    train(one_worker, model, optimizer, DATA[:2])
    assert int(optimizer.step[...]) == 2
    one = mirror.OneDeviceStrategy("/cpu:0")
    batch = jax.tree.map(lambda x: mirror.PerReplica([x]), DATA[2])
    one.run(train_step, (model, optimizer, batch))
    train(one_worker, model, optimizer, DATA[3:])
    (reference, wanted), _ = on_replicas(1, tx, DATA)
    assert largest_difference(arrays(model, optimizer), arrays(reference, wanted)) < 1e-5


def test_evaluation_mode_that_is_set_between_steps_is_used(one_worker):
    model, optimizer = create(one_worker, optax.sgd(0.0), has_noise="dropout")
    noisy = train(one_worker, model, optimizer, [DATA[0]] * 2)
    model.eval()
    still = train(one_worker, model, optimizer, [DATA[0]] * 2)
    assert noisy[0] != noisy[1]
    assert still[0] == still[1]


def test_per_worker_datasets_train(one_worker):
    coordinator = mirror.ps.ClusterCoordinator(one_worker)
    model, optimizer = create(one_worker, OPTIMIZERS["sgd"])
    data = batches([12, 12, 12])
    iterator = iter(coordinator.create_per_worker_dataset(lambda: iter(data)))
    for _ in range(3):
        coordinator.schedule(train_step, (model, optimizer, iterator))
    coordinator.join(900)
    (reference, wanted), _ = on_replicas(1, OPTIMIZERS["sgd"], data)
    assert largest_difference(arrays(model, optimizer), arrays(reference, wanted)) < 1e-5


def test_report_says_where_variables_are_and_what_travels(one_worker):
    model, optimizer = create(one_worker, OPTIMIZERS["sgd"])
    train(one_worker, model, optimizer, DATA[:1])
    report = one_worker.report()
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


@pytest.mark.nightly
@pytest.mark.parametrize("staleness", [1, None])
def test_gradients_are_at_most_as_stale_as_the_bound(ray_cluster, staleness):
    with mirror.ps.ParameterServerStrategy(ps=2, workers=3, staleness=staleness) as strategy:
        model, optimizer = create(strategy, optax.sgd(0.05))
        losses = train(strategy, model, optimizer, batches([8]) * 60)
        report = strategy.report()
        assert int(optimizer.step[...]) == report.num_updates == 60
        assert sum(report.staleness.values()) == 60
        assert max(report.staleness) <= (60 if staleness is None else staleness)
        assert losses[-1] < losses[0]
