"""Prefetching: how far it reads ahead, in which thread, and how it ends."""
# ruff: noqa: PT012 (the loop is what raises)

import gc
import threading
import time
import traceback
import warnings

import jax
import numpy as np
import pytest

import mirror
from tests.support.messages import assert_message, raises
from tests.support.strategies import cpu_strategy
from tests.support.waiting import wait_until

ROWS = np.arange(8.0)


class Counted:
    """A source that counts its reads, and whether it was released."""

    def __init__(self, num_batches=100, error=None):
        self._num_batches, self._error = num_batches, error
        self.read, self.ended, self.threads = 0, 0, set()

    def __iter__(self):
        try:
            for i in range(self._num_batches):
                self.threads.add(threading.current_thread())
                self.read += 1
                yield ROWS + i
            if self._error is not None:
                raise self._error
        finally:
            self.ended += 1


def readers():
    """Returns the prefetch threads."""
    return [t for t in threading.enumerate() if t.name == "mirror prefetch"]


@pytest.fixture(autouse=True)
def no_thread_outlives_its_iterator():
    yield
    assert readers() == []


FORMS = {
    "plain": lambda s, source, k: s.distribute_dataset(source, prefetch=k),
    "padded": lambda s, source, k: s.distribute_dataset(
        source, remainder="pad", prefetch=k
    ).padded(),
    "function": lambda s, source, k: s.distribute_datasets_from_function(
        lambda _: source, prefetch=k
    ),
}


@pytest.fixture(params=FORMS)
def form(request):
    """Returns a distributed dataset over a source, on one replica."""
    return lambda source, prefetch=2: FORMS[request.param](cpu_strategy(1), source, prefetch)


def run_through(data):
    for _ in data:
        pass


def run_and_break(data):
    for _ in data:
        break


def run_and_fail(data):
    with pytest.raises(OSError, match="in the loop"):
        for _ in data:
            raise OSError("in the loop")


def run_and_interrupt(data):
    with pytest.raises(KeyboardInterrupt):
        for _ in data:
            raise KeyboardInterrupt


def run_and_close(data):
    batches = iter(data)
    next(batches)
    batches.close()
    batches.close()
    assert list(batches) == []


def run_and_forget(data):
    next(iter(data))


def run_in_a_cycle(data):
    cycle = [iter(data)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect(1)


def never_start(data):
    iter(data)


ENDS = [
    run_through,
    run_and_break,
    run_and_fail,
    run_and_interrupt,
    run_and_close,
    run_and_forget,
    run_in_a_cycle,
    never_start,
]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("end", ENDS)
def test_no_thread_outlives_the_loop(end, prefetch, form):
    source = Counted(12)
    end(form(source, prefetch))
    assert readers() == []
    assert source.ended == (source.read > 0)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_prefetch_reads_in_a_thread(prefetch, form):
    """A background thread; the thread of the loop without prefetching."""
    source = Counted(3)
    for _ in form(source, prefetch):
        assert len(readers()) <= (prefetch > 0)
    (reader,) = source.threads
    assert (reader is threading.current_thread()) == (prefetch == 0)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_prefetch_limits_how_far_ahead_it_reads(prefetch, form):
    """`prefetch` batches are ready, and the reader holds one more."""
    source = Counted()
    batches = iter(form(source, prefetch))
    for taken in range(1, 4):
        next(batches)
        most = taken + prefetch + (prefetch > 0)
        wait_until(lambda most=most: source.read == most)
        time.sleep(0.005)
        assert source.read == most
    batches.close()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), StopIteration("odd")])
def test_source_error_is_raised_once_in_its_place(error, prefetch, form):
    batches = iter(form(Counted(2, error), prefetch))
    next(batches), next(batches)
    kind = RuntimeError if isinstance(error, StopIteration) else type(error)  # as of any generator
    with pytest.raises(kind) as caught:
        next(batches)
    raised = caught.value.__cause__ or caught.value
    frames = [frame.name for frame in traceback.extract_tb(raised.__traceback__)]
    assert "__iter__" in frames  # the user's own line
    assert readers() == []
    assert [next(batches, "end"), next(batches, "end")] == ["end", "end"]


def test_error_of_iter_is_raised_without_consuming_the_source(form):
    class Source:
        fails = True

        def __iter__(self):
            if self.fails:
                raise OSError("no such file")
            return iter([ROWS])

    source = Source()
    data = form(source)
    with pytest.raises(OSError, match="no such file"):
        iter(data)
    source.fails = False
    assert len(list(data)) == 1


def test_two_iterators_run_concurrently(form):
    source = Counted(6)
    data = form(source)
    pairs = list(zip(data, data, strict=True))
    assert len(pairs) == 6
    assert source.read == 12
    for first, second in pairs:
        for mine, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            np.testing.assert_array_equal(mine, other)


def test_prefetch_overlaps_a_slow_source_with_a_slow_step(form):
    """In all steps but the first, reading (30 ms) overlaps with the step (30 ms)."""
    reading, stepping = [], []

    def source():
        for _ in range(8):
            start = time.monotonic()
            time.sleep(0.03)
            reading.append((start, time.monotonic()))
            yield ROWS

    start = time.monotonic()
    for _ in form(source()):
        before = time.monotonic()
        time.sleep(0.03)
        stepping.append((before, time.monotonic()))
    took = time.monotonic() - start
    overlapping = sum(
        any(a < d and c < b for a, b in reading) for c, d in stepping
    )  # the last step has nothing left to overlap with
    assert overlapping >= 6
    assert took < 0.8 * 8 * 0.06


def test_blocking_source_does_not_block_the_end(monkeypatch, two):
    """The end waits for a blocking source for a limited time."""
    monkeypatch.setattr(mirror._src.data.prefetch, "_MOST_WAIT_SECS", 0.05)
    release, blocked = threading.Event(), threading.Event()

    def source():
        yield ROWS
        blocked.set()
        release.wait(10)

    batches = iter(two.distribute_dataset(source()))
    next(batches)
    blocked.wait(10)
    start = time.monotonic()
    batches.close()
    assert time.monotonic() - start < 5
    release.set()
    wait_until(lambda: not readers())


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("n", "count", "left"), [(2, 5, 1), (3, 5, 2), (8, 3, 3)])
def test_incomplete_last_step_is_reported(n, count, left, prefetch):
    data = cpu_strategy(n).distribute_datasets_from_function(
        lambda _: Counted(count), prefetch=prefetch
    )
    with pytest.warns(UserWarning, match=rf"\b{n}\b") as record:
        got = list(data)
    assert_message(" ".join(str(each.message) for each in record), values=[n, left])
    assert len(got) == count // n
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with raises(UserWarning, values=[n, left]):
            list(data)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_complete_last_step_is_not_reported(prefetch, two):
    data = two.distribute_datasets_from_function(lambda _: Counted(4), prefetch=prefetch)
    assert len(list(data)) == 2


@pytest.mark.parametrize(
    ("prefetch", "kind", "values"),
    [
        (-1, ValueError, -1),
        (1.5, TypeError, "1.5 (float)"),
        (None, TypeError, "None (NoneType)"),
        (True, TypeError, "True (bool)"),
    ],
)
def test_prefetch_must_be_a_number_of_batches(prefetch, kind, values, form):
    with raises(kind, names="prefetch", values=values):
        form([ROWS], prefetch)


BAD_FUNCTIONS = [
    (None, "None (NoneType)"),
    ({"x": ROWS}, "(dict)"),
    ("text", "'text' (str)"),
]


@pytest.mark.parametrize(("returned", "shown"), BAD_FUNCTIONS)
def test_dataset_function_must_return_an_iterable(returned, shown, two):
    with raises(TypeError, values=shown, fix="DataLoader"):
        two.distribute_datasets_from_function(lambda _: returned)


def test_batches_of_the_replicas_must_have_one_structure(two):
    data = two.distribute_datasets_from_function(lambda _: [{"x": ROWS}, {"y": ROWS}])
    with raises(ValueError, values=["{'x': *}", "{'y': *}"]):
        list(data)


def test_iterator_of_a_dataset_function_allows_one_pass(two):
    data = two.distribute_datasets_from_function(lambda _: iter([ROWS, ROWS]))
    assert len(list(data)) == 1
    with raises(ValueError, fix=["iterator", "function"]):
        iter(data)
