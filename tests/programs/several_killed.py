"""Trains in one process of several, of which one kills itself in each of the first attempts.

python several_killed.py DIRECTORY KILLS EPOCHS

The processes take turns. Of four attempts, the first and the last end in a save, the others at a
random moment.
"""

import hashlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import mirror

directory, kills, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
attempt = int(os.environ.get("MIRROR_RESTARTS", "0"))
mirror.distributed.initialize(heartbeat_secs=20, agreement_secs=30)
strategy = mirror.MultiWorkerMirroredStrategy()
chance = random.Random(attempt)
victim, is_in_save = attempt % strategy.num_workers, attempt % 4 in (0, 3)
numbers = np.random.default_rng(0)
arrays = {
    "x": numbers.normal(size=(42, 3)).astype(np.float32),
    "y": numbers.normal(size=(42, 1)).astype(np.float32),
}


def die():
    if is_in_save:
        while not any(directory.glob("*.unfinished*")):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.03))
    else:
        time.sleep(chance.uniform(0, 0.5))
    print("dies", "in a save" if is_in_save else "at a random moment", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


class KillsItself(mirror.callbacks.Callback):
    """In a thread, so that the moment may be in a step, in a save or between them."""

    def on_fit_begin(self, fit):
        if attempt < kills and mirror.distributed.process_index() == victim:
            threading.Thread(target=die, daemon=True).start()

    def on_step(self, fit):
        time.sleep(0.01)


with strategy.scope():
    model = nnx.Sequential(
        nnx.Linear(3, 8, rngs=nnx.Rngs(0)),
        nnx.Dropout(0.5, rngs=nnx.Rngs(2)),
        nnx.Linear(8, 1, rngs=nnx.Rngs(1)),
    )
    trainer = mirror.Trainer(
        model, optax.adam(0.01), lambda m, b: optax.squared_error(m(b["x"]), b["y"])[:, 0]
    )
try:
    trainer.restore(directory)
except FileNotFoundError:
    print("starts", flush=True)
else:
    print("resumes at", trainer._position.step, flush=True)
checkpoint = mirror.callbacks.Checkpoint(directory, every_steps=3, keep=2)
trainer.fit(arrays, epochs, batch_size=8, callbacks=[checkpoint, KillsItself()], progress=False)
digest = hashlib.sha256()
for leaf in jax.tree.leaves(nnx.state((trainer.model, trainer.optimizer), nnx.Not(nnx.RngKey))):
    digest.update(np.asarray(leaf).tobytes())
print("ended at", trainer._position.step, digest.hexdigest()[:16], flush=True)
