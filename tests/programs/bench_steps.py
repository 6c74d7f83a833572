"""Steps of a user, right and wrong ones, for `tests/tools/test_bench.py`."""

import numpy as np
import optax
from flax import nnx

import mirror

BATCH = {"x": np.ones((8, 3), np.float32)}


def step(model, batch):
    loss, grads = nnx.value_and_grad(lambda m, b: (m(b["x"]) ** 2).mean())(model, batch)
    grads, loss = mirror.all_reduce("mean", (grads, loss))
    model.kernel[...] -= 0.1 * grads["kernel"][...]
    return loss


def model():
    return nnx.Linear(3, 2, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))


def bench(strategy):
    return step, (model(),), [BATCH]


def training(strategy):
    def loss_fn(model, batch):
        return (model(batch["x"]) ** 2).sum(-1)

    return mirror.Trainer(model(), optax.sgd(0.1), loss_fn), [BATCH]


def distributed(strategy):
    return step, (model(),), strategy.distribute_dataset([BATCH])


def each(strategy):
    rows = np.ones((strategy.num_replicas_in_sync, 4, 3), np.float32)
    return lambda x: x.sum(), (mirror.PerReplica.from_stacked(rows),)


def alike(strategy):
    return lambda x: x + 1, [np.ones(3)]


def silent(strategy):
    return lambda x: None, (np.ones(3),)


def broken(strategy):
    raise KeyError("weights")


def breaks(strategy):
    return lambda x: 1 / 0, (np.ones(3),)


def nothing(strategy):
    pass


def bare(strategy):
    return step, 3


number = 3
