"""Loss functions of a `Trainer` whose batch is split among several workers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror._src.ps.messages import Raised, Result
from mirror._src.training.objective import Objective
from mirror._src.training.runners import divisor_of
from mirror._src.training.steps import training_step
from tests.ps.digits import Net
from tests.ps.one_worker import Training
from tests.support.messages import assert_message
from tests.support.tables import mostly_slow

ROWS = 8


class Wide(nnx.Module):
    """Batch statistics over all replicas of the worker."""

    def __init__(self, rngs):
        self.net = Net(rngs)
        self.norm = nnx.BatchNorm(16, axis_name=mirror.REPLICA_AXIS, rngs=rngs)

    def __call__(self, x):
        return self.net(self.norm(x))


class Own(nnx.Module):
    def __init__(self, rngs):
        self.net = Net(rngs, has_noise="norm")

    def __call__(self, x):
        return self.net(x)


def losses(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def context():
    return mirror.get_replica_context()


def metric(model, batch):
    largest = context().all_reduce("max", batch["x"].max())
    return losses(model, batch), {"share": losses(model, batch) / largest}


def in_a_scan(model, batch):
    values = losses(model, batch)
    total, _ = jax.lax.scan(lambda c, x: (c + context().all_reduce("sum", x), None), 0.0, values)
    return values / total


def scanned(model, batch):
    _, kept = jax.lax.scan(lambda c, x: (c + x, x * 2), 0.0, losses(model, batch))
    return kept


REDUCING = {
    "mean": (Net, lambda m, b: losses(m, b) - context().all_reduce("mean", losses(m, b))),
    "sum of rows": (Net, lambda m, b: losses(m, b) / context().all_reduce("sum", b["x"].sum())),
    "gather": (Net, lambda m, b: losses(m, b) + context().all_gather(b["x"]).max()),
    "psum": (Net, lambda m, b: losses(m, b) * jax.lax.psum(b["x"].sum(), mirror.REPLICA_AXIS)),
    "metric": (Net, metric),
    "scan": (Net, in_a_scan),
    "batch statistics": (Wide, losses),
}
SEPARATE = {
    "rows": (Net, losses),
    "statistics of a replica": (Own, losses),
    "weighted": (Net, lambda m, b: mirror.Weighted(losses(m, b), jnp.ones(b["y"].shape))),
    "metrics": (Net, lambda m, b: (losses(m, b), {"x": b["x"].mean(1), "y": b["y"] == 1})),
    "scan": (Net, scanned),
    "keys of examples": (
        Net,
        lambda m, b: (
            losses(m, b) + jax.vmap(jax.random.normal)(mirror.example_keys(jax.random.key(0), b))
        ),
    ),
}


def answer(model, loss_fn, num_parts, accumulate_steps=1):
    model = model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    step = training_step(Objective(loss_fn), accumulate_steps)
    training = Training(model, optimizer, num_devices=2, step=step)
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(ROWS, 16)).astype(np.float32), "y": rng.integers(0, 8, ROWS)}
    return training.train(batch, np.ones(ROWS, bool), num_parts, divisor_of)


@pytest.mark.parametrize("names", mostly_slow(REDUCING, "psum", "metric"))
def test_losses_that_reduce_are_rejected_where_a_batch_is_split(names, subtests):
    """They would be over the part of one worker, silently."""
    for name in names:
        with subtests.test(msg=name):
            reply = answer(*REDUCING[name], 2)
            assert isinstance(reply, Raised)
            assert reply.text.startswith("ValueError")
            assert_message(reply.text, values=2, fix=["staleness=None"])
            assert isinstance(answer(*REDUCING[name], 1), Result)


@pytest.mark.parametrize("names", mostly_slow(SEPARATE, "metrics"))
def test_losses_of_single_examples_are_accepted(names, subtests):
    for name, accumulate_steps in zip(names, itertools.cycle([2, 1]), strict=False):
        with subtests.test(name=name, accumulate_steps=accumulate_steps):
            reply = answer(*SEPARATE[name], 2, accumulate_steps)
            assert isinstance(reply, Result), reply


def test_weights_with_a_gradient_are_rejected_where_a_batch_is_split():
    """A part has only its own sums of values and weights."""

    def dice(model, batch):
        p = jax.nn.softmax(model(batch["x"]))[:, 0]
        return mirror.Weighted(1 - p, 1 + p)

    reply = answer(Net, dice, 2)
    assert isinstance(reply, Raised)
    assert_message(reply.text, names="dice", values=2, fix=["jax.lax.stop_gradient"])
    assert isinstance(answer(Net, dice, 1), Result)
