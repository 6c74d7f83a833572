"""Trains a network whose first half is on one device and its second on another."""

import jax
import jax.numpy as jnp
from flax import nnx

import mirror

devices = mirror.config.list_logical_devices("GPU") or mirror.config.list_logical_devices("CPU")
x = jnp.linspace(-1, 1, 24).reshape(8, 3)
y = jnp.sin(x.sum(1, keepdims=True))


def build(first, second):
    with mirror.device(first):
        lower = nnx.Linear(3, 16, rngs=nnx.Rngs(0))
    with mirror.device(second):
        upper = nnx.Linear(16, 1, rngs=nnx.Rngs(1))
    return lower, upper


def loss_fn(halves, first, second):
    lower, upper = halves
    with mirror.device(first):
        hidden = jnp.tanh(lower(x))
    with mirror.device(second):  # the activations are copied there by themselves
        return ((upper(hidden) - y) ** 2).mean()


def train(first, second):
    halves, losses = build(first, second), []
    for _ in range(20):
        loss, gradients = nnx.value_and_grad(loss_fn)(halves, first, second)
        losses.append(float(loss))
        for half, gradient, device in zip(halves, gradients, (first, second), strict=True):
            with mirror.device(device):
                nnx.update(half, jax.tree.map(lambda p, g: p - 0.3 * g, nnx.state(half), gradient))
    return halves, gradients, losses


split, split_gradients, split_losses = train(devices[0], devices[-1])
whole, whole_gradients, whole_losses = train(devices[0], devices[0])

print(mirror.debugging.visualize_placement(split))
print(f"Loss, split:   {split_losses[0]:.6f} ... {split_losses[-1]:.6f}")
print(f"Loss, unsplit: {whole_losses[0]:.6f} ... {whole_losses[-1]:.6f}")
