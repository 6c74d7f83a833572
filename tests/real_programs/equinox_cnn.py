"""Equinox's CNN guide: functions among the layers, the model passed to `run` as it is."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.real_programs.harness import Program, alone, initial_key, replica_mean, train

optim = optax.adamw(1e-3)


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=4, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2, stride=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(48, 16, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(16, 12, key=keys[2]),
            eqx.nn.Dropout(p=0.5, inference=True),
            jax.nn.relu,
            eqx.nn.Linear(12, 10, key=keys[3]),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@eqx.filter_jit
def _create(key):
    model = CNN(key)
    return model, optim.init(eqx.filter(model, eqx.is_array))


def make():
    return _create(initial_key())


def batches():
    rng = np.random.RandomState(0)
    return [
        {
            "x": rng.randn(8, 1, 12, 12).astype(np.float32),
            "y": rng.randint(0, 10, 8).astype(np.int32),
        }
        for _ in range(10)
    ]


def loss_fn(model, x, y):
    log_probabilities = jax.vmap(model)(x)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, y[:, None], axis=1))


def train_step(model, opt_state, batch, mean, forgets=False):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch["x"], batch["y"])
    if not forgets:
        grads = mean(grads)
    updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, mean(loss)


def step(model, opt_state, batch):
    return train_step(model, opt_state, batch, replica_mean)


def broken_step(model, opt_state, batch):
    return train_step(model, opt_state, batch, replica_mean, forgets=True)


def plain(num_replicas):
    @eqx.filter_jit
    def alone_step(model, opt_state, batch):
        return train_step(model, opt_state, batch, alone)

    return train(make(), alone_step, batches())


PROGRAM = Program(
    make=make,
    batches=batches,
    step=step,
    broken_step=broken_step,
    drifting=r"layers\[0\]\.weight",
    plain=plain,
)
