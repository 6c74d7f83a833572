"""Tests in several processes, which `tests/tools/test_plugin_processes.py` copies and runs."""

import os
import signal
import time

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import testing

TABLE = jax.numpy.arange(3.0)  # starts JAX: the processes are connected before this file is read


@pytest.fixture
def own(request, tmp_path):
    """In the processes only, as every fixture of such a test."""
    print("fixture in process", mirror.distributed.process_index(), os.environ["TF_CONFIG"])
    yield tmp_path
    print("end of the fixture")


def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: (m(batch) ** 2).mean())(model)
    grads, loss = mirror.all_reduce("mean", (grads, loss))
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("scale", [3.0])
@pytest.mark.mirror(processes=2, replicas=[2, 4])
def test_step(strategy, own, scale, request):
    assert isinstance(strategy, mirror.MultiWorkerMirroredStrategy)
    n = strategy.num_replicas_in_sync
    assert strategy.num_workers == 2
    assert len(strategy.local_devices) == n // 2
    assert f"2-processes-{n}" in request.node.name
    assert request.config.getoption("--mine") == "mine"
    x = mirror.PerReplica.from_stacked(np.arange(n, dtype=np.float32))
    total = strategy.run(lambda x: mirror.all_reduce("sum", x), (x,))
    assert float(total) * scale == scale * sum(range(n))
    (own / "file").touch()
    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    (batch,) = strategy.distribute_dataset([np.arange(24, dtype=np.float32).reshape(8, 3) / 24])
    testing.assert_trains_like_one_device(train_step, (model, optimizer, batch), strategy, steps=2)
    testing.assert_mirrored((model, optimizer), strategy)


@pytest.mark.mirror(processes=2)
def test_one_fails(strategy):
    me = mirror.distributed.process_index()
    print("printed by process", me)
    if me == 1:
        assert me + 2 == 4
    strategy.reduce("sum", 1.0)  # waits for the other process


@pytest.mark.mirror(processes=2, timeout=4 + mirror.distributed.process_index())
def test_is_stuck(strategy):
    if strategy.is_chief:
        time.sleep(100)
    strategy.reduce("sum", 1.0)


@pytest.mark.mirror(processes=3, timeout=100)
def test_is_killed(strategy):
    if mirror.distributed.process_index() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


@pytest.mark.mirror(processes=2)
def test_skips(strategy):
    pytest.skip("not today")


@pytest.mark.mirror(processes=2)
@pytest.mark.xfail(reason="known")
def test_fails_as_expected(strategy):
    raise ValueError


@pytest.mark.mirror(processes=[1])
class TestClass:
    def test_method(self, strategy):
        assert strategy.num_replicas_in_sync == strategy.num_workers == 1

    def test_without_the_fixture(self):
        assert "TF_CONFIG" not in os.environ
