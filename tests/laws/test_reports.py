"""Reports agree with `run`: for every mapping, axis name and thread."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support.strategies import ON_HOST, cpu_strategy

MAPPINGS = {
    "pmap": lambda **name: cpu_strategy(4, **name),
    "vmap": lambda **name: cpu_strategy(1, replicas_per_device=4, **name),
    "vmap on 2": lambda **name: cpu_strategy(2, replicas_per_device=2, **name),
    "staged": lambda **name: cpu_strategy(4, cross_device_ops=ON_HOST, **name),
    "sharded": lambda **name: cpu_strategy(4, shard="optimizer", **name),
}


def train_step(model, optimizer, batch):
    def loss_fn(model):
        return jnp.square(model(batch)).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    loss, grads = mirror.all_reduce("mean", (loss, grads))
    optimizer.update(model, grads)
    return loss, jnp.max(batch)


def reports(make, **name):
    strategy = make(**name)
    with strategy.scope():
        model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    (batch,) = strategy.distribute_dataset([np.ones((8, 8), np.float32)])
    args = (model, optimizer, batch)

    def examine():
        inspected = strategy.inspect(train_step, args)
        verified = strategy.verify(train_step, args)
        return str(inspected), len(verified.rows)

    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(examine).result()
    loss, largest = strategy.run(train_step, args)
    return examine(), elsewhere, (isinstance(loss, jax.Array), isinstance(largest, jax.Array))


def test_explain_counts_the_collectives_of_an_axis_with_a_name():
    def step(batch):
        return mirror.all_reduce("sum", batch.sum())

    strategy = cpu_strategy(2, axis_name="batch")
    (batch,) = strategy.distribute_dataset([np.ones((4, 2), np.float32)])
    assert strategy.explain(step, (batch,), steps=1).num_collectives == 1


@pytest.mark.parametrize(
    "mapping",
    [
        pytest.param(m, marks=[pytest.mark.nightly] * (m not in ("pmap", "staged")))
        for m in MAPPINGS
    ],
)
def test_reports_do_not_depend_on_the_axis_name_or_the_thread(mapping):
    here, elsewhere, mirrored = reports(MAPPINGS[mapping])
    assert mirrored == (True, False)
    assert "proved" in here[0], here[0]
    assert here == elsewhere
    assert (here, elsewhere, mirrored) == reports(MAPPINGS[mapping], axis_name="batch")
