"""Flax's ImageNet example: a Linen ResNet of bottleneck blocks, written for `jax.pmap`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from flax.training import train_state

from tests.real_programs.harness import Program, alone, initial_key, train

CLASSES = 5
STEPS = 10
activation = linen.silu  # not relu: a rounding next to its kink is another gradient


class TrainState(train_state.TrainState):
    batch_stats: Any
    dynamic_scale: Any = None


class BottleneckBlock(linen.Module):
    filters: int
    strides: tuple[int, int]
    conv: Any
    norm: Any

    @linen.compact
    def __call__(self, x):
        y = activation(self.norm()(self.conv(self.filters, (1, 1))(x)))
        y = activation(self.norm()(self.conv(self.filters, (3, 3), self.strides)(y)))
        y = self.norm()(self.conv(4 * self.filters, (1, 1))(y))
        if x.shape != y.shape:
            x = self.norm(name="norm_proj")(
                self.conv(4 * self.filters, (1, 1), self.strides, name="conv_proj")(x)
            )
        return activation(x + y)


class ResNet(linen.Module):
    axis_name: str | None
    stages: tuple[int, ...] = (1,)

    @linen.compact
    def __call__(self, x):
        conv = partial(linen.Conv, use_bias=False)
        norm = partial(
            linen.BatchNorm,
            use_running_average=False,
            momentum=0.9,
            epsilon=1e-5,
            axis_name=self.axis_name,
        )
        x = activation(norm(name="bn_init")(conv(4, (3, 3), name="conv_init")(x)))
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                strides = (2, 2) if stage > 0 and block == 0 else (1, 1)
                x = BottleneckBlock(4 * 2**stage, strides, conv, norm)(x)
        return linen.Dense(CLASSES)(x.mean((1, 2)))


def schedule(step):
    return optax.warmup_cosine_decay_schedule(0.0, 0.02, 2, STEPS)(step)


@partial(jax.jit, static_argnames=("axis_name",))
def _create(key, dynamic_scale, axis_name):
    # The axis is not bound while parameters are initialized.
    variables = ResNet(axis_name=None).init(key, jnp.ones((1, 8, 8, 3)))
    return TrainState.create(
        apply_fn=ResNet(axis_name).apply,
        params=variables["params"],
        tx=optax.sgd(schedule, momentum=0.9, nesterov=True),
        batch_stats=variables["batch_stats"],
        dynamic_scale=dynamic_scale,
    )


def make(axis_name="batch", dynamic_scale=None):
    return (_create(initial_key(), dynamic_scale, axis_name),)


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.RandomState(0)
    patterns = rng.randn(CLASSES, 8, 8, 3)
    made = []
    for _ in range(STEPS):
        label = rng.randint(0, CLASSES, 8).astype(np.int32)
        image = patterns[label] + 0.5 * rng.randn(8, 8, 8, 3)
        made.append({"image": image.astype(np.float32), "label": label})
    return made


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, CLASSES)).mean()


def loss_fn(params, state, batch):
    logits, new_state = state.apply_fn(
        {"params": params, "batch_stats": state.batch_stats},
        batch["image"],
        mutable=["batch_stats"],
    )
    loss = cross_entropy(logits, batch["label"])
    penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
    return loss + 1e-4 * 0.5 * penalty, (new_state, logits)


def metrics_of(logits, labels):
    return {
        "loss": cross_entropy(logits, labels),
        "accuracy": jnp.mean(logits.argmax(-1) == labels),
    }


def train_step(state, batch, mean, forgets=False):
    (_, (new_state, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
        state.params, state, batch
    )
    if not forgets:
        grads = mean(grads)
    metrics = mean(metrics_of(logits, batch["label"]))
    metrics["learning_rate"] = schedule(state.step)
    return state.apply_gradients(grads=grads, batch_stats=new_state["batch_stats"]), metrics


pmean = partial(jax.lax.pmean, axis_name="batch")


def step(state, batch):
    return train_step(state, batch, pmean)


def broken_step(state, batch):
    return train_step(state, batch, pmean, forgets=True)


def plain(num_replicas):
    return train(make(axis_name=None), jax.jit(partial(train_step, mean=alone)), batches())


PROGRAM = Program(
    make=make,
    batches=batches,
    step=step,
    broken_step=broken_step,
    drifting=r"state\.params\['BottleneckBlock_0'\]",
    plain=plain,
    axis_name="batch",
)
