"""Nothing outlives its owner: no array, step, model, static setting or program."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.messages import assert_message
from tests.support.strategies import EXECUTORS, cpu_strategy


class Setting:
    """A static setting, as a field of a user's own class of arguments."""

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        return isinstance(other, Setting) and other.number == self.number


MODEL_BYTES = 4 * 3 * 1000  # of its kernel; JAX keeps a few small constants


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def mean(x):
    return mirror.all_reduce("mean", x)


def batch_of(strategy):
    (batch,) = strategy.distribute_dataset([np.ones((4, 3), np.float32)])
    return batch


def train(strategy, number):
    """Trains a model in a step of its own; returns weak references to what the trial owns."""
    with strategy.scope():
        model = nnx.Linear(3, 1000 + number % 2, rngs=nnx.Rngs(number))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    setting = Setting(number)

    def step(model, optimizer, batch, setting):
        grads = nnx.grad(lambda model: mean(jnp.square(model(batch)).mean()))(model)
        optimizer.update(model, jax.tree.map(mean, grads))

    for _ in range(3):
        strategy.run(step, (model, optimizer, batch_of(strategy), setting))
    return [weakref.ref(each) for each in (model, optimizer, step, setting)]


def shared_step(model, batch):
    grads = nnx.grad(lambda model: mean(jnp.square(model(batch)).mean()))(model)
    nnx.update(model, jax.tree.map(lambda w, g: w - mean(g), nnx.state(model), grads))


def train_in_a_shared_step(strategy, number):
    with strategy.scope():
        model = nnx.Linear(3, 1000, rngs=nnx.Rngs(number))
    for _ in range(4):
        strategy.run(shared_step, (model, batch_of(strategy)))
    return [weakref.ref(model)]


def train_by_trainer(strategy, number):
    with strategy.scope():
        model = nnx.Linear(3, 1000 + number % 2, rngs=nnx.Rngs(number))
        trainer = mirror.Trainer(
            model, optax.adam(0.1), lambda model, batch: jnp.square(model(batch)).mean(-1)
        )
    data = [np.ones((4, 3), np.float32)] * 3
    trainer.fit(data, validation_data=data)
    return [weakref.ref(model), weakref.ref(trainer)]


def train_with_a_method(strategy, number):
    class Experiment:
        __hash__ = None  # as of a dataclass

        def step(self, batch):
            return mean(batch.sum() * number)

    experiment = Experiment()
    for _ in range(3):
        strategy.run(experiment.step, (batch_of(strategy),))
    return [weakref.ref(experiment)]


def train_with_a_captured_array(strategy, number):
    """The array is smaller than a model: the one of the last trial may still be referenced."""
    captured = jax.device_put(np.full((3, 600), number, np.float32))

    def step(batch):
        return mean((batch @ captured).mean())

    for _ in range(2):
        strategy.run(step, (batch_of(strategy),))
    return [weakref.ref(step)]


@pytest.mark.parametrize("make", EXECUTORS.values(), ids=EXECUTORS)
@pytest.mark.parametrize(
    "trial",
    [
        train,
        train_by_trainer,
        train_in_a_shared_step,
        train_with_a_method,
        train_with_a_captured_array,
    ],
)
def test_trials_on_one_strategy_leave_nothing(make, trial, capsys):
    strategy, left = make(), []
    gc.collect()
    live = [live_bytes()]
    for number in range(4):
        left += trial(strategy, number)
        jax.block_until_ready(jax.live_arrays())
        inside.forget_eager_work()
        gc.collect()
        live.append(live_bytes())
    kept = [reference() for reference in left if reference() is not None]
    assert not kept
    assert max(live[1:]) < live[0] + MODEL_BYTES


@pytest.mark.parametrize("make", EXECUTORS.values(), ids=EXECUTORS)
def test_references_to_freed_arrays_are_dropped(make):
    """Python's garbage collector would visit them, which takes longer than a small step."""
    leaves = 100
    strategy, state = make(), [jnp.zeros(2)] * leaves

    def step(state):
        return [x + 1 for x in state]

    def references():
        gc.collect()
        return sum(isinstance(each, weakref.ref) for each in gc.get_objects())

    before = references()
    for _ in range(50):
        state = strategy.run(step, (state,))
    assert references() - before < 10 * leaves


def test_steps_of_one_factory_are_compiled_once(two, recwarn):
    traces = [0] * 4

    def make(number):
        def step(batch):
            traces[number] += 1
            return mean(batch.sum() * number)

        return step

    steps, batch = [make(number) for number in range(len(traces))], batch_of(two)
    for _ in range(3):
        assert [float(two.run(step, (batch,))) for step in steps] == [0, 6, 12, 18]
    assert traces == [1] * len(traces)
    assert not recwarn.list


@pytest.mark.filterwarnings("default")
def test_new_function_in_every_call_is_warned_of_once(two, recwarn):
    batch = batch_of(two)
    for _ in range(5):
        two.run(lambda batch: mean(batch.sum()), (batch,))
    assert len(recwarn) == 1
    assert_message(str(recwarn[0].message), names="<lambda>", values=3, fix="Define it once")


def test_frozen_heap_stays_frozen(two):
    scale = jnp.full(3, 2.0)
    gc.collect()
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        two.run(lambda batch: mean(batch * scale), (batch_of(two),))
        assert gc.get_freeze_count() >= before - 1000  # what has been freed since
    finally:
        gc.unfreeze()


def test_arrays_of_an_ended_strategy_are_freed():
    live = []
    for _ in range(3):
        train(cpu_strategy(2), 0)
        gc.collect()
        live.append(live_bytes())
    assert live == live[:1] * 3


def test_printing_in_a_step_keeps_donation(two):
    def step(weight, batch):
        jax.debug.print("{}", weight[0])
        return weight - mean(batch.mean(0))

    weight = two.run(lambda: jnp.ones(3), ())
    new = two.run(step, (weight, batch_of(two)), donate_argnums=0)
    assert weight.is_deleted()
    np.testing.assert_array_equal(new, np.zeros(3))
