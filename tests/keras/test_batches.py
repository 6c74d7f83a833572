"""How batches reach the devices: on accelerators, one ahead of the step."""

import gc
import itertools
import weakref

import jax
import numpy as np
import pytest

from tests.support import inside
from tests.support.keras_models import WARNINGS, assert_close, compiled, digits, functional, numbers
from tests.support.strategies import cpu_strategy


@pytest.fixture
def accelerators(monkeypatch):
    """Makes batches take the host devices for accelerators."""
    monkeypatch.setattr(inside.keras_step(), "type_of", lambda device: "GPU")


def placer(n=2, kind="train"):
    devices = tuple(jax.devices("cpu")[1 : n + 1])
    return inside.keras_step().BatchPlacer(inside.replica_devices()(devices), kind)


def rows(sizes, taken):
    for i, size in enumerate(sizes):
        taken.append(i)
        yield np.full((size, 3), i, "float32"), None


def test_batch_is_split_if_it_divides(subtests):
    for size, n in itertools.product([1, 4, 5], [1, 2, 4]):
        with subtests.test(size=size, n=n):
            taken: list[int] = []
            (batch, nothing) = placer(n).take(rows([size], taken))
            assert nothing is None
            assert isinstance(batch, np.ndarray) == (n == 1)
            share = size // n if size % n == 0 else size
            shards = [batch] if n == 1 else [shard.data for shard in batch.addressable_shards]
            assert [shard.shape for shard in shards] == [(share, 3)] * n
            np.testing.assert_array_equal(batch, np.zeros((size, 3)))


def test_next_batch_is_loaded_ahead_on_accelerators(accelerators):
    taken: list[int] = []
    batches, place = rows([4, 4, 4], taken), placer()
    for i in range(3):
        (batch, _) = place.take(batches)
        np.testing.assert_array_equal(batch, np.full((4, 3), i))
        place.take_ahead(batches)
        assert taken == list(range(min(i + 2, 3)))
    with pytest.raises(StopIteration):
        place.take(batches)


def test_no_batch_is_loaded_ahead_on_host_devices():
    taken: list[int] = []
    batches, place = rows([4, 4, 4], taken), placer()
    place.take(batches)
    place.take_ahead(batches)
    assert taken == [0]


class Slots:
    """An iterator that cannot be referenced weakly, like those of lists."""

    __slots__ = ("batches",)

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.batches)


class Unhashable(Slots):
    __hash__ = None

    def __eq__(self, other):
        return self is other


def test_iterators_that_cannot_be_remembered_are_not_read_ahead(accelerators, subtests):
    for iterator in [lambda rows: iter(list(rows)), Slots, Unhashable]:
        with subtests.test(iterator=iterator):
            batches, place = iterator(rows([5, 5], [])), placer(kind="test")
            for i in range(2):
                np.testing.assert_array_equal(place.take(batches)[0], np.full((5, 3), i))
                place.take_ahead(batches)
            with pytest.raises(StopIteration):
                place.take(batches)


@pytest.mark.dev("keras")
@pytest.mark.filterwarnings(*WARNINGS)
def test_verify_on_accelerators(accelerators):
    strategy = cpu_strategy(2)
    with strategy.scope():
        model = compiled(functional, optimizer="sgd")
    x, y = digits()
    strategy.verify(model, (x[:32], y[:32]), rtol=1e-4)


def test_an_error_ahead_is_raised_in_its_turn(accelerators):
    def broken():
        yield (np.zeros((4, 3)),)
        yield (np.ones((4, 3)),)
        raise OSError("disk on fire")

    batches, place = broken(), placer()
    for value in range(2):
        np.testing.assert_array_equal(place.take(batches)[0], np.full((4, 3), value))
        place.take_ahead(batches)
    with pytest.raises(OSError, match="disk on fire"):
        place.take(batches)


def test_two_iterators_in_turns(accelerators):
    place, seen = placer(), []
    iterators = [rows([4, 4], []), rows([2, 2], [])]
    for _ in range(2):
        for batches in iterators:
            seen.append(place.take(batches)[0].shape[0])
            place.take_ahead(batches)
    assert seen == [4, 2, 4, 2]
    iterator = weakref.ref(batches)
    del iterators, batches
    gc.collect()
    assert iterator() is None, "an iterator that nobody reads is kept"


def test_batches_are_made_on_the_host(accelerators):
    """Keras transfers them to the default device, from where they would be split."""
    made = []

    def transferred():
        array = jax.device_put(np.zeros((4, 3), "float32"))
        made.append(array.devices())
        yield (array,)

    with jax.default_device(jax.devices("cpu")[5]):
        (batch,) = placer().take(transferred())
    assert made == [{jax.devices("cpu")[0]}]
    assert batch.devices() == set(jax.devices("cpu")[1:3])


@pytest.mark.slow
@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.nightly), 3])
@pytest.mark.dev("keras")
@pytest.mark.filterwarnings(*WARNINGS)
def test_loading_ahead_changes_no_number(accelerators, steps):
    def fit(model):
        x, y = digits()
        options = {"batch_size": 48, "epochs": 2, "verbose": 0, "shuffle": False}
        history = model.fit(x, y, validation_split=0.2, **options)
        outputs = model.predict(x, batch_size=48, verbose=0)
        return numbers(model, history) | {"outputs": outputs}

    wanted = fit(compiled(functional, steps_per_execution=steps))
    with cpu_strategy(2).scope():
        model = compiled(functional, steps_per_execution=steps)
    assert_close(fit(model), wanted)
