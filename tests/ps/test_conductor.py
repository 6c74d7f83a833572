"""The conductor, on processes that answer when the test says so."""

import threading

import pytest

from mirror._src.ps.conductor import Conductor
from mirror._src.ps.messages import ServerSnapshot
from mirror._src.ps.processes import Task
from mirror._src.ps.remote_value import RemoteValue
from mirror._src.ps.replies import Result
from tests.support.waiting import wait_until

SECS = 10.0  # to wait for another thread
MOMENT = 0.1  # to see that nothing happens


class Answers:
    """An engine of one server and one worker. Snapshots wait; everything else is answered."""

    num_servers = num_workers = 1

    def __init__(self):
        self.asked = threading.Event()
        self.snapshots = []
        self.num_begun = 0
        self.error, self.is_silent = None, False

    def dumps(self, value):
        return value

    def set_up_worker(self, worker, done):
        done(1)

    def call_worker(self, worker, method, arguments, done):
        if not self.is_silent:
            done(self.error or Result(None, 1.0, has_writes=True))

    def call_servers(self, method, arguments, done, **options):
        if method == "snapshot":
            self.num_begun += 1
            self.snapshots.append(done)
        else:
            done([None])

    def ask_server(self, server, method, *arguments):
        self.asked.set()
        return 5.0

    def answer_snapshot(self):
        self.snapshots.pop(0)([ServerSnapshot({})])


@pytest.fixture
def engine():
    return Answers()


@pytest.fixture
def conductor(engine):
    conductor = Conductor(engine, staleness=0, snapshot_every=2)
    conductor.start()
    yield conductor
    conductor.close()


def run_function(conductor):
    value = RemoteValue()
    conductor.submit(Task("run", [()], lambda results: None, value), is_step=False)
    value.fetch(SECS)


def assigning(conductor):
    thread = threading.Thread(target=conductor.variable, args=(0, "v", "assign", 5.0), daemon=True)
    thread.start()
    return thread


def end_snapshot(engine, number):
    """Ends a snapshot, before which nothing is sent."""
    wait_until(lambda: engine.num_begun == number)
    assert not engine.asked.wait(MOMENT)
    engine.answer_snapshot()


def test_assignment_follows_functions_in_a_snapshot(conductor, engine):
    run_function(conductor)
    thread = assigning(conductor)
    end_snapshot(engine, 1)
    thread.join(SECS)
    assert engine.asked.is_set()


def test_snapshot_that_was_begun_before_a_function_ended_does_not_cover_it(conductor, engine):
    """After the loss of a server, the function would be repeated after the assignment."""
    for _ in range(2):
        run_function(conductor)
    wait_until(lambda: engine.num_begun == 1)
    run_function(conductor)
    thread = assigning(conductor)
    end_snapshot(engine, 1)
    end_snapshot(engine, 2)
    thread.join(SECS)
    assert engine.asked.is_set()


def test_error_is_raised_by_a_variable_and_again_by_join(conductor, engine):
    """Reading a variable must not hide from `join` that a function failed."""
    engine.error = ValueError("mine")
    conductor.submit(Task("run", [()], lambda results: None, RemoteValue()), is_step=False)
    wait_until(lambda: conductor._scheduler.has_error)
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            conductor.variable(0, "v", "read", None)
    with pytest.raises(ValueError, match="mine"):
        conductor.join(SECS)
    conductor.join(SECS)
    assert conductor.variable(0, "v", "read", None) == 5.0


def test_wait_for_lost_workers_is_logged(engine, monkeypatch, caplog):
    monkeypatch.setattr("mirror._src.ps.conductor._STUCK_SECS", 0.05)
    conductor = Conductor(engine, staleness=0)
    conductor.start()
    engine.is_silent = True
    conductor.submit(Task("run", [()], lambda results: None, RemoteValue()), is_step=False)
    wait_until(lambda: "1 run, and 0 of 1 workers are lost" in caplog.text)
    conductor.close()
