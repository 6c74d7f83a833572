"""What one process does without the others, and many steps that nobody awaits.

python several_alone.py STEPS [unpacked]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirror
from tests.support import inside

strategy = mirror.MultiWorkerMirroredStrategy(
    cross_device_ops=mirror.AllReduce(pack_bytes=0 if "unpacked" in sys.argv else None)
)
n = strategy.num_replicas_in_sync
STEPS, LEAVES = int(sys.argv[1]), 30
launches = inside.count_all_launches(pytest.MonkeyPatch())


def step(state, batch):
    grads = mirror.all_reduce("mean", [w * batch.mean() for w in state])
    return [w - 1e-4 * g for w, g in zip(state, grads, strict=True)], batch * 2


x = mirror.PerReplica.from_stacked(np.arange(n * 4, dtype=np.float32).reshape(n, 4))
start = [np.full((64, 64), i, np.float32) for i in range(LEAVES)]
with strategy.scope():
    state = list(map(jnp.asarray, start))
    v = mirror.Variable(1.0, synchronization="on_read", aggregation="sum")
state, own = strategy.run(step, (state, x), donate_argnums=0)
mirror.distributed.barrier("one step", 60)
if strategy.is_chief:
    begun = len(launches)
    texts = [repr(own), str(own), f"{own}", repr(v), repr(strategy), str(strategy)]
    assert all(texts)
    assert [row.tolist() for row in own.values]
    assert len(strategy.local_results((state, own))) == len(strategy.local_replica_ids)
    assert float(state[1][0, 0]) < 1
    assert np.asarray(state[1]).shape == (64, 64)
    assert str(mirror.debugging.visualize_placement({"own": own, "w": state[0]}))
    assert strategy.inspect(step, (state, x)).results
    assert len(launches) == begun, "a read launches a program"
    mirror.OneDeviceStrategy("/cpu:0").run(lambda w: w + 1, (state[0],))
    print("alone", flush=True)
mirror.distributed.barrier("the chief has looked", 60)

for _ in range(STEPS):
    state, _ = strategy.run(step, (state, x), donate_argnums=0)  # nothing is awaited
strategy.check_mirrored(state)
expected = np.float64(1) * (1 - 1e-4 * float(np.arange(n * 4).mean())) ** (STEPS + 1)
np.testing.assert_allclose(np.asarray(state[1])[0, 0], expected, rtol=1e-3)
jax.block_until_ready(state)
print("finished", flush=True)
