"""A parameter server and its worker, written by hand with Ray and JAX alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray

RATE, EPSILON = 1e-3, 1e-5
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
Leaves = Sequence[tuple[Any, Any]]


def mean_loss(layers: Leaves, batch: Mapping[str, Any]) -> jax.Array:
    """Returns the loss of an MLP, whose layers are pairs of kernel and bias."""
    x = batch["x"]
    for number, (kernel, bias) in enumerate(layers):
        x = x @ kernel + bias
        if number < len(layers) - 1:
            x = jax.nn.relu(x)
    return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()


class Server:
    """Holds the parameters and the state of Adam.

    Args:
        layers: The first parameters.
    """

    def __init__(self, layers: Leaves) -> None:
        tx = optax.adam(RATE, eps=EPSILON)
        self._layers = jax.tree.map(jnp.array, layers)
        self._state = tx.init(self._layers)

        def update(layers: Any, state: Any, grads: Any) -> Any:
            changes, state = tx.update(grads, state, layers)
            return optax.apply_updates(layers, changes), state

        self._update = jax.jit(update, donate_argnums=(0, 1))

    def pull(self) -> Any:
        """Returns the parameters."""
        return jax.tree.map(np.asarray, self._layers)

    def push(self, grads: Any) -> None:
        """Applies a gradient."""
        results = self._update(self._layers, self._state, grads)
        self._layers, self._state = jax.block_until_ready(results)


class Bytes:
    """Sends and receives as many bytes as a `Server`, and computes nothing.

    Args:
        layers: The parameters.
    """

    def __init__(self, layers: Leaves) -> None:
        self._layers = jax.tree.map(np.array, layers)

    def pull(self) -> Any:
        """Returns the parameters."""
        return self._layers

    def push(self, grads: Any) -> None:
        """Ignores a gradient."""


class Worker:
    """Computes gradients.

    Args:
        computes: Whether it does; otherwise it pushes what it pulled.
    """

    def __init__(self, computes: bool) -> None:
        self._computes, self._step = computes, jax.jit(jax.value_and_grad(mean_loss))

    def step(self, server: Any, batch: Any) -> float:
        """Takes a step, and returns the loss."""
        layers = ray.get(server.pull.remote())
        loss, grads = self._step(layers, batch) if self._computes else (0.0, layers)
        ray.get(server.push.remote(jax.tree.map(np.asarray, grads)))
        return float(loss)


class Chain:
    """One server and one worker, whose step the main program calls.

    Args:
        layers: The first parameters.
        batch: The batch of every step.
        computes: Whether they compute, or only send the bytes.
    """

    def __init__(self, layers: Leaves, batch: Any, *, computes: bool = True) -> None:
        options = {"num_cpus": 0, "runtime_env": {"env_vars": ENVIRONMENT}}
        actor: Any = Server if computes else Bytes
        self._server: Any = ray.remote(actor).options(**options).remote(layers)
        worker: Any = ray.remote(Worker)
        self._worker: Any = worker.options(**options).remote(computes)
        self._batch = batch

    def take(self, steps: int) -> list[float]:
        """Takes some steps, one after the other; returns the losses."""
        call = self._worker.step
        return [ray.get(call.remote(self._server, self._batch)) for _ in range(steps)]

    def close(self) -> None:
        """Ends the processes."""
        for actor in (self._worker, self._server):
            ray.kill(actor)
