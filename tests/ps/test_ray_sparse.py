"""Sparse tables on real processes, with a `Trainer`."""

import threading

import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.ps.digits import arrays, largest_difference
from tests.ps.local_tables import SPARSE, TABLE, Bag, losses
from tests.support.messages import raises

pytestmark = [pytest.mark.slow, pytest.mark.dev("ray")]
NUM_ROWS = 400
SMALL = mirror.ps.FixedShardsPartitioner(2)


def data(num_rows=NUM_ROWS, size=90, seed=0):
    rng = np.random.default_rng(seed)
    chosen = rng.choice(num_rows, num_rows // 2, replace=False)
    return {"ids": rng.choice(chosen, (size, 3)), "y": rng.integers(0, 2, size)}


def trained(strategy, tx, loss_fn=losses):
    trainer = mirror.Trainer(Bag(nnx.Rngs(0), NUM_ROWS), tx, loss_fn, strategy=strategy)
    history = trainer.fit(data(), epochs=2, batch_size=32, shuffle=False, progress=False)
    return trainer, history["loss"]


@pytest.fixture(scope="module")
def strategy(ray_cluster):
    with mirror.ps.ParameterServerStrategy(
        ps=2, workers=2, partitioner=SMALL, sparse=SPARSE
    ) as strategy:
        yield strategy


def test_trainer_trains_a_table_as_one_device(strategy):
    # The last batch of an epoch has 26 rows, and padding.
    trainer, got = trained(strategy, optax.adagrad(0.1))
    reference, wanted = trained(mirror.OneDeviceStrategy("/cpu:0"), optax.adagrad(0.1))
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    difference = largest_difference(
        arrays(trainer.model, trainer.optimizer), arrays(reference.model, reference.optimizer)
    )
    assert difference <= 1e-6
    report = strategy.report()
    assert len(report.placement[TABLE]) == 2
    assert 0 < report.bytes_per_update < NUM_ROWS * 4 * 4
    assert report.bytes_per_update < report.bytes_moved
    trainer.verify(data(size=12), batch_size=12)
    trainer.fit(data(), epochs=1, batch_size=32, progress=False)
    assert trainer.evaluate(data(), batch_size=32)["loss"] < got[0]


def test_gradient_of_other_rows_ends_fit(strategy):
    def penalized(model, batch):
        return losses(model, batch) + (model.embed.embedding[...] ** 2).sum()

    with raises(ValueError, names=f"sparse[{TABLE!r}]"):
        trained(strategy, optax.adagrad(0.1), penalized)


def test_unknown_name_is_rejected_when_the_trainer_is_created(strategy):
    class Other(nnx.Module):
        def __init__(self):
            self.embedding = nnx.Embed(8, 2, rngs=nnx.Rngs(0))

    with raises(ValueError, names="sparse", values=TABLE, fix="embedding.embedding"):
        mirror.Trainer(Other(), optax.sgd(0.1), losses, strategy=strategy)


@pytest.mark.nightly
def test_function_that_cannot_be_sent_is_named(ray_cluster):
    lock = threading.Lock()

    def ids(batch):
        with lock:
            return batch["ids"]

    with (
        mirror.ps.ParameterServerStrategy(ps=1, workers=1, sparse={TABLE: ids}) as strategy,
        raises(TypeError, names=f"sparse[{TABLE!r}]", values="'lock'"),
    ):
        trained(strategy, optax.adagrad(0.1))


@pytest.mark.nightly
def test_asynchronous_training_trains_a_table(ray_cluster):
    options = {"ps": 2, "workers": 2, "staleness": 2, "partitioner": SMALL}
    with mirror.ps.ParameterServerStrategy(**options, sparse=SPARSE) as strategy:
        _, got = trained(strategy, optax.adagrad(0.1))
        assert np.isfinite(got).all()
