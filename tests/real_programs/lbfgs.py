"""L-BFGS with a zoom line search: the search evaluates the loss of the whole batch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirror
from tests.real_programs.harness import Program, alone, replica_mean, train

solver = optax.lbfgs(memory_size=3)


def make():
    rng = np.random.RandomState(0)
    params = {
        "w1": jnp.asarray(0.5 * rng.randn(5, 4), jnp.float32),
        "w2": jnp.asarray(0.5 * rng.randn(4, 3), jnp.float32),
    }
    return params, jax.jit(solver.init)(params)


def batches():
    rng = np.random.RandomState(1)
    x = rng.randn(16, 5).astype(np.float32)
    return [{"x": x, "y": rng.randint(0, 3, 16).astype(np.int32)}] * 10


def loss_fn(params, batch):
    logits = jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean() + 0.01 * optax.tree.norm(params, squared=True)


def train_step(params, opt_state, batch, mean, shared):
    def value_fn(params):
        return mean(loss_fn(shared(params), batch))

    value, grad = optax.value_and_grad_from_state(value_fn)(params, state=opt_state)
    updates, opt_state = solver.update(
        grad, opt_state, params, value=value, grad=grad, value_fn=value_fn
    )
    return optax.apply_updates(params, updates), opt_state, value


def step(params, opt_state, batch):
    shared = mirror.get_replica_context().shared
    return train_step(params, opt_state, batch, replica_mean, shared)


def broken_step(params, opt_state, batch):
    """Forgets `shared`: the gradient of the mean loss is each replica's own."""
    return train_step(params, opt_state, batch, replica_mean, alone)


def plain(num_replicas):
    return train(make(), jax.jit(partial(train_step, mean=alone, shared=alone)), batches())


def params_of(state):
    """Selects the parameters: the solver's memory is of differences, down to rounding."""
    params, _ = state
    return params


PROGRAM = Program(
    make=make,
    batches=batches,
    step=step,
    broken_step=broken_step,
    drifting="while",
    plain=plain,
    arrays=params_of,
)
