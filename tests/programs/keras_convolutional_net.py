"""Three convolutions with pooling and dropout, three dense layers; each batch is split.

The layers have a sixteenth of the guide's width.
"""

import time

import keras

import mirror
from tests.programs.keras_digits import digits

DROPOUT_CONV, DROPOUT_DENSE, WIDTH = 0.7, 0.5, 16


def conv_net():
    layers = keras.layers
    model = keras.Sequential([keras.Input((8, 8, 1))])
    for filters in (64, 128, 128):
        model.add(layers.Conv2D(filters // WIDTH, 3, padding="same", activation="relu"))
        model.add(layers.MaxPooling2D(2, strides=2, padding="same"))
        model.add(layers.Dropout(1 - DROPOUT_CONV))
    model.add(layers.Flatten())
    model.add(layers.Dense(1024 // WIDTH, activation="relu"))
    model.add(layers.Dropout(1 - DROPOUT_DENSE))
    model.add(layers.Dense(256 // WIDTH, activation="relu"))
    model.add(layers.Dense(10))
    return model


data = digits()
strategy = mirror.MirroredStrategy()
with strategy.scope():
    model = conv_net()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(learning_rate=0.001), loss, metrics=["accuracy"])

start = time.perf_counter()
history = model.fit(data.train_images, data.train_labels, batch_size=100, epochs=3, verbose=2)
print(f"Devices: {strategy.num_replicas_in_sync}, time: {time.perf_counter() - start:.3f} s")
