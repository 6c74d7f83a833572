"""Two processes, of which the last ends, or does something else, while the other one continues.

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
strategy = mirror.MultiWorkerMirroredStrategy()
differs = mirror.distributed.process_index() == 1
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
        if how == "evaluate":
            trainer.evaluate(data, batch_size=4)
        if how == "assign":
            model.bias[...] = jnp.full(1, 2.0)


trainer.evaluate(data, batch_size=4)  # its program has run before
started = time.time()
if how == "less data" and differs:
    data = {name: rows[:36] for name, rows in data.items()}
if how == "return":
    batches = list(strategy.distribute_dataset([{"x": data["x"][:4]}] * 60))

    def step(batch):
        return mirror.get_replica_context().all_reduce("sum", batch["x"].sum())

    for i, batch in enumerate(batches):
        if differs and i == 30:
            break
        total = float(strategy.run(step, (batch,)))
else:
    trainer.fit(data, epochs=60, batch_size=size, callbacks=Differs(), progress=False)
print("ended", flush=True)
