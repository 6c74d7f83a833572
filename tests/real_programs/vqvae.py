"""Haiku's VQ-VAE example: the codebook follows moving averages of the codes of all replicas."""

from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirror
from tests.real_programs.harness import Program, alone, initial_key, replica_mean, train

optimizer = optax.adam(1e-3)


def model_of(cross_replica_axis: str | None) -> Any:
    def forward(x):
        z = hk.Conv2D(8, 4, stride=2, name="encoder")(x)
        z = hk.Conv2D(4, 1, name="to_codes")(jax.nn.relu(z))
        quantized = hk.nets.VectorQuantizerEMA(
            embedding_dim=4,
            num_embeddings=6,
            commitment_cost=0.25,
            decay=0.9,
            cross_replica_axis=cross_replica_axis,
        )(z, is_training=True)
        y = jax.nn.relu(hk.Conv2D(8, 3, name="decoder")(quantized["quantize"]))
        y = hk.Conv2DTranspose(1, 4, stride=2, name="to_pixels")(y)
        loss = jnp.mean((y - x) ** 2) / 0.9 + quantized["loss"]
        return loss, quantized["perplexity"]

    return hk.without_apply_rng(hk.transform_with_state(forward))


synchronized, own = model_of(mirror.REPLICA_AXIS), model_of(None)


@jax.jit
def _create(key):
    params, state = own.init(key, jnp.ones((1, 8, 8, 1)))
    return params, state, optimizer.init(params)


def make():
    return _create(initial_key())


def batches():
    rng = np.random.RandomState(0)
    return [rng.rand(8, 8, 8, 1).astype(np.float32) for _ in range(10)]


def train_step(params, state, opt_state, batch, model, mean):
    (loss, (perplexity, state)), grads = jax.value_and_grad(
        lambda params: _loss(model, params, state, batch), has_aux=True
    )(params)
    updates, opt_state = optimizer.update(mean(grads), opt_state)
    metrics = {"loss": mean(loss), "perplexity": mean(perplexity)}
    return optax.apply_updates(params, updates), state, opt_state, metrics


def _loss(model, params, state, batch):
    (loss, perplexity), state = model.apply(params, state, batch)
    return loss, (perplexity, state)


def step(params, state, opt_state, batch):
    return train_step(params, state, opt_state, batch, synchronized, replica_mean)


def broken_step(params, state, opt_state, batch):
    """Forgets the codebook's all-reduce, but averages the gradients."""
    return train_step(params, state, opt_state, batch, own, replica_mean)


def plain(num_replicas):
    return train(make(), jax.jit(partial(train_step, model=own, mean=alone)), batches())


PROGRAM = Program(
    make=make,
    batches=batches,
    step=step,
    broken_step=broken_step,
    drifting="embeddings",
    plain=plain,
)
