"""A convolutional net on 28x28 pictures, each batch split over the devices; the cost of each epoch.

Usage: p14_convolutional_net.py [--devices N] [--width 1.0] [--images 2000] [--epochs 1] [--log DIR]
"""

import argparse
import itertools
import time

import optax
from flax import nnx

import mirror
from tests.programs.pictures import NUM_CLASSES, pictures

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, help="how many (default: all)")
parser.add_argument("--width", type=float, default=1.0, help="of the layers, over the full size")
parser.add_argument("--images", type=int, default=2000)
parser.add_argument("--batch-size", type=int, default=100)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--log", help="directory of a TensorBoard log, with the step's program")
options = parser.parse_args()


def wide(features):
    return max(int(features * options.width), 1)


class ConvNet(nnx.Module):
    """Three convolutions with pooling and dropout, three dense layers."""

    def __init__(self, rngs):
        sizes = [1, wide(64), wide(128), wide(128)]
        self.convs = nnx.List(
            [nnx.Conv(i, o, (3, 3), rngs=rngs) for i, o in itertools.pairwise(sizes)]
        )
        self.drop = nnx.Dropout(0.7, rngs=rngs)
        self.first = nnx.Linear(4 * 4 * sizes[-1], wide(1024), rngs=rngs)
        self.drop_first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(wide(1024), wide(256), rngs=rngs)
        self.out = nnx.Linear(wide(256), NUM_CLASSES, rngs=rngs)

    def __call__(self, x):
        for conv in self.convs:
            x = nnx.max_pool(nnx.relu(conv(x)), (2, 2), strides=(2, 2), padding="SAME")
            x = self.drop(x)
        x = self.drop_first(nnx.relu(self.first(x.reshape(len(x), -1))))
        return self.out(nnx.relu(self.second(x)))


def cost(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


devices = mirror.config.list_logical_devices("GPU") or mirror.config.list_logical_devices("CPU")
strategy = mirror.MirroredStrategy(devices[: options.devices])
with strategy.scope():
    trainer = mirror.Trainer(ConvNet(nnx.Rngs(0)), optax.adam(0.001), cost)

data = mirror.data.from_arrays(pictures(options.images), options.batch_size, shuffle=True)
log = [mirror.callbacks.TensorBoard(options.log, program=True)] if options.log else []
trainer.fit(list(data)[:1], progress=False)  # compiles
start = time.perf_counter()
history = trainer.fit(data, options.epochs, callbacks=log, progress=False)
seconds = time.perf_counter() - start
for epoch, loss in enumerate(history["loss"], start=1):
    print(f"Epoch {epoch}, total cost: {loss * options.images:.3f}")
print(f"Devices: {strategy.num_replicas_in_sync}, total time: {seconds:.3f} s")
