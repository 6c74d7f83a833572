"""Methods of a trainer in other threads, in hooks and in host callbacks, while `fit` trains."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.messages import assert_message
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_slow
from tests.support.training import fit
from tests.support.waiting import main_thread_waits, wait_until

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
    """The weights without readers, and those of each step."""
    trainer, weights = trainer_of(), []
    read = OnStep(lambda fit: weights.append(np.asarray(fit.trainer.model.kernel[...])))
    fit(trainer, DATA, callbacks=read)
    return weights


@pytest.mark.parametrize("rows", mostly_slow(METHODS, "checkpoint_state"))
def test_another_thread_may_read_during_fit(subtests, tmp_path_factory, trained_alone, rows):
    """It works whenever it is called, and training is the same as without it."""
    for method in rows:
        with subtests.test(msg=method):
            tmp_path = tmp_path_factory.mktemp("row")
            check_another_thread_may_read_during_fit(tmp_path, trained_alone, method)


def check_another_thread_may_read_during_fit(tmp_path, trained_alone, method):
    trainer, started, ended, counts = trainer_of(), threading.Event(), threading.Event(), []

    def reads_all_the_time():
        started.wait(900)
        while not ended.is_set() or not counts:
            METHODS[method](trainer, tmp_path)
            counts.append(trainer._position.step)

    METHODS[method](trainer, tmp_path)  # compiles
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(reads_all_the_time)
        wait_once = OnStep(lambda _: started.set())
        fit(trainer, DATA * 3, callbacks=wait_once, steps_per_epoch=STEPS)
        ended.set()
        reader.result()
    assert counts
    np.testing.assert_array_equal(trainer.model.kernel[...], trained_alone[-1])


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


def test_threads_that_a_hook_waits_for_may_read(subtests, tmp_path_factory):
    for method in METHODS:
        with subtests.test(msg=method):
            tmp_path = tmp_path_factory.mktemp("row")
            check_threads_that_a_hook_waits_for_may_read(tmp_path, method)


def check_threads_that_a_hook_waits_for_may_read(tmp_path, method):
    trainer = trainer_of()

    def in_thread(run):
        if run.position.step == 3:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(METHODS[method], trainer, tmp_path).result(900)

    fit(trainer, DATA[:4], callbacks=OnStep(in_thread))
    assert trainer.optimizer.step[...] == 4


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


def test_what_is_read_is_the_state_between_two_steps(trained_alone):
    """Arrays and position belong together."""
    trainer, found, ended = trainer_of(), [], threading.Event()

    def reads():
        while not ended.is_set():
            arrays, position = inside.checkpoint_state(trainer)
            found.append((position["step"], arrays["model.kernel"]))

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(reads)
        fit(trainer, DATA)
        ended.set()
        reader.result()
    within = [(step, kernel) for step, kernel in found if 0 < step < STEPS]
    assert within
    for step, kernel in within:
        np.testing.assert_array_equal(kernel, trained_alone[step - 1])


def test_metrics_reach_callbacks_in_the_thread_of_fit():
    """Also those that another thread has waited for."""
    trainer, ended, steps, threads = trainer_of(), threading.Event(), [], set()

    class Metrics(mirror.callbacks.Callback):
        def on_metrics(self, fit, step, logs):
            steps.append(step)
            threads.add(threading.current_thread())

    def reads():
        while not ended.is_set():
            inside.checkpoint_state(trainer)

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(reads)
        fit(trainer, DATA, callbacks=Metrics())
        ended.set()
        reader.result()
    assert steps == [*range(1, STEPS + 1)]
    assert threads == {threading.main_thread()}


def test_fit_waits_for_what_another_thread_has_begun():
    trainer, began, may_end = trainer_of(), threading.Event(), threading.Event()
    order = []

    def slow():
        yield DATA[0]
        began.set()
        assert may_end.wait(900)
        order.append("evaluates")
        yield DATA[0]

    fit(trainer, DATA[:2])  # compiles
    alone = trainer.evaluate(DATA[:1] * 2)
    with ThreadPoolExecutor(2) as pool:
        reader = pool.submit(trainer.evaluate, slow())
        assert began.wait(900)
        waits = pool.submit(wait_until, lambda: main_thread_waits("training"))
        waits.add_done_callback(lambda _: may_end.set())
        fit(trainer, DATA[:2], callbacks=OnStep(lambda _: order.append("step")))
        assert reader.result() == alone
        waits.result()
    assert order == ["evaluates", "step", "step"]


def test_another_thread_evaluates_the_weights_of_one_step():
    """Also if its data take longer than a step."""
    trainer, began, goes_on = trainer_of(), threading.Event(), threading.Event()

    def slow():
        yield DATA[1]
        began.set()
        assert goes_on.wait(900)
        yield DATA[1]

    def trains_meanwhile(run):
        if run.position.step == 1:
            readers.append(pool.submit(trainer.predict, slow(), outputs))
            assert began.wait(900)
        elif run.position.step == 4:
            goes_on.set()

    readers = []
    with ThreadPoolExecutor(1) as pool:
        fit(trainer, DATA[:5], callbacks=OnStep(trains_meanwhile))
        rows = readers[0].result()
    np.testing.assert_array_equal(rows, np.broadcast_to(rows[0], rows.shape))
