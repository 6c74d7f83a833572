"""`AgreedStop` in processes that run one after the other, with a store in memory."""

import itertools

import pytest

from benchmarks.scale_messages import MemoryStore, installed
from tests.support import inside

agreed_stop = inside.agreed_stop()
AgreedStop, Request = agreed_stop.AgreedStop, agreed_stop.Request


@pytest.fixture
def job(monkeypatch):
    """Returns a function that makes the `AgreedStop` of a process, which then runs."""
    store = MemoryStore(3)

    def make(index):
        store.index = index
        monkeypatch.setattr(agreed_stop, "_numbers", itertools.count())
        return AgreedStop()

    with installed(store):
        yield make


def launches(stop):
    return sum(1 for _ in iter(stop.may_launch, False))


def test_a_process_continues_to_the_end_of_process_0(job):
    """Process 0 has finished, and decides nothing any more."""
    first = job(0)
    assert all(first.may_launch() for _ in range(5))
    first.close()
    second = job(1)
    assert all(second.may_launch() for _ in range(2))
    second.ask("SIGTERM", "SIGTERM in process 1")
    assert launches(second) == 3
    assert second.request == Request("SIGTERM", "SIGTERM in process 1")
    second.close()


def test_the_first_request_counts(job):
    """The request of process 0 calls the others, which stop after as many launches."""
    first = job(0)
    assert all(first.may_launch() for _ in range(4))
    first.ask("stop", "four are enough")
    assert launches(first) == 0
    first.close()
    third = job(2)
    third.ask("interrupt", "interrupted in process 2")
    assert launches(third) == 4
    assert third.request == Request("stop", "four are enough")
    third.close()


def test_a_request_is_sent_while_the_main_thread_is_busy(job):
    """As in a slow callback: the others need not wait until its next launch."""
    stop = job(0)
    stop.ask("SIGTERM", "SIGTERM in process 0")
    assert stop._is_decided.wait(900)
    assert not stop.may_launch()
    stop.close()


def test_nothing_is_left_of_a_training_without_a_request(job):
    stop = job(1)
    assert stop.may_launch()
    stop.close()
    assert not any(thread.is_alive() for thread in stop._threads)
    assert stop.request is None
