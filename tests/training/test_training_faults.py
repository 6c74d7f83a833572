"""An error anywhere in a training loses nothing, leaves nothing, and hides no other error."""

import gc
import itertools
import os
import shutil
import threading

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_slow
from tests.support.training import fit

NUM_BATCHES, EPOCHS = 4, 2
RNG = np.random.RandomState(0)
BATCHES = [
    {"x": RNG.normal(size=(4, 2)).astype(np.float32), "y": np.ones(4, np.int32)}
    for _ in range(NUM_BATCHES)
]


class Fault(Exception):
    """The first error; the tests must find this very object."""


class Faults:
    """Raises an error at one call of one place, as long as it is armed."""

    def __init__(self):
        self.place, self.number, self.error, self.calls = "", 0, Fault("first"), 0

    def arm(self, place="", number=0):
        self.place, self.number, self.calls, self.error = place, number, 0, Fault("first")

    def __call__(self, place):
        if place == self.place:
            self.calls += 1
            if self.calls == self.number:
                raise self.error


faults = Faults()


class Source:
    def __init__(self, name):
        self.name = name

    def __iter__(self):
        for batch in BATCHES:
            faults(self.name)
            try:
                faults(f"{self.name}: a bad batch")
            except Fault:
                batch = {"x": batch["x"]}
            yield batch


def loss_fn(model, batch):
    faults("loss")
    losses = optax.l2_loss(model(batch["x"]))[:, 0]
    faults("metric")
    return losses, {"positive": losses > 0}


class Hooks(mirror.callbacks.Callback):
    def on_fit_begin(self, fit):
        faults("on_fit_begin")

    def on_epoch_begin(self, fit):
        faults("on_epoch_begin")

    def on_step(self, fit):
        faults("on_step")

    def on_metrics(self, fit, step, logs):
        faults("on_metrics")

    def on_epoch_end(self, fit, logs):
        faults("on_epoch_end")

    def on_fit_end(self, fit):
        faults("on_fit_end")

    def to_dict(self):
        faults("to_dict")
        return {}


class AtEnd(mirror.callbacks.Callback):
    """Fails at the end, whatever happened before."""

    is_armed = False

    def on_fit_end(self, fit):
        if self.is_armed:
            raise ValueError("second")


class BreaksDisk(mirror.callbacks.Callback):
    """Replaces the directory of checkpoints by a file before a save."""

    def __init__(self, directory):
        self.directory = directory

    def on_step(self, fit):
        try:
            faults("checkpoint")
        except Fault:
            shutil.rmtree(self.directory)
            self.directory.write_text("")


# Place, number of its call, and the number of whole steps before it. None: any, because other
# threads are ahead.
PLACES = {
    "on_fit_begin": (1, 0),
    "source": (1, 0),
    "source, later": (3, 2),
    "source: a bad batch": (3, 2),
    "loss": (1, 0),
    "metric": (1, 0),
    "on_epoch_begin": (1, 0),
    "on_epoch_begin, later": (2, 4),
    "on_step": (1, 1),
    "on_step, later": (6, 6),
    "on_metrics": (1, None),
    "on_epoch_end": (1, 4),
    "on_epoch_end, later": (2, 8),
    "validation": (1, 4),
    "validation, later": (6, 8),
    "validation: a bad batch": (2, 4),
    "checkpoint": (2, None),
    "to_dict": (1, None),
    "on_fit_end": (1, 8),
}


@pytest.fixture(scope="module")
def trained():
    """A trainer, its first state, and the weights after each step of a training without faults."""
    faults.arm()
    weights = []

    class Records(mirror.callbacks.Callback):
        def on_step(self, fit):
            weights.append(values_of(fit.trainer))

    trainer = new_trainer(cpu_strategy(2))
    weights.append(values_of(trainer))
    state = jax.tree.map(np.asarray, nnx.state((trainer.model, trainer.optimizer)))
    fit(trainer, Source("source"), EPOCHS, callbacks=Records())
    return trainer, state, weights


def new_trainer(strategy):
    with strategy.scope():
        return mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.adam(0.1), loss_fn)


def values_of(trainer):
    state = nnx.state((trainer.model, trainer.optimizer))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def left_behind():
    """Returns what a process can leak: threads, also daemons, and open files."""
    gc.collect()
    files = []
    for number in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the one that lists the others
            continue
    threads = {thread for thread in threading.enumerate() if thread.is_alive()}
    return threads, sorted(file for file in files if file.startswith("/"))


ROWS = list(itertools.product(PLACES, (False, True)))  # a place, and whether `on_fit_end` fails too
QUICK = [("source, later", False), ("on_step, later", True), ("checkpoint", False)]


@pytest.mark.parametrize("rows", mostly_slow(ROWS, *QUICK))
def test_a_fault_loses_and_leaves_nothing(tmp_path_factory, trained, rows, subtests):
    for place, then_fails in rows:
        with subtests.test(msg=f"{place} and on_fit_end" if then_fails else place):
            check_fault(*trained, tmp_path_factory.mktemp("row"), place, then_fails)


def check_fault(trainer, state, weights, tmp_path, place, then_fails):
    if place in ("loss", "metric"):  # which are called once per compilation
        trainer = new_trainer(trainer.strategy)
    nnx.update((trainer.model, trainer.optimizer), jax.tree.map(np.copy, state))
    number, num_steps = PLACES[place]
    directory = tmp_path / "runs"
    checkpoint = mirror.callbacks.Checkpoint(directory, every_epochs=0, every_steps=3)
    at_end = AtEnd()
    callbacks = [at_end, Hooks(), BreaksDisk(directory), checkpoint]
    before = left_behind()

    def go_on(**begin):
        fit(
            trainer,
            Source("source"),
            EPOCHS,
            validation_data=Source("validation"),
            callbacks=callbacks,
            **begin,
        )

    faults.arm(place.partition(",")[0], number)
    at_end.is_armed = then_fails
    with pytest.raises((Fault, ValueError, OSError)) as caught:
        go_on(initial_epoch=0)
    error = caught.value
    if "bad batch" in place:
        assert "batch['y'] is missing" in str(error)
    elif place == "checkpoint":
        assert "runs" in str(error)
    else:
        assert error is faults.error
    notes = "\n".join(getattr(error, "__notes__", []))
    assert ("ValueError: second" in notes) == then_fails

    done = int(trainer.optimizer.step[...])
    assert num_steps in (None, done)
    for found, wanted in zip(values_of(trainer), weights[done], strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert trainer._loop is None
    assert not trainer._users
    threads, files = left_behind()
    assert threads <= before[0]
    assert files == before[1]

    faults.arm()
    at_end.is_armed = False
    if directory.is_file():
        directory.unlink()
    go_on()
    if place == "on_fit_end":  # all was trained, so another training has begun
        assert trainer.optimizer.step[...] == 2 * len(BATCHES) * EPOCHS
        return
    for found, wanted in zip(values_of(trainer), weights[-1], strict=True):
        np.testing.assert_array_equal(found, wanted)
