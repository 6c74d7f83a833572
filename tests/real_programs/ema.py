"""A VAE in Linen with a moving average of its weights; its noise belongs to the example."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from flax.training import train_state

import mirror
from tests.real_programs.harness import Program, alone, initial_key, replica_mean, train

LATENTS = 3


class TrainState(train_state.TrainState):
    ema_params: Any
    key: jax.Array


class VAE(linen.Module):
    @linen.compact
    def __call__(self, x, noise):
        h = linen.relu(linen.Dense(16, name="encoder")(x))
        mean, log_variance = jnp.split(linen.Dense(2 * LATENTS, name="latents")(h), 2, -1)
        z = mean + jnp.exp(0.5 * log_variance) * noise
        h = linen.relu(linen.Dense(16, name="decoder")(z))
        return linen.Dense(x.shape[-1], name="pixels")(h), mean, log_variance


@jax.jit
def _create(init_key, key):
    model = VAE()
    params = model.init(init_key, jnp.ones((1, 12)), jnp.ones((1, LATENTS)))
    return TrainState.create(
        apply_fn=model.apply,
        params=params,
        tx=optax.adam(1e-3),
        ema_params=jax.tree.map(jnp.copy, params),
        key=key,
    )


def make():
    return (_create(initial_key(), jax.random.key(0)),)


def batches():
    rng = np.random.RandomState(0)
    return [rng.randint(0, 2, (8, 12)).astype(np.float32) for _ in range(10)]


def loss_fn(params, apply_fn, x, noise):
    logits, mean, log_variance = apply_fn(params, x, noise)
    reconstruction = optax.sigmoid_binary_cross_entropy(logits, x).sum(-1).mean()
    divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1).mean()
    return reconstruction + divergence


def train_step(state, batch, mean, keys_of, forgets=False):
    key, noise_key = jax.random.split(state.key)
    noise = jax.vmap(lambda key: jax.random.normal(key, (LATENTS,)))(keys_of(noise_key, batch))
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch, noise)
    after = state.apply_gradients(grads=mean(grads), key=key)
    followed = after.params
    if forgets:  # the average follows what the replica alone would make of its batch
        followed = state.apply_gradients(grads=grads).params
    decay = jnp.minimum(0.9, (1 + state.step) / (10 + state.step))
    ema_params = optax.incremental_update(followed, state.ema_params, 1 - decay)
    return after.replace(ema_params=ema_params), mean(loss)


def step(state, batch):
    return train_step(state, batch, replica_mean, mirror.example_keys)


def broken_step(state, batch):
    return train_step(state, batch, replica_mean, mirror.example_keys, forgets=True)


def keys_of_all(key, x):
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(x)))


def plain(num_replicas):
    return train(make(), jax.jit(partial(train_step, mean=alone, keys_of=keys_of_all)), batches())


PROGRAM = Program(
    make=make,
    batches=batches,
    step=step,
    broken_step=broken_step,
    drifting="ema_params",
    plain=plain,
)
