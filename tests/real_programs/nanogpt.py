"""A GPT in plain JAX: dictionaries of parameters, tied embeddings, AdamW, clipped gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.real_programs.harness import Program, alone, initial_key, replica_mean, train

VOCABULARY, BLOCK, SIZE, HEADS, LAYERS = 13, 8, 16, 2, 1

schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10, 1e-3)
optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
        schedule,
        b2=0.95,
        weight_decay=0.1,
        mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params),
    ),
)


@jax.jit
def _create(key):
    def normal(*shape, scale=0.02):
        nonlocal key
        key, subkey = jax.random.split(key)
        return scale * jax.random.normal(subkey, shape)

    def block():
        return {
            "ln_1": jnp.ones(SIZE),
            "ln_2": jnp.ones(SIZE),
            "c_attn": normal(SIZE, 3 * SIZE, scale=0.2),
            "c_proj": normal(SIZE, SIZE, scale=0.2),
            "c_fc": normal(SIZE, 4 * SIZE, scale=0.2),
            "c_out": normal(4 * SIZE, SIZE, scale=0.2),
        }

    params = {
        "wte": normal(VOCABULARY, SIZE),
        "wpe": normal(BLOCK, SIZE),
        "h": [block() for _ in range(LAYERS)],
        "ln_f": jnp.ones(SIZE),
    }
    return {"params": params, "opt_state": optimizer.init(params)}


def make():
    return (_create(initial_key()),)


def batches():
    rng = np.random.RandomState(0)
    text = rng.randint(0, VOCABULARY, 200).astype(np.int32)
    made = []
    for _ in range(10):
        places = rng.randint(0, len(text) - BLOCK - 1, (8, 1)) + np.arange(BLOCK)
        made.append((text[places], text[places + 1]))
    return made


def layer_norm(scale, x):
    x = x - x.mean(-1, keepdims=True)
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


def attention(params, x):
    batch, length, _ = x.shape
    q, k, v = jnp.split(x @ params["c_attn"], 3, axis=-1)
    q, k, v = (y.reshape(batch, length, HEADS, -1).swapaxes(1, 2) for y in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / jnp.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    y = jax.nn.softmax(scores, axis=-1) @ v
    return y.swapaxes(1, 2).reshape(x.shape) @ params["c_proj"]


def forward(params, tokens):
    x = params["wte"][tokens] + params["wpe"]
    for block in params["h"]:
        x = x + attention(block, layer_norm(block["ln_1"], x))
        x = x + jax.nn.gelu(layer_norm(block["ln_2"], x) @ block["c_fc"]) @ block["c_out"]
    return layer_norm(params["ln_f"], x) @ params["wte"].T


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), y).mean()


def train_step(state, batch, mean, forgets=False):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], *batch)
    if not forgets:
        grads = mean(grads)
    updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, mean(loss)


def step(state, batch):
    return train_step(state, batch, replica_mean)


def broken_step(state, batch):
    return train_step(state, batch, replica_mean, forgets=True)


def plain(num_replicas):
    return train(make(), jax.jit(partial(train_step, mean=alone)), batches())


PROGRAM = Program(
    make=make,
    batches=batches,
    step=step,
    broken_step=broken_step,
    drifting="wte",
    plain=plain,
    donate_argnums=(0,),
)
