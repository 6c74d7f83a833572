"""TensorFlow's tutorial "Distributed training with Keras"."""

import pathlib
import tempfile

import keras

import mirror
from tests.programs.keras_digits import digits

data = digits()

strategy = mirror.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

BATCH_SIZE_PER_REPLICA = 16
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Conv2D(32, 3, activation="relu", input_shape=(8, 8, 1)),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )

    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(),
        metrics=["accuracy"],
    )

checkpoint_dir = pathlib.Path(tempfile.mkdtemp())
checkpoint_prefix = checkpoint_dir / "ckpt_{epoch}.weights.h5"


def decay(epoch):
    if epoch < 1:
        return 1e-3
    if epoch < 2:
        return 1e-4
    return 1e-5


class PrintLR(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        rate = float(model.optimizer.learning_rate.value)
        print(f"\nLearning rate for epoch {epoch + 1} is {rate:.6f}")


callbacks = [
    keras.callbacks.ModelCheckpoint(filepath=str(checkpoint_prefix), save_weights_only=True),
    keras.callbacks.LearningRateScheduler(decay),
    PrintLR(),
]

EPOCHS = 3
history = model.fit(
    data.train_images,
    data.train_labels,
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    callbacks=callbacks,
    verbose=2,
)

model.load_weights(str(checkpoint_prefix).format(epoch=EPOCHS))
eval_loss, eval_acc = model.evaluate(data.test_images, data.test_labels, verbose=2)
print(f"Eval loss: {eval_loss}, Eval accuracy: {eval_acc}")

path = str(checkpoint_dir / "my_model.keras")
model.save(path)

unreplicated_model = keras.models.load_model(path)
unreplicated = unreplicated_model.evaluate(data.test_images, data.test_labels, verbose=2)

with strategy.scope():
    replicated_model = keras.models.load_model(path)
replicated = replicated_model.evaluate(data.test_images, data.test_labels, verbose=2)
