"""Tracebacks show the lines of users; the frames of mirror and of JAX are removed."""

import signal
import traceback
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support.inside import plant_bug
from tests.support.strategies import cpu_strategy


def in_a_helper(x):
    return x @ jnp.ones((7, 2))


def step(x):
    return nnx.jit(in_a_helper)(x)


def forgotten_key(model, batch):
    return batch["label"]


class Raises(mirror.callbacks.Callback):
    def on_step(self, fit):
        raise ZeroDivisionError


class PressesCtrlC(mirror.callbacks.Callback):
    def on_step(self, fit):
        signal.raise_signal(signal.SIGINT)


def pressed_in_a_step(model, batch):
    signal.raise_signal(signal.SIGINT)  # while it is traced; deferred to the end of the step
    return model(batch["x"]).sum(-1)


def batches_that_fail():
    yield {"x": np.ones((4, 2), np.float32)}
    raise OSError("the disk is gone")


def train(loss_fn=lambda model, batch: model(batch["x"]).sum(-1), data=None, callbacks=()):
    strategy = cpu_strategy(2)
    with strategy.scope():
        trainer = mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn)
    data = mirror.data.from_arrays({"x": np.ones((4, 2), np.float32)}, 2) if data is None else data
    trainer.fit(data, epochs=1, callbacks=callbacks, progress=False)


def read(data):
    for _ in cpu_strategy(2).distribute_dataset(data):
        pass


MISTAKES = {  # what is called, the functions of this file that the traceback ends with
    "a wrong shape in a step": (
        lambda: cpu_strategy(2).run(step, (jnp.ones((3, 3)),)),
        ["step", "in_a_helper"],
    ),
    "a wrong argument": (lambda: cpu_strategy(2).run(3), ["<lambda>"]),
    "a loss function": (lambda: train(forgotten_key), ["train", "forgotten_key"]),
    "a callback": (lambda: train(callbacks=Raises()), ["train", "on_step"]),
    "a dataset": (lambda: train(data=batches_that_fail()), ["train", "batches_that_fail"]),
    "a batch in a loop": (lambda: read([np.ones((3, 2), "f4")]), ["<lambda>", "read"]),
    "a dataset in a loop": (lambda: read(batches_that_fail()), ["read", "batches_that_fail"]),
    "a device": (lambda: mirror.device("/cpu:99"), ["<lambda>"]),
    "Ctrl-C in a callback": (lambda: train(callbacks=PressesCtrlC()), ["train", "on_step"]),
    "Ctrl-C in a step": (lambda: train(pressed_in_a_step), ["<lambda>", "train"]),
}


def test_errors_show_only_frames_of_users(subtests):
    for mistake in MISTAKES:
        with subtests.test(msg=mistake), pytest.MonkeyPatch.context() as monkeypatch:
            call, functions = MISTAKES[mistake]
            with pytest.raises(BaseException) as caught:  # noqa: PT011 (its frames are looked at)
                call()
            frames = traceback.extract_tb(caught.value.__traceback__)
            assert {Path(frame.filename).name for frame in frames} == {Path(__file__).name}
            assert [frame.name for frame in frames][-len(functions) :] == functions
            monkeypatch.setenv("MIRROR_TRACEBACK", "full")
            with pytest.raises(type(caught.value)) as caught:
                call()
            frames = traceback.extract_tb(caught.value.__traceback__)
            assert any("mirror/_src/" in Path(frame.filename).as_posix() for frame in frames)


def test_cause_of_an_error_is_filtered():
    with pytest.raises(TypeError) as caught:
        cpu_strategy(2).run(lambda x: x, (np.array(["a"]),))
    assert caught.value.__cause__ is not None
    assert not traceback.extract_tb(caught.value.__cause__.__traceback__)


def test_bugs_of_mirror_keep_every_frame(monkeypatch):
    strategy = cpu_strategy(2)
    plant_bug(lambda: strategy.absent, __file__, monkeypatch)
    with pytest.raises(AttributeError) as caught:
        strategy.run(step, (1.0,))
    assert [f.name for f in traceback.extract_tb(caught.value.__traceback__)][1] == "run"
