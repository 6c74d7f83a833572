"""LoRA in Flax NNX: adapters train, the layers that they adapt are frozen."""

from functools import partial

import jax
import numpy as np
import optax
from flax import nnx

from tests.real_programs.harness import Program, alone, initial_key, replica_mean, train


class Classifier(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.LoRALinear(6, 16, lora_rank=2, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.second = nnx.LoRALinear(16, 4, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.second(self.norm(nnx.gelu(self.first(x))))


@nnx.jit
def _create():
    model = Classifier(rngs=nnx.Rngs(initial_key()))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)


def make():
    return _create()


def batches():
    rng = np.random.RandomState(0)
    return [
        {
            "x": rng.randn(8, 6).astype(np.float32),
            "y": rng.randint(0, 4, 8).astype(np.int32),
        }
        for _ in range(10)
    ]


def loss_fn(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def train_step(model, optimizer, batch, mean, forgets=False):
    adapters = nnx.DiffState(0, nnx.LoRAParam)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=adapters)(model, batch)
    optimizer.update(model, grads if forgets else mean(grads))
    return mean(loss)


def step(model, optimizer, batch):
    return train_step(model, optimizer, batch, replica_mean)


def broken_step(model, optimizer, batch):
    return train_step(model, optimizer, batch, replica_mean, forgets=True)


def plain(num_replicas):
    return train(make(), nnx.jit(partial(train_step, mean=alone)), batches(), in_place=True)


def arrays(state):
    return nnx.to_pure_dict(nnx.state(state))


def frozen(state):
    """Returns the parameters that are not adapters."""
    model, _ = state
    parameters = nnx.state(model, lambda path, x: type(x) is nnx.Param)
    return jax.tree.map(np.asarray, nnx.to_pure_dict(parameters))


PROGRAM = Program(
    make=make,
    batches=batches,
    step=step,
    broken_step=broken_step,
    drifting=r"model\.second\.lora\.lora_b",
    plain=plain,
    in_place=True,
    arrays=arrays,
)
