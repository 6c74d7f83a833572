"""Trains in one process of several, and ends in a way that an argument selects.

python several_training.py MODE DIRECTORY
"""

import hashlib
import os
import signal
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx

import mirror

mode, directory = sys.argv[1], sys.argv[2]
mirror.distributed.initialize(agreement_secs=20)
strategy = mirror.MultiWorkerMirroredStrategy()
me = mirror.distributed.process_index()
random = np.random.default_rng(0)
arrays = {
    "x": random.normal(size=(50, 3)).astype(np.float32),
    "y": random.normal(size=(50, 1)).astype(np.float32),
}


def loss_fn(model, batch):
    return optax.squared_error(model(batch["x"]), batch["y"])[:, 0]


class Ends(mirror.callbacks.Callback):
    """At step 7, one process does what the mode says; in some modes it is slower."""

    def on_step(self, fit):
        if mode.endswith("slow") and me == 1:
            time.sleep(0.02)
        if fit.position.step != 7 or me != 1:
            return
        if mode.startswith("stop"):
            fit.stop("seven are enough")
        elif mode.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, mode.partition(" ")[0]))
        elif mode == "kill" and not int(os.environ.get("MIRROR_RESTARTS", "0")):
            time.sleep(0.5)  # so that a checkpoint is complete
            os.kill(os.getpid(), signal.SIGKILL)


class StopsAll(mirror.callbacks.Callback):
    """Every process stops at the same step, as `EarlyStopping` does."""

    def on_step(self, fit):
        if mode == "all stop" and fit.position.step == 9:
            fit.stop("nine are enough")

    def on_epoch_end(self, fit, logs):
        if mode == "epoch" and fit.position.epoch == 2:
            fit.stop("two epochs are enough")


with strategy.scope():
    model = nnx.Sequential(nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 1, rngs=nnx.Rngs(1)))
    trainer = mirror.Trainer(model, optax.adam(0.01), loss_fn)
if mode in ("resume", "kill"):
    try:
        trainer.restore(directory)
    except FileNotFoundError:
        print("starts", flush=True)
    else:
        print("resumes at", trainer._position.step, flush=True)
checkpoint = mirror.callbacks.Checkpoint(directory, every_steps=5, keep=None)
try:
    trainer.fit(
        arrays,
        epochs=4,
        batch_size=8,
        validation_split=0.2,
        callbacks=[checkpoint, Ends(), StopsAll()],
    )
finally:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(nnx.state((trainer.model, trainer.optimizer))):
        digest.update(np.asarray(leaf).tobytes())
    print("ended at", trainer._position.step, digest.hexdigest()[:16], flush=True)
strategy.check_mirrored((trainer.model, trainer.optimizer))
trainer.save(directory)
print("saved", sorted(os.listdir(directory)), flush=True)
