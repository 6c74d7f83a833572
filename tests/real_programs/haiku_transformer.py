"""Haiku's transformer example: padded tokens, and per-replica dropout."""

from functools import partial
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirror
from tests.real_programs.harness import Program, initial_key, train

VOCABULARY, LENGTH, SIZE = 11, 6, 8
PAD = 0


class TrainingState(NamedTuple):
    params: Any
    opt_state: Any
    rng: jax.Array
    step: jax.Array


def norm(x):
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)


def language_model(tokens, dropout_rate=0.2):
    mask = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH))) * (tokens != PAD)[:, None, None, :]
    embedding = hk.get_parameter(
        "positions", [LENGTH, SIZE], init=hk.initializers.TruncatedNormal()
    )
    h = hk.Embed(VOCABULARY, SIZE)(tokens) + embedding
    attention = hk.MultiHeadAttention(
        num_heads=2,
        key_size=4,
        model_size=SIZE,
        with_bias=False,
        w_init=hk.initializers.VarianceScaling(),
    )
    h_norm = norm(h)
    h += hk.dropout(hk.next_rng_key(), dropout_rate, attention(h_norm, h_norm, h_norm, mask=mask))
    dense = hk.Sequential([hk.Linear(2 * SIZE), jax.nn.gelu, hk.Linear(SIZE)])
    h += dense(norm(h))
    return hk.Linear(VOCABULARY)(norm(h))


model = hk.transform(language_model)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3, b1=0.9, b2=0.99))


@jax.jit
def _create(init_rng, rng):
    params = model.init(init_rng, jnp.ones((1, LENGTH), jnp.int32))
    return TrainingState(params, optimizer.init(params), rng, jnp.zeros((), jnp.int32))


def make():
    return (_create(initial_key(), jax.random.key(0)),)


def batches():
    rng = np.random.RandomState(0)
    made = []
    for _ in range(10):
        tokens = rng.randint(1, VOCABULARY, (8, LENGTH + 1)).astype(np.int32)
        lengths = rng.randint(2, LENGTH + 2, (8, 1))
        tokens[np.arange(LENGTH + 1) >= lengths] = PAD
        made.append({"obs": tokens[:, :-1], "target": tokens[:, 1:]})
    return made


def sums_of(params, rng, batch):
    """Returns the sum of the losses of the tokens, and how many they are."""
    logits = model.apply(params, rng, batch["obs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
    mask = batch["target"] != PAD
    return jnp.sum(losses * mask), jnp.sum(mask)


def updated(state, rng, grads):
    updates, opt_state = optimizer.update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    return TrainingState(params, opt_state, rng, state.step + 1)


def replica_step(state, batch, forgets=False):
    context = mirror.get_replica_context()
    rng, dropout_rng = jax.random.split(state.rng)
    dropout_rng = context.fold_in(dropout_rng)

    def loss_fn(params):
        total, count = sums_of(params, dropout_rng, batch)
        return total / context.all_reduce("sum", count)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    if not forgets:
        grads = context.all_reduce("sum", grads)
    return updated(state, rng, grads), context.all_reduce("sum", loss)


def step(state, batch):
    return replica_step(state, batch)


def broken_step(state, batch):
    return replica_step(state, batch, forgets=True)


def plain(num_replicas):
    """Trains with the masks that the replicas draw, each for its part of the batch."""

    @jax.jit
    def alone_step(state, batch):
        rng, dropout_rng = jax.random.split(state.rng)
        rngs = jax.vmap(jax.random.fold_in, (None, 0))(dropout_rng, jnp.arange(num_replicas))
        parts = jax.tree.map(lambda x: x.reshape(num_replicas, -1, LENGTH), batch)

        def loss_fn(params):
            totals, counts = jax.vmap(partial(sums_of, params))(rngs, parts)
            return totals.sum() / counts.sum()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return updated(state, rng, grads), loss

    return train(make(), alone_step, batches())


PROGRAM = Program(
    make=make,
    batches=batches,
    step=step,
    broken_step=broken_step,
    drifting="params",
    plain=plain,
    donate_argnums=(0,),
    draws_per_replica=True,
)
