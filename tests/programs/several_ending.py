"""Two processes, of which one ends, or does something else, while the other one continues.

It is the last process, except for "chief returns" and "save".

python several_ending.py HOW
"""

import sys
import time

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mirror

how = sys.argv[1]
if how == "save":
    mirror.distributed.initialize(agreement_secs=5)
strategy = mirror.MultiWorkerMirroredStrategy()
differs = mirror.distributed.process_index() == (how not in ("chief returns", "save"))
with strategy.scope():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    trainer = mirror.Trainer(model, optax.sgd(0.1), "mean_squared_error", labels="y")
size = 8 if how == "batch size" and differs else 4
data = {"x": np.ones((48, 3), np.float32), "y": np.ones((48, 1), np.float32)}


class Differs(mirror.callbacks.Callback):
    """What one process does after the third step of the second epoch."""

    steps = 0

    def on_step(self, fit):
        self.steps += 1
        if not differs or self.steps != 15:
            return
        if how == "exit":
            sys.exit(3)
        if how == "exception":
            raise ValueError("bad row 12")
        if how == "save":
            trainer.save("never written")
        if how == "evaluate":
            trainer.evaluate(data, batch_size=4)
        if how == "assign":
            model.bias[...] = jnp.full(1, 2.0)


trainer.evaluate(data, batch_size=4)  # its program has run before
started = time.time()
if how == "less data" and differs:
    data = {name: rows[:36] for name, rows in data.items()}
if how == "exit before barrier":
    if differs:
        sys.exit(3)
    mirror.distributed.barrier("saved")
if how == "exit before save":
    if differs:
        sys.exit(3)
    trainer.save("never written")
if how in ("return", "chief returns", "static argument", "shape", "one more launch"):
    batches = list(strategy.distribute_dataset([{"x": data["x"][:4]}] * 60))

    def step(batch, is_max):
        total = batch["x"].max() if is_max else batch["x"].sum()
        return mirror.all_reduce("sum", total)

    for i, batch in enumerate(batches):
        if differs and i == 30 and how in ("return", "chief returns"):
            break
        is_max = i % 2 == 1 if i < 4 else differs and i == 30 and how == "static argument"
        if how == "shape" and differs and i == 30:
            (batch,) = strategy.distribute_dataset([{"x": data["x"][:6]}], prefetch=0)
        total = float(strategy.run(step, (batch, is_max)))
    if how == "one more launch" and differs:
        strategy.run(step, (batches[0], False))  # the program ends without its result
else:
    trainer.fit(data, epochs=60, batch_size=size, callbacks=Differs(), progress=False)
print("ended", flush=True)
