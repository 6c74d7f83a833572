"""Only the thread of `fit` uses the state: methods in hooks, host callbacks and other threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.messages import assert_message, raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_slow
from tests.support.training import fit

STEPS = 60
DATA = [{"x": np.full((4, 2), i % 3, np.float32)} for i in range(STEPS)]


def loss_fn(model, batch):
    return optax.l2_loss(model(batch["x"]))[:, 0]


def outputs(model, batch):
    return model(batch["x"])


def trainer_of(loss=loss_fn, **options):
    with cpu_strategy(2, **options).scope():
        return mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.adam(1e-2), loss)


def save(trainer, directory):
    trainer.save(directory)
    assert mirror.load_checkpoint(directory).arrays


METHODS = {
    "evaluate": lambda trainer, _: trainer.evaluate(DATA[:2]),
    "predict": lambda trainer, _: trainer.predict(DATA[:2], outputs),
    "verify": lambda trainer, _: trainer.verify(DATA[:1]),
    "summary": lambda trainer, _: trainer.summary(DATA[0]),
    "save": save,
    "checkpoint_state": lambda trainer, _: jax.device_get(inside.checkpoint_state(trainer)[0]),
}

NAMES = {"checkpoint_state": "save"}  # the public method in its messages


class OnStep(mirror.callbacks.Callback):
    def __init__(self, call):
        self.call = call

    def on_step(self, fit):
        self.call(fit)


@pytest.fixture(scope="module")
def trained_alone():
    """The weights after each step."""
    trainer, weights = trainer_of(), []
    read = OnStep(lambda fit: weights.append(np.asarray(fit.trainer.model.kernel[...])))
    fit(trainer, DATA, callbacks=read)
    return weights


def test_another_thread_gets_an_error_during_fit(subtests, tmp_path, trained_alone):
    """Before a method reads or changes anything; training is the same as without it."""
    trainer, errors = trainer_of(), {}

    def in_thread(run):
        if run.position.step == 3:
            with ThreadPoolExecutor(1) as pool:
                for name, method in METHODS.items():
                    errors[name] = pool.submit(method, trainer, tmp_path).exception(900)

    fit(trainer, DATA, callbacks=OnStep(in_thread))
    for name in METHODS:
        with subtests.test(msg=name):
            assert isinstance(errors[name], RuntimeError)
            what = [f"trainer.{NAMES.get(name, name)}", "another thread"]
            assert_message(errors[name], names=what, fix="on_step(self, fit)")
    np.testing.assert_array_equal(trainer.model.kernel[...], trained_alone[-1])
    with ThreadPoolExecutor(1) as pool:  # afterwards, it works
        for method in METHODS.values():
            pool.submit(method, trainer, tmp_path).result(900)


@pytest.mark.parametrize("rows", mostly_slow(METHODS, "evaluate", "save"))
def test_hooks_may_read(subtests, tmp_path_factory, trained_alone, rows):
    for method in rows:
        with subtests.test(msg=method):
            tmp_path = tmp_path_factory.mktemp("row")
            check_hooks_may_read(tmp_path, trained_alone, method)


def check_hooks_may_read(tmp_path, trained_alone, method):
    trainer = trainer_of()
    call = OnStep(lambda fit: fit.position.step == 3 and METHODS[method](trainer, tmp_path))
    fit(trainer, DATA, callbacks=call)
    np.testing.assert_array_equal(trainer.model.kernel[...], trained_alone[-1])


@pytest.mark.parametrize("rows", mostly_slow(METHODS, "evaluate"))
def test_host_callbacks_may_not_read(subtests, tmp_path_factory, rows):
    """Which would wait for their own step; the error names the method and a hook."""
    for method in rows:
        with subtests.test(msg=method):
            tmp_path = tmp_path_factory.mktemp("row")
            check_host_callbacks_may_not_read(tmp_path, method)


def check_host_callbacks_may_not_read(tmp_path, method):
    errors = []

    def call(_):
        try:
            METHODS[method](trainer, tmp_path)
        except RuntimeError as error:
            errors.append(error)

    def calls_back(model, batch):
        jax.debug.callback(call, batch["x"].sum())
        return loss_fn(model, batch)

    trainer = trainer_of(calls_back)
    fit(trainer, DATA[:3])
    jax.effects_barrier()
    assert errors
    for error in errors:
        assert_message(
            error, names=f"trainer.{NAMES.get(method, method)}", fix="on_step(self, fit)"
        )


def test_fit_is_an_error_while_another_thread_reads():
    trainer, began, may_end = trainer_of(), threading.Event(), threading.Event()

    def slow():
        yield DATA[0]
        began.set()
        assert may_end.wait(900)
        yield DATA[0]

    alone = trainer.evaluate(DATA[:1] * 2)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(trainer.evaluate, slow())
        assert began.wait(900)
        with raises(RuntimeError, names=["trainer.fit()", "another thread"], fix="Wait for"):
            fit(trainer, DATA[:2])
        may_end.set()
        assert reader.result() == alone
    assert trainer.optimizer.step[...] == 0
    fit(trainer, DATA[:2])
    assert trainer.optimizer.step[...] == 2


def test_restore_is_an_error_while_another_method_reads(tmp_path):
    """Its results would be of two checkpoints; they are as without it."""
    trainer = trainer_of()
    trainer.save(tmp_path)
    fit(trainer, DATA)
    errors = []

    def restores():
        for number, batch in enumerate(DATA):
            if number == 1:
                with pytest.raises(RuntimeError) as caught:
                    trainer.restore(tmp_path)
                errors.append(caught.value)
            yield batch

    alone = trainer.evaluate(DATA)
    for prefetch in (0, 2):  # in this thread, and in another one
        data = trainer.strategy.distribute_dataset(restores(), remainder="pad", prefetch=prefetch)
        assert trainer.evaluate(data) == alone
    assert len(errors) == 2
    for error in errors:
        assert_message(error, names="trainer.restore()", fix="when it has ended")
    assert trainer.optimizer.step[...] == STEPS
    trainer.restore(tmp_path)
    assert trainer.optimizer.step[...] == 0


def test_method_is_an_error_while_another_thread_restores(tmp_path, monkeypatch):
    trainer = trainer_of()
    trainer.save(tmp_path)
    errors, read = {}, inside.checkpoint_files().read_arrays

    def slow(*args):
        with ThreadPoolExecutor(1) as pool:
            for name in ("evaluate", "predict"):
                errors[name] = pool.submit(METHODS[name], trainer, tmp_path).exception(900)
        return read(*args)

    monkeypatch.setattr(inside.checkpoint_files(), "read_arrays", slow)
    trainer.restore(tmp_path)
    for name, error in errors.items():
        assert_message(error, names=f"trainer.{name}()", fix="restore() before the other method")
    assert len(errors) == 2
