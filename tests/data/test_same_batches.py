"""Global input: a process that reads other batches than the rest is found."""

import pytest

from tests.support import processes
from tests.support.messages import assert_message

SHUFFLES = """
import sys, numpy as np, optax, mirror
from flax import nnx
mirror.distributed.initialize(heartbeat_secs=4, shutdown_secs=5)
strategy = mirror.MultiWorkerMirroredStrategy()
me = mirror.distributed.process_index()
def loss_fn(model, batch):
    return optax.squared_error(model(batch["x"]), batch["y"])[:, 0]
with strategy.scope():
    trainer = mirror.Trainer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn)
arrays = {"x": np.arange(60.0).reshape(20, 3) / 60, "y": np.ones((20, 1))}
seed = int(me == int(sys.argv[1]))
trainer.fit(arrays, epochs=200, batch_size=4, seed=seed, progress=False)
print("trained", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_another_shuffle_seed_of_one_process_ends_the_training(who):
    """The process that reads later finds it, and JAX ends the other one, which may be in a step."""
    ended = processes.run(["-c", SHUFFLES, str(who)], devices=1, timeout=900)
    assert all(process.status not in (0, None) for process in ended), ended
    assert not any("trained" in process.output for process in ended)
    outputs = "".join(process.output for process in ended)
    message = outputs[outputs.index("ReplicaDivergenceError:") :].splitlines()[0]
    assert_message(message, names=["process 0", "process 1", "batch['x']", "first batch"])
    assert "seed=0" in message
