"""Flax NNX's MNIST tutorial: a CNN whose loss and accuracy are `nnx.MultiMetric`."""

from functools import partial

import numpy as np
import optax
from flax import nnx

import mirror
from tests.real_programs.harness import Program, alone, initial_key, replica_mean, train


class CNN(nnx.Module):
    def __init__(self, axis_name, *, rngs):
        self.conv1 = nnx.Conv(1, 4, (3, 3), use_bias=False, rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(4, axis_name=axis_name, rngs=rngs)
        self.conv2 = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.linear1 = nnx.Linear(32, 16, rngs=rngs)
        self.linear2 = nnx.Linear(16, 10, rngs=rngs)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))

    def __call__(self, x):
        x = self.avg_pool(nnx.silu(self.batch_norm1(self.conv1(x))))
        x = self.avg_pool(nnx.silu(self.conv2(x)))
        return self.linear2(nnx.silu(self.linear1(x.reshape(x.shape[0], -1))))


@partial(nnx.jit, static_argnames=("axis_name",))
def _create(axis_name):
    model = CNN(axis_name, rngs=nnx.Rngs(initial_key()))
    optimizer = nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, optimizer, metrics


def make(axis_name=mirror.REPLICA_AXIS):
    return _create(axis_name)


def batches():
    rng = np.random.RandomState(0)
    return [
        {
            "image": rng.randn(8, 8, 8, 1).astype(np.float32),
            "label": rng.randint(0, 10, 8).astype(np.int32),
        }
        for _ in range(10)
    ]


def loss_fn(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), logits


def train_step(model, optimizer, metrics, batch, mean, forgets=False):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads if forgets else mean(grads))
    return mean(loss)


def step(model, optimizer, metrics, batch):
    return train_step(model, optimizer, metrics, batch, replica_mean)


def broken_step(model, optimizer, metrics, batch):
    return train_step(model, optimizer, metrics, batch, replica_mean, forgets=True)


def plain(num_replicas):
    alone_step = nnx.jit(partial(train_step, mean=alone))
    return train(make(axis_name=None), alone_step, batches(), in_place=True)


def arrays(state):
    """Returns parameters, optimizer state, and what the metrics amount to."""
    model, optimizer, metrics = state
    return nnx.to_pure_dict(nnx.state((model, optimizer))), metrics.compute()


PROGRAM = Program(
    make=make,
    batches=batches,
    step=step,
    broken_step=broken_step,
    drifting=r"model\.linear2\.kernel",
    plain=plain,
    in_place=True,
    arrays=arrays,
)
