"""TensorFlow's tutorial "Custom training with tf.distribute", with Keras' stateless methods.

The convolutions have a quarter of the tutorial's filters. In JAX, a step does not change variables:
it takes their values, and returns the new ones.
"""

import jax
import keras

import mirror
from tests.programs.keras_digits import digits

data = digits()

strategy = mirror.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

BATCH_SIZE_PER_REPLICA = 20
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
EPOCHS = 3


def batches(images, labels):
    return mirror.data.from_arrays((images, labels), GLOBAL_BATCH_SIZE, drop_remainder=True)


train_dist_dataset = strategy.distribute_dataset(batches(data.train_images, data.train_labels))
test_dist_dataset = strategy.distribute_dataset(batches(data.test_images, data.test_labels))


def create_model():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu", padding="same"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


with strategy.scope():
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    model = create_model()
    optimizer = keras.optimizers.Adam(learning_rate=0.001)
    optimizer.build(model.trainable_variables)


def compute_loss(trainable, images, labels):
    predictions, _ = model.stateless_call(trainable, [], images, training=True)
    per_example_loss = loss_object(labels, predictions)
    return per_example_loss.sum() / GLOBAL_BATCH_SIZE, predictions


def num_correct(labels, predictions):
    return (predictions.argmax(-1) == labels).sum()


def train_step(trainable, optimizer_state, inputs):
    images, labels = inputs
    grad_fn = jax.value_and_grad(compute_loss, has_aux=True)
    (loss, predictions), gradients = grad_fn(trainable, images, labels)
    gradients = mirror.all_reduce("sum", gradients)
    trainable, optimizer_state = optimizer.stateless_apply(optimizer_state, gradients, trainable)
    return trainable, optimizer_state, loss, num_correct(labels, predictions)


def test_step(trainable, inputs):
    images, labels = inputs
    loss, predictions = compute_loss(trainable, images, labels)
    return loss, num_correct(labels, predictions)


trainable = [variable.value for variable in model.trainable_variables]
optimizer_state = [variable.value for variable in optimizer.variables]
losses, test_losses, accuracies = [], [], []
for epoch in range(EPOCHS):
    total_loss, num_batches = 0.0, 0
    for batch in train_dist_dataset:
        trainable, optimizer_state, per_replica_losses, correct = strategy.run(
            train_step, (trainable, optimizer_state, batch)
        )
        total_loss += float(strategy.reduce("sum", per_replica_losses))
        num_batches += 1
    losses.append(total_loss / num_batches)

    test_loss, test_correct = 0.0, 0
    for batch in test_dist_dataset:
        loss, correct = strategy.run(test_step, (trainable, batch))
        test_loss += float(strategy.reduce("sum", loss))
        test_correct += int(strategy.reduce("sum", correct))
    num_tested = len(data.test_labels) // GLOBAL_BATCH_SIZE * GLOBAL_BATCH_SIZE
    test_losses.append(test_loss * GLOBAL_BATCH_SIZE / num_tested)
    accuracies.append(test_correct / num_tested)
    print(
        f"Epoch {epoch + 1}, Loss: {losses[-1]}, Test Loss: {test_losses[-1]}, "
        f"Test Accuracy: {accuracies[-1] * 100}"
    )

for variable, value in zip(model.trainable_variables, trainable, strict=True):
    variable.assign(value)
