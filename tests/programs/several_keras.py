"""Keras models in one process of several: refused at once, whatever happens in the scope."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import mirror
from tests.support.messages import refused

strategy = mirror.MultiWorkerMirroredStrategy()
x, y = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")
PARTS = ("of several processes", repr(strategy)[:20], "mirror.Trainer")


def new_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def compiled():
    model = new_model()
    model.compile("sgd", "mse")
    return model


with strategy.scope():
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    refused(NotImplementedError, new_model, *PARTS, "created")
built = keras.Sequential([keras.Input((3,)), layer])
built.compile("sgd", "mse")
outside = compiled()
with strategy.scope():
    refused(NotImplementedError, lambda: outside.compile("adam", "mse"), *PARTS, "compiled")
    for call in (outside.fit, outside.evaluate, outside.train_on_batch):
        refused(NotImplementedError, lambda call=call: call(x, y), *PARTS, "trained")
    refused(NotImplementedError, lambda: outside.predict(x), *PARTS, "trained")
refused(NotImplementedError, lambda: built.fit(x, y), *PARTS)

outside.fit(x, y, verbose=0)
print("refused, and trained outside:", outside.predict(x, verbose=0).shape)
