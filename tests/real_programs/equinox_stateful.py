"""Equinox's guide to stateful models: a `BatchNorm` with statistics in `eqx.nn.State`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirror
from tests.real_programs.harness import Program, alone, initial_key, replica_mean, train

optim = optax.sgd(0.05, momentum=0.9)


class Model(eqx.Module):
    linear1: eqx.nn.Linear
    norm1: eqx.nn.BatchNorm
    linear2: eqx.nn.Linear

    def __init__(self, axis_name, key):
        key1, key2 = jax.random.split(key)
        self.linear1 = eqx.nn.Linear(6, 8, use_bias=False, key=key1)
        self.norm1 = eqx.nn.BatchNorm(8, axis_name, mode="batch")
        self.linear2 = eqx.nn.Linear(8, 4, key=key2)

    def __call__(self, x, state):
        x, state = self.norm1(self.linear1(x), state)
        return self.linear2(jax.nn.relu(x)), state


@eqx.filter_jit
def _create(axis_name, key):
    model, state = eqx.nn.make_with_state(Model)(axis_name, key)
    return model, state, optim.init(eqx.filter(model, eqx.is_inexact_array))


def make(axis_name=("batch", mirror.REPLICA_AXIS)):
    return _create(axis_name, initial_key())


def batches():
    rng = np.random.RandomState(0)
    return [
        {
            "x": rng.randn(8, 6).astype(np.float32),
            "y": rng.randint(0, 4, 8).astype(np.int32),
        }
        for _ in range(10)
    ]


def loss_fn(model, state, batch):
    batch_model = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, state = batch_model(batch["x"], state)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return jnp.mean(losses), state


def train_step(model, state, opt_state, batch, mean):
    (loss, state), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, state, batch)
    updates, opt_state = optim.update(mean(grads), opt_state)
    return eqx.apply_updates(model, updates), state, opt_state, mean(loss)


def step(model, state, opt_state, batch):
    return train_step(model, state, opt_state, batch, replica_mean)


def broken_step(model, state, opt_state, batch):
    """Normalizes with each replica's own batch: the gradients agree, the statistics do not."""
    model = eqx.tree_at(lambda m: m.norm1.axis_name, model, "batch")
    return train_step(model, state, opt_state, batch, replica_mean)


def plain(num_replicas):
    @eqx.filter_jit
    def alone_step(model, state, opt_state, batch):
        return train_step(model, state, opt_state, batch, alone)

    return train(make(axis_name="batch"), alone_step, batches())


PROGRAM = Program(
    make=make,
    batches=batches,
    step=step,
    broken_step=broken_step,
    drifting="state",
    plain=plain,
)
