"""Models in nnx, in Linen and as plain pytrees, with their batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training import train_state

import mirror

CLASSES = 5


class MLP(nnx.Module):
    features = (12,)

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(12, 32, rngs=rngs)
        self.second = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.second(jax.nn.relu(self.first(x)))


class CNN(nnx.Module):
    features = (8, 8, 1)

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 2, (3, 3), rngs=rngs)
        self.out = nnx.Linear(2 * 16, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(jax.nn.relu(self.conv(x)), (2, 2), strides=(2, 2))
        return self.out(x.reshape(x.shape[0], -1))


class SyncBatchNorm(nnx.Module):
    """Batch statistics over all replicas, so that n replicas are one device on the whole batch."""

    features = (12,)

    def __init__(self, rngs: nnx.Rngs, axis_name: str | None = mirror.REPLICA_AXIS):
        # No bias: the normalization removes it, and its gradient is rounding noise.
        self.first = nnx.Linear(12, 32, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(32, axis_name=axis_name, rngs=rngs)
        self.second = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.second(jax.nn.relu(self.norm(self.first(x))))


class LocalBatchNorm(SyncBatchNorm):
    """Batch statistics of each replica's own batch; only the running ones are averaged."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs, axis_name=None)


MODELS = [MLP, CNN, SyncBatchNorm]
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(1e-3),
}


def batches(features: tuple[int, ...], count: int, size: int = 24) -> list[dict[str, np.ndarray]]:
    """Global batches of random data: 24 divides by 1, 2, 3 and 8 replicas."""
    rng = np.random.RandomState(0)
    return [
        {
            "image": rng.randn(size, *features).astype(np.float32),
            "label": rng.randint(0, CLASSES, size).astype(np.int32),
        }
        for _ in range(count)
    ]


def losses_of(logits, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def nnx_step(model, optimizer, batch):
    """One replica's step."""

    def loss_fn(model):
        return losses_of(model(batch["image"]), batch["label"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    context = mirror.get_replica_context()
    grads, loss = context.all_reduce("mean", (grads, loss))
    optimizer.update(model, grads)
    return loss


@dataclass(frozen=True)
class Training:
    """A way to train: creates state, runs a step on it, and returns the parameters."""

    create: Callable[[], Any]
    step: Callable[[mirror.Strategy, Any, Any], tuple[Any, Any]]
    parameters: Callable[[Any], dict[str, Any]]


def nnx_training(model_type, optimizer) -> Training:
    tx = optimizer()

    def create():
        model = model_type(rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(strategy, state, batch):
        return state, strategy.run(nnx_step, (*state, batch))

    return Training(create, step, lambda state: nnx.to_pure_dict(nnx.state(state[0])))


class LinenMLP(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(CLASSES)(jax.nn.relu(linen.Dense(32)(x)))


def linen_step(state, batch):
    def loss_fn(params):
        return losses_of(state.apply_fn({"params": params}, batch["image"]), batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads, loss = mirror.all_reduce("mean", (grads, loss))
    return mirror.ensure_mirrored(state.apply_gradients(grads=grads)), loss


_LINEN = LinenMLP()


def linen_training(optimizer) -> Training:
    tx = optimizer()

    def create():
        params = _LINEN.init(jax.random.key(0), jnp.zeros((1, 12)))["params"]
        return train_state.TrainState.create(apply_fn=_LINEN.apply, params=params, tx=tx)

    def step(strategy, state, batch):
        return strategy.run(linen_step, (state, batch), donate_argnums=0)

    return Training(create, step, lambda state: state.params)


_INITIAL = jax.nn.initializers.lecun_normal()  # Flax's own, so that both compile one


def plain_training(optimizer) -> Training:
    tx = optimizer()

    def plain_step(state, batch):
        def loss_fn(params):
            hidden = jax.nn.relu(batch["image"] @ params["w1"] + params["b1"])
            return losses_of(hidden @ params["w2"] + params["b2"], batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        # Written with `jax.lax`, as experienced users do.
        grads, loss = jax.lax.pmean((grads, loss), mirror.REPLICA_AXIS)
        updates, moments = tx.update(grads, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    def create():
        first, second = jax.random.split(jax.random.key(0))
        params = {
            "w1": _INITIAL(first, (12, 32)),
            "b1": jnp.zeros(32),
            "w2": _INITIAL(second, (32, CLASSES)),
            "b2": jnp.zeros(CLASSES),
        }
        return {"params": params, "moments": tx.init(params)}

    def step(strategy, state, batch):
        return strategy.run(plain_step, (state, batch), donate_argnums=0)

    return Training(create, step, lambda state: state["params"])


TRAININGS: dict[str, tuple[Callable[..., Training], tuple[int, ...]]] = {
    **{f"nnx-{m.__name__}": ((lambda o, m=m: nnx_training(m, o)), m.features) for m in MODELS},
    "linen-MLP": (linen_training, (12,)),
    "plain-MLP": (plain_training, (12,)),
}
