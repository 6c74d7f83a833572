"""Prefetching: how far it reads ahead, in which thread, and how it ends."""
# ruff: noqa: PT012 (the loop is what raises)

import gc
import itertools
import sys
import threading
import traceback
import warnings

import jax
import numpy as np
import pytest

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


def plain(source, prefetch=2):
    return cpu_strategy(1).distribute_dataset(source, prefetch=prefetch)


def padded(source, prefetch=2):
    data = cpu_strategy(1).distribute_dataset(source, remainder="pad", prefetch=prefetch)
    return data.padded()


def by_function(source, prefetch=2):
    return cpu_strategy(1).distribute_datasets_from_function(lambda _: source, prefetch=prefetch)


FORMS = [plain, padded, by_function]  # distributed datasets over a source, on one replica


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
    gc.collect()  # a collection in between may have made the cycle old


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


def test_no_thread_outlives_the_loop(subtests):
    for form, prefetch, end in itertools.product(FORMS, [0, 1, 2, 5], ENDS):
        with subtests.test(form=form.__name__, end=end.__name__, prefetch=prefetch):
            source = Counted(12)
            end(form(source, prefetch))
            assert readers() == []
            assert source.ended == (source.read > 0)


def test_prefetch_reads_in_a_thread(subtests):
    """A background thread; the thread of the loop without prefetching."""
    for form, prefetch in itertools.product(FORMS, [0, 2]):
        with subtests.test(form=form.__name__, prefetch=prefetch):
            source = Counted(3)
            for _ in form(source, prefetch):
                assert len(readers()) <= (prefetch > 0)
            (reader,) = source.threads
            assert (reader is threading.current_thread()) == (prefetch == 0)


def is_waiting(thread):
    """Whether a thread waits for another one to change something."""
    frame = sys._current_frames().get(thread.ident)
    return frame is not None and frame.f_code is threading.Condition.wait.__code__


def test_prefetch_limits_how_far_ahead_it_reads(subtests):
    """`prefetch` batches are ready, and the reader holds one more."""
    for form, prefetch in itertools.product(FORMS, [0, 1, 2, 5]):
        with subtests.test(form=form.__name__, prefetch=prefetch):
            source = Counted()
            batches = iter(form(source, prefetch))
            for taken in range(1, 4):
                next(batches)
                most = taken + prefetch + (prefetch > 0)
                wait_until(lambda n=most, s=source: s.read >= n and all(map(is_waiting, readers())))
                assert source.read == most
            batches.close()


def test_source_error_is_raised_once_in_its_place(subtests):
    for form, prefetch, error in itertools.product(
        FORMS, [0, 2], [OSError("disk"), KeyboardInterrupt(), StopIteration("odd")]
    ):
        with subtests.test(form=form.__name__, prefetch=prefetch, error=error):
            batches = iter(form(Counted(2, error), prefetch))
            next(batches), next(batches)
            kind = (
                RuntimeError if isinstance(error, StopIteration) else type(error)
            )  # as of any generator
            with pytest.raises(kind) as caught:
                next(batches)
            raised = caught.value.__cause__ or caught.value
            frames = [frame.name for frame in traceback.extract_tb(raised.__traceback__)]
            assert "__iter__" in frames  # the user's own line
            assert readers() == []
            assert [next(batches, "end"), next(batches, "end")] == ["end", "end"]


def test_error_of_iter_is_raised_without_consuming_the_source(subtests):
    for form in FORMS:
        with subtests.test(form=form.__name__):

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


def test_two_iterators_run_concurrently(subtests):
    for form in FORMS:
        with subtests.test(form=form.__name__):
            source = Counted(6)
            data = form(source)
            pairs = list(zip(data, data, strict=True))
            assert len(pairs) == 6
            assert source.read == 12
            for first, second in pairs:
                for mine, other in zip(
                    jax.tree.leaves(first), jax.tree.leaves(second), strict=True
                ):
                    np.testing.assert_array_equal(mine, other)


class Alternating:
    """A source of 8 batches, each of which it reads only once the step before runs."""

    def __init__(self):
        self.running, self.read = ([threading.Event() for _ in range(9)] for _ in range(2))
        self.running[0].set()

    def __iter__(self):
        for running, read in zip(self.running[:-1], self.read, strict=False):
            running.wait(900)
            read.set()
            yield ROWS


def test_the_next_batch_is_read_while_a_step_runs(subtests):
    """Each step waits until the batch of the next one has been read."""
    for form in FORMS:
        with subtests.test(form=form.__name__):
            source = Alternating()
            for i, _ in enumerate(form(source)):
                source.running[i + 1].set()
                assert i == 7 or source.read[i + 1].wait(900), "reading waits for the end of a step"


def test_blocking_source_does_not_block_the_end(two):
    """The end waits for a blocking source for a limited time."""
    release, blocked, ended = threading.Event(), threading.Event(), threading.Event()

    def source():
        yield ROWS
        blocked.set()
        release.wait(900)
        ended.set()

    batches = iter(two.distribute_dataset(source()))
    next(batches)
    assert blocked.wait(900)
    batches.close()
    assert not ended.is_set()
    release.set()
    wait_until(lambda: not readers())


def test_incomplete_last_step_is_reported(subtests):
    for prefetch, (n, count, left) in itertools.product([0, 2], [(2, 5, 1), (3, 5, 2), (8, 3, 3)]):
        with subtests.test(prefetch=prefetch, n=n, count=count, left=left):
            data = cpu_strategy(n).distribute_datasets_from_function(
                lambda _, count=count: Counted(count), prefetch=prefetch
            )
            with pytest.warns(UserWarning, match=rf"\b{n}\b") as record:
                got = list(data)
            assert_message(" ".join(str(each.message) for each in record), values=[n, left])
            assert {each.filename for each in record} == {__file__}, "also from the thread"
            assert len(got) == count // n
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with raises(UserWarning, values=[n, left]):
                    list(data)


def test_complete_last_step_is_not_reported(two, subtests):
    for prefetch in [0, 2]:
        with subtests.test(prefetch=prefetch):
            data = two.distribute_datasets_from_function(lambda _: Counted(4), prefetch=prefetch)
            assert len(list(data)) == 2


def test_prefetch_must_be_a_number_of_batches(subtests):
    for form, (prefetch, kind, values) in itertools.product(
        FORMS,
        [
            (-1, ValueError, -1),
            (1.5, TypeError, "1.5 (float)"),
            (None, TypeError, "None (NoneType)"),
            (True, TypeError, "True (bool)"),
        ],
    ):
        wanted = raises(kind, names="prefetch", values=values)
        with subtests.test(form=form.__name__, prefetch=prefetch), wanted:
            form([ROWS], prefetch)


BAD_FUNCTIONS = [
    (None, "None (NoneType)"),
    ({"x": ROWS}, "(dict)"),
    ("text", "'text' (str)"),
]


def test_dataset_function_must_return_an_iterable(two, subtests):
    for returned, shown in BAD_FUNCTIONS:
        with subtests.test(shown=shown), raises(TypeError, values=shown, fix="DataLoader"):
            two.distribute_datasets_from_function(lambda _, returned=returned: returned)


def test_batches_of_the_replicas_must_have_one_structure(two):
    data = two.distribute_datasets_from_function(lambda _: [{"x": ROWS}, {"y": ROWS}])
    with raises(ValueError, values=["{'x': *}", "{'y': *}"]):
        list(data)


def test_iterator_of_a_dataset_function_allows_one_pass(two):
    data = two.distribute_datasets_from_function(lambda _: iter([ROWS, ROWS]))
    assert len(list(data)) == 1
    with raises(ValueError, fix=["iterator", "function"]):
        iter(data)
