"""Fits a line, mirrored over all GPUs or all host devices, and logs placement.

Usage: p10_mirrored_dense.py [host]     host: collectives are reduced on the CPU
"""

import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mirror

mirror.debugging.set_log_device_placement(True)

gpus = mirror.config.list_logical_devices("GPU") or mirror.config.list_logical_devices("CPU")
on_host = mirror.ReductionToOneDevice() if "host" in sys.argv else None
strategy = mirror.MirroredStrategy(gpus, cross_device_ops=on_host)
with strategy.scope():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))


def mean_squared_error(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)


x = np.linspace(-1, 1, 100, dtype=np.float32).reshape(-1, 1)
data = mirror.data.from_arrays({"x": x, "y": 3 * x - 1}, batch_size=10)
trainer = mirror.Trainer(model, optax.sgd(0.2), mean_squared_error, strategy=strategy)
history = trainer.fit(data, epochs=3)
print("loss", *(f"{loss:.6f}" for loss in history["loss"]))
print("kernel", model.kernel[...].item(), "bias", model.bias[...].item())
