"""Trains in one process of several, and ends in a way that an argument selects.

python several_training.py MODE[,MODE...] DIRECTORY

With several modes, each has a subdirectory.
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

    def __init__(self, mode):
        self.mode = mode

    def on_step(self, fit):
        if self.mode.endswith("slow") and me == 1:
            time.sleep(0.02)
        if fit.position.step != 7 or me != 1:
            return
        if self.mode.startswith("stop"):
            fit.stop("seven are enough")
        elif self.mode.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, self.mode.partition(" ")[0]))
        elif self.mode == "kill" and not int(os.environ.get("MIRROR_RESTARTS", "0")):
            time.sleep(0.5)  # so that a checkpoint is complete
            os.kill(os.getpid(), signal.SIGKILL)


class StopsAll(mirror.callbacks.Callback):
    """Every process stops at the same step, as `EarlyStopping` does."""

    def __init__(self, mode):
        self.mode = mode

    def on_step(self, fit):
        if self.mode == "all stop" and fit.position.step == 9:
            fit.stop("nine are enough")

    def on_epoch_end(self, fit, logs):
        if self.mode == "epoch" and fit.position.epoch == 2:
            fit.stop("two epochs are enough")


def train(mode, directory):
    with strategy.scope():
        model = nnx.Sequential(
            nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 1, rngs=nnx.Rngs(1))
        )
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
            callbacks=[*[checkpoint][: "alone" not in mode], Ends(mode), StopsAll(mode)],
        )
    finally:
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(nnx.state((trainer.model, trainer.optimizer))):
            digest.update(np.asarray(leaf).tobytes())
        print("ended at", trainer._position.step, digest.hexdigest()[:16], flush=True)
    strategy.check_mirrored((trainer.model, trainer.optimizer))
    trainer.save(directory)
    print("saved", sorted(os.listdir(directory)), flush=True)


modes, directory = sys.argv[1].split(","), sys.argv[2]
for mode in modes:
    train(mode, directory if len(modes) == 1 else os.path.join(directory, mode))
