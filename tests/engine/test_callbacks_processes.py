"""A host callback that fails in one process of several: each of them runs the body of this test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mirror
from mirror import testing
from mirror.pytest_plugin import (
    strategy as strategy,  # not the one of conftest.py, which has one process
)
from tests.support.messages import raises


@pytest.mark.slow
@pytest.mark.mirror(processes=2, replicas=[4])
def test_a_failed_callback_changes_the_state_of_no_process(strategy):
    me, fails = mirror.distributed.process_index(), []

    def look(x):
        if me in fails:
            raise KeyError("bad example")
        return np.asarray(x)

    def step(model, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = jax.pure_callback(look, shape, x, vmap_method="sequential")
        model.w[...] += mirror.all_reduce("sum", x.sum())

    with strategy.scope():
        model = nnx.Module()
        model.w = nnx.Param(jnp.zeros(()))
    (x,) = strategy.distribute_dataset([np.ones(4, np.float32)])
    strategy.run(step, (model, x))
    for failing, error in ([0], KeyError), ([1], KeyError), ([0, 1], KeyError):
        fails[:] = failing
        if me in failing:
            with raises(error, values="bad example"):
                strategy.run(step, (model, x))
        else:
            with raises(RuntimeError, values=["step", f"process {failing[0]}", "bad example"]):
                strategy.run(step, (model, x))
        assert float(model.w[...]) == 4
    fails.clear()
    strategy.run(step, (model, x))
    assert float(model.w[...]) == 8
    testing.assert_mirrored(model, strategy)
