"""`strategy.explain` in several processes, each of which runs the body of these tests."""

import time

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import testing
from mirror.pytest_plugin import (
    strategy as strategy,  # not the one of conftest.py, which has one process
)
from tests.support import inside
from tests.support.messages import raises
from tests.support.models import MLP, batches, nnx_step

STEPS = 3


@pytest.mark.slow
@pytest.mark.mirror(processes=2, replicas=[4])
def test_explain_makes_the_same_launches_in_every_process(strategy):
    with strategy.scope():
        model = MLP(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    data = strategy.distribute_dataset(batches((12,), 3))
    state = [np.asarray(x) for x in jax.tree.leaves(nnx.state((model, optimizer)))]
    with mirror.debugging.watch(60):  # counts the launches that span processes
        explanation = strategy.explain(nnx_step, (model, optimizer), data=data, steps=STEPS)
        num_launches = inside.launches().joint[-1].joint_number
    (batch,) = strategy.distribute_dataset(batches((12,), 1))
    alone = strategy.explain(nnx_step, (model, optimizer, batch), steps=STEPS)

    assert sum(explanation.secs) == pytest.approx(explanation.wall_secs)
    assert min(explanation.secs) >= 0
    assert explanation.num_collectives == 1
    assert explanation.speedup > 0
    assert alone.speedup > 0
    assert len(explanation.devices) == 4
    facts = {
        "launches": num_launches,
        "bytes": explanation.collective_bytes,
        "arrays": explanation.num_arrays,
        # A process names the devices of the others with their tasks.
        "memory": {**explanation.memory.to_dict(), "devices": None},
    }
    for group in facts["memory"]["groups"]:
        assert len(set(group["device_bytes"])) == 1, group
    gather = inside.consensus_of_processes().gather
    mine, other = gather("test/explain", facts, time.monotonic() + 900)
    assert mine == other
    assert num_launches > 4 * STEPS  # two loops, idle steps, and collectives alone

    for now, then in zip(jax.tree.leaves(nnx.state((model, optimizer))), state, strict=True):
        np.testing.assert_array_equal(np.asarray(now), then)
    testing.assert_mirrored((model, optimizer), strategy)


@pytest.mark.slow
@pytest.mark.mirror(processes=2)
def test_explain_rejects_another_number_of_steps(strategy):
    (x,) = strategy.distribute_dataset([np.ones(4, np.float32)])
    steps = 2 + mirror.distributed.process_index()
    with raises(mirror.ProgramMismatchError, values=["2 steps", "3 steps"], names="explain"):
        strategy.explain(lambda x: x * 2, (x,), steps=steps)
    assert strategy.explain(lambda x: x * 2, (x,), steps=2).steps == 2
