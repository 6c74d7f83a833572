"""A test with a stalled replica, which `tests/tools/test_plugin.py` copies and runs."""

import time

import jax
import numpy as np
import pytest

import mirror


def wait(replica):
    if replica == 1:
        time.sleep(60)
    return np.float32(0)


def step(x):
    context = mirror.get_replica_context()
    shape = jax.ShapeDtypeStruct((), np.float32)
    y = jax.pure_callback(wait, shape, context.replica_id_in_sync_group)
    return context.all_reduce("sum", x + y)


@pytest.mark.mirror(replicas=4, timeout=4)
def test_stalls(strategy):
    float(strategy.run(step, (np.float32(1),)))
