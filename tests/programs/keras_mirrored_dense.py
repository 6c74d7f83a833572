"""Fits a line, mirrored over all GPUs or all host devices."""

import keras
import numpy as np

import mirror

gpus = mirror.config.list_logical_devices("GPU") or mirror.config.list_logical_devices("CPU")
strategy = mirror.MirroredStrategy(gpus)
with strategy.scope():
    inputs = keras.layers.Input(shape=(1,))
    predictions = keras.layers.Dense(1)(inputs)
    model = keras.models.Model(inputs=inputs, outputs=predictions)
    model.compile(loss="mse", optimizer=keras.optimizers.SGD(learning_rate=0.2))

x = np.linspace(-1, 1, 100, dtype="float32").reshape(-1, 1)
history = model.fit(x, 3 * x - 1, batch_size=10, epochs=3, verbose=2)
eval_loss = model.evaluate(x, 3 * x - 1, verbose=2)
