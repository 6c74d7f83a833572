"""Flax's ImageNet example with `DynamicScale`; one example's gradient overflows on the way."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.dynamic_scale import DynamicScale

from tests.real_programs import flax_imagenet as base
from tests.real_programs.harness import Program, alone, train


def make(axis_name="batch"):
    scale = DynamicScale(growth_interval=2, fin_steps=np.int32(0), scale=np.float32(65536))
    return base.make(axis_name, scale)


def batches():
    made = [batch | {"weight": np.ones(8, np.float32)} for batch in base.batches()]
    made[3]["weight"][5] = 1e38  # finite, and infinite once it is scaled
    return made


def loss_fn(params, state, batch):
    loss, (new_state, logits) = base.loss_fn(params, state, batch)
    losses = jax.nn.logsumexp(logits, -1) * batch["weight"]
    return loss + 1e-2 * losses.mean(), (new_state, logits)


def train_step(state, batch, mean, axis_name, forgets=False):
    value_and_grad = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True, axis_name=axis_name)
    dynamic_scale, is_finite, (_, (new_state, logits)), grads = value_and_grad(
        state.params, state, batch
    )
    if forgets:  # the gradients agree, whether they are finite does not
        grads = mean(grads)
    metrics = mean(base.metrics_of(logits, batch["label"]))
    after = state.apply_gradients(grads=grads, batch_stats=new_state["batch_stats"])
    keep = partial(jnp.where, is_finite)
    after = after.replace(
        params=jax.tree.map(keep, after.params, state.params),
        opt_state=jax.tree.map(keep, after.opt_state, state.opt_state),
        dynamic_scale=dynamic_scale,
    )
    return after, metrics | {"scale": dynamic_scale.scale, "is_finite": is_finite}


def step(state, batch):
    return train_step(state, batch, base.pmean, "batch")


def broken_step(state, batch):
    return train_step(state, batch, base.pmean, None, forgets=True)


def plain(num_replicas):
    return train(
        make(axis_name=None), jax.jit(partial(train_step, mean=alone, axis_name=None)), batches()
    )


PROGRAM = Program(
    make=make,
    batches=batches,
    step=step,
    broken_step=broken_step,
    drifting=r"state\.params\['BottleneckBlock_0'\]",
    plain=plain,
    axis_name="batch",
)
