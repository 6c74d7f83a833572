"""The thread of the driver, on processes that answer when the test says so."""

import asyncio

import pytest

from mirror._src.ps.driver import Task
from mirror._src.ps.driver_thread import DriverThread
from mirror._src.ps.messages import Raised, Result, ServerSnapshot
from tests.support.messages import raises

SECS = 10.0  # to wait for another thread


class Answers:
    """An engine of one server and one worker, which answers everything."""

    num_servers = num_workers = 1

    def __init__(self):
        self.error, self.is_silent, self.failure = None, False, None

    def dumps(self, value):
        return value

    loads = dumps

    async def set_up_worker(self, worker):
        return 1

    async def call_worker(self, worker, method, assignment):
        if self.is_silent:
            await asyncio.Event().wait()
        return Raised(self.error, "", "") if self.error else Result(None)

    async def call_server(self, server, method, *arguments):
        if self.failure is not None:
            raise self.failure
        return (ServerSnapshot({}), None) if method == "snapshot" else None


@pytest.fixture
def engine():
    return Answers()


@pytest.fixture
def thread(engine):
    thread = DriverThread(engine, staleness=0, snapshot_every=2)
    thread.start()
    yield thread
    thread.close()


def schedule(thread):
    task = Task("run", [()], lambda results: None, is_step=False)
    thread.call(thread.driver.submit, task)
    return task.value


@pytest.mark.parametrize("error", [ValueError("mine"), StopIteration("mine"), TimeoutError("mine")])
def test_error_of_a_function_is_raised_once(thread, engine, error):
    engine.error = error
    schedule(thread)
    with pytest.raises(type(error), match="mine"):
        thread.join(SECS)
    engine.error = None
    schedule(thread)
    thread.join(SECS)
    thread.call(thread.driver.take_snapshot)
    assert len(thread.driver.kept) == 1


def test_wait_for_lost_workers_is_logged(thread, engine, caplog):
    engine.is_silent = True
    schedule(thread)
    with raises(TimeoutError, names="join", values=("0.01", "1 running")):
        thread.join(0.01)
    thread.driver._progress -= 1000
    thread.driver.log_if_stuck()
    assert "1 run, and 0 of 1 workers are lost" in caplog.text


def test_failure_of_the_engine_is_raised_by_all_calls(thread, engine):
    engine.failure = OSError("of the engine")
    with pytest.raises(OSError, match="of the engine"):
        thread.call(thread.driver.take_snapshot)
    with pytest.raises(OSError, match="of the engine"):
        schedule(thread)
    thread.close()
    with raises(RuntimeError, values="closed"):
        thread.join()
