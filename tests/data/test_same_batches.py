"""Global input: a process that reads other batches than the rest is found."""

import jax.numpy as jnp
import numpy as np
import pytest

import mirror
from tests.support import inside, processes
from tests.support.messages import assert_message

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)
BATCHES = {  # of process 1, where process 0 reads X; what its message names
    "equal": (X.copy(), ""),
    "array of JAX": (jnp.asarray(X), ""),
    "byte order": (X.astype(">f4"), ""),
    "64 bits, which the devices round": (X.astype(np.float64), ""),
    "list": (X.tolist(), "batch[0][0] (float32[] and missing)"),
    "values": (X + 1, "batch"),
    "values of JAX": (jnp.asarray(X + 1), "batch"),
    "values in another byte order": ((X + 1).astype(">f4"), "batch"),
    "same bytes in another order": (X.view(">f4"), "batch"),
    "same bytes of another type": (X.view(np.int32), "batch (int32[2,3] and float32[2,3])"),
    "shape": (X.reshape(3, 2), "batch (float32[3,2] and float32[2,3])"),
    "keys": ({"x": X}, "batch['x'] (float32[2,3] and missing)"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_the_first_batches_are_compared_as_on_the_devices(case, monkeypatch):
    batch, named = BATCHES[case]
    first = jnp.asarray(X) if case == "values of JAX" else X
    store, texts = inside.messages(), dict[str, str]()
    monkeypatch.setattr(store, "process_count", lambda: 2)
    monkeypatch.setattr(store, "set_default", texts.setdefault)
    monkeypatch.setattr(store, "get", lambda key, deadline: texts.get(key))
    of_process = [inside.same_batches("data/train.py:7/0") for _ in range(2)]
    assert len(list(of_process[0].start(iter([first])))) == 1
    monkeypatch.setattr(store, "process_index", lambda: 1)
    if not named:
        assert len(list(of_process[1].start(iter([batch])))) == 1
        return
    with pytest.raises(mirror.ReplicaDivergenceError) as error:
        list(of_process[1].start(iter([batch])))
    assert_message(str(error.value), names=["process 1", "process 0", named], fix="seed=0")


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
try:
    trainer.fit(arrays, epochs=200, batch_size=4, seed=seed, progress=False)
except mirror.ReplicaDivergenceError:
    print("raised", flush=True)
    if sys.argv[2] == "caught":
        sys.exit(9)
    raise
print("trained", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["caught", pytest.param("uncaught", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_another_shuffle_seed_of_one_process_ends_the_training(who, how):
    """The process that reads later finds it, and the other one, which waits, raises it as well."""
    ended = processes.run(["-c", SHUFFLES, str(who), how], devices=1, timeout=900)
    assert all(process.status not in (0, None) for process in ended), ended
    assert all("raised" in process.output for process in ended), ended
    assert how != "caught" or 9 in [process.status for process in ended], ended
    assert not any("trained" in process.output for process in ended)
    outputs = "".join(process.output for process in ended)
    message = outputs[outputs.index("ReplicaDivergenceError:") :].splitlines()[0]
    assert_message(message, names=["process 0", "process 1", "batch['x']", "first batch"])
    assert "seed=0" in message
