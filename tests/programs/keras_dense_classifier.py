"""Two dense layers learn digits, mirrored over all GPUs or all host devices."""

import keras

import mirror
from tests.programs.keras_digits import digits

data = digits()
strategy = mirror.MirroredStrategy()
with strategy.scope():
    model = keras.models.Sequential()
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(128, activation="relu"))
    model.add(keras.layers.Dense(10, activation="softmax"))
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])

history = model.fit(data.train_images, data.train_labels, epochs=3, verbose=2)
eval_loss, eval_accuracy = model.evaluate(data.test_images, data.test_labels, verbose=2)
