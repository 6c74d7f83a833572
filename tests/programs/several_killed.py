"""Trains in one process of several, of which one kills itself at a random moment.

python several_killed.py DIRECTORY KILLS SEED

The attempt decides which process, and when; the first ones are killed, until there are KILLS.
"""

import hashlib
import os
import random
import signal
import sys
import threading
import time

import jax
import numpy as np
import optax
from flax import nnx

import mirror

directory, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
attempt = int(os.environ.get("MIRROR_RESTARTS", "0"))
mirror.distributed.initialize(heartbeat_secs=20, agreement_secs=30)
strategy = mirror.MultiWorkerMirroredStrategy()
chance = random.Random(1000 * seed + attempt)
victim, secs = chance.randrange(strategy.num_workers), chance.uniform(0, 1.0)
numbers = np.random.default_rng(0)
arrays = {
    "x": numbers.normal(size=(42, 3)).astype(np.float32),
    "y": numbers.normal(size=(42, 1)).astype(np.float32),
}


class KillsItself(mirror.callbacks.Callback):
    """A timer, so that the moment may be in a step, in a save or between them."""

    def on_step(self, fit):
        if self.is_first and attempt < kills and mirror.distributed.process_index() == victim:
            threading.Timer(secs, os.kill, (os.getpid(), signal.SIGKILL)).start()
        self.is_first = False
        time.sleep(0.01)

    is_first = True


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
trainer.fit(arrays, epochs=60, batch_size=8, callbacks=[checkpoint, KillsItself()], progress=False)
digest = hashlib.sha256()
for leaf in jax.tree.leaves(nnx.state((trainer.model, trainer.optimizer), nnx.Not(nnx.RngKey))):
    digest.update(np.asarray(leaf).tobytes())
print("ended at", trainer._position.step, digest.hexdigest()[:16], flush=True)
