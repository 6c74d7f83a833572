"""Steps of a user, right and wrong ones, for `tests/inspection/test_memory.py`."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mirror

BATCH = {"x": np.zeros((8, 3), np.float32)}


def step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m, b: (m(b["x"]) ** 2).mean())(model, batch)
    grads, loss = mirror.all_reduce("mean", (grads, loss))
    optimizer.update(model, grads)
    return loss


def objects():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def make(strategy):
    return step, objects(), [BATCH]


def in_scope(strategy):
    with strategy.scope():
        return step, objects(), [{"x": jnp.zeros((8, 3))}]


def squares(model, batch):
    return (model(batch["x"]) ** 2).sum(-1)


def training(strategy):
    model, _ = objects()
    return mirror.Trainer(model, optax.adam(1e-3), squares), [BATCH]


def accumulated(strategy):
    model, _ = objects()
    return mirror.Trainer(model, optax.adam(1e-3), squares, accumulate_steps=3), [BATCH]


def distributed(strategy):
    trainer, data = training(strategy)
    return trainer, strategy.distribute_dataset(data)


def reads(strategy):
    w = jnp.ones(3)
    if w.sum() > 2:
        w = 2 * w
    return lambda w: w, (w,)


def converts(strategy):
    return lambda w: w, (np.asarray(jnp.ones(3)),)


def exhausts(strategy):
    return step, objects(), [{"x": np.ones((2**40, 2**10), np.float32)}]


def outside(strategy):
    w = jnp.ones(3)
    return lambda batch: (batch["x"] * w).sum(), (), [BATCH]


def variable(strategy):
    count = mirror.Variable(jnp.zeros(()), name="count", aggregation="sum")

    def step(batch):
        count.assign_add(batch["x"].sum())

    return step, (), [BATCH]


def unequal(strategy):
    return lambda x: x.sum(), (mirror.PerReplica([jnp.ones(2), jnp.ones(3)]),)


def forgetful(strategy):
    def step(model, optimizer, batch):
        optimizer.update(model, nnx.grad(lambda m: m(batch["x"]).mean())(model))

    return step, objects(), [BATCH]


def raises(strategy):
    raise KeyError("weights")


def nothing(strategy):
    pass
