"""`StateLock`: threads take turns, and nobody keeps the lock."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import inside
from tests.support.waiting import wait_until

StateLock = inside.state_lock()


def test_a_moment_of_release_is_enough():
    """A `threading.Lock` returns to the thread that released it; the others starve."""
    lock, turns, ended = StateLock(), [], threading.Event()

    def asks():
        while not ended.is_set():
            with lock.held():
                turns.append(threading.get_ident())

    with ThreadPoolExecutor(2) as pool, lock.held():
        for _ in range(2):
            pool.submit(asks)
        wait_until(lambda: len(lock._queue) == 2)
        for _ in range(10):
            before = len(turns)
            with lock.released():
                pass
            assert len(turns) - before >= 1
            assert lock.is_mine
        ended.set()
    assert len(set(turns)) == 2


def test_time_runs_out():
    lock = StateLock()
    with lock.held(), ThreadPoolExecutor(1) as pool:

        def ask():
            with lock.held(timeout=0.05) as is_held:
                return is_held, lock.is_mine

        assert pool.submit(ask).result() == (False, False)
        assert not lock._queue
    with lock.held(timeout=0) as is_held:
        assert is_held


def test_an_interrupt_while_waiting_leaves_the_queue(monkeypatch):
    lock, free = StateLock(), threading.Event()

    class Interrupted:
        def acquire(self, *, timeout=None):
            if timeout is not None:
                raise KeyboardInterrupt

        def release(self):
            pass

    def holds():
        with lock.held():
            free.wait(900)

    thread = threading.Thread(target=holds)
    thread.start()
    wait_until(lambda: lock._owner is not None)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt), lock.held():
            raise AssertionError("was not interrupted")
    free.set()
    thread.join()
    with lock.held(timeout=1) as is_held:
        assert is_held
