"""Data loaders with states, for tests of resuming, and what such tests compare."""

import collections
import itertools

import jax
import numpy as np
from flax import nnx

from mirror import callbacks

ROWS, SIZE, STEPS = 48, 4, 12  # examples, in batches, of an epoch
X = np.random.RandomState(0).randn(ROWS, 3).astype("float32")


class Rows:
    """A source that counts which rows are read."""

    def __init__(self):
        self.read: collections.Counter[int] = collections.Counter()

    def __repr__(self):
        return "Rows()"  # Grain's DataLoader compares it

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        self.read[int(i)] += 1
        return {"x": X[i], "y": X[i].sum(), "i": np.int32(i)}


class Losses(callbacks.Callback):
    """Records the loss of each step, and ends the training after one."""

    def __init__(self, last: int | None = None):
        self.of_steps: dict[int, float] = {}
        self.last = last

    def on_metrics(self, fit, step, logs):
        self.of_steps[step] = logs["loss"]

    def on_step(self, fit):
        if fit.position.step == self.last:
            fit.trainer.save("ckpt")
            raise InterruptedError


def weights(trainer) -> list:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(trainer.model))]


class Stateful:
    """Batches whose iterator has the methods of Grain's."""

    def __init__(self, state, fails=False):
        self.state, self.fails, self.read = state, fails, 0

    def __iter__(self):
        return Iterator(self)


class Iterator:
    def __init__(self, source):
        self.source, self.batches = source, iter(range(STEPS))

    def __iter__(self):
        return self

    def __next__(self):
        i = next(self.batches)
        self.source.read += 1
        return {"x": X[i * SIZE : (i + 1) * SIZE], "y": X[i * SIZE : (i + 1) * SIZE].sum(1)}

    def get_state(self):
        return self.source.state

    def set_state(self, state):
        assert repr(state) == repr(self.source.state)
        if self.source.fails:
            raise ValueError("it is of another pipeline")
        self.batches = itertools.islice(range(STEPS), 5, None)
