"""The conductor, on processes that answer when the test says so."""

import pytest

from mirror._src.ps.conductor import Conductor
from mirror._src.ps.messages import ServerSnapshot
from mirror._src.ps.processes import Task
from mirror._src.ps.remote_value import RemoteValue
from mirror._src.ps.replies import Result
from tests.support.waiting import wait_until

SECS = 10.0  # to wait for another thread


class Answers:
    """An engine of one server and one worker. Snapshots wait; everything else is answered."""

    num_servers = num_workers = 1

    def __init__(self):
        self.snapshots, self.order = [], []
        self.error, self.is_silent = None, False

    def dumps(self, value):
        return value

    def set_up_worker(self, worker, done):
        done(1)

    def call_worker(self, worker, method, arguments, done):
        if not self.is_silent:
            done(self.error or Result(None, has_writes=True))

    def call_servers(self, method, arguments, done, **options):
        if method == "snapshot":
            self.order.append("begun")
            self.snapshots.append(done)
        else:
            done([None])

    def ask_server(self, server, method, name, operation, *arguments):
        self.order.append(operation)
        return 5.0

    def answer_snapshot(self):
        self.order.append("ended")
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


def assign(conductor, engine):
    """Assigns to a variable; whenever that waits, the snapshot that was begun ends."""
    wait = conductor._changed.wait

    def wait_for_snapshot(timeout=None):
        if engine.snapshots:
            engine.answer_snapshot()
        return wait(timeout)

    conductor._changed.wait = wait_for_snapshot
    conductor.variable(0, "v", "assign", 5.0)


def test_assignment_follows_functions_in_a_snapshot(conductor, engine):
    run_function(conductor)
    assign(conductor, engine)
    assert engine.order == ["begun", "ended", "assign"]


def test_snapshot_that_was_begun_before_a_function_ended_does_not_cover_it(conductor, engine):
    """After the loss of a server, the function would be repeated after the assignment."""
    for _ in range(2):
        run_function(conductor)
    wait_until(lambda: engine.order == ["begun"])
    run_function(conductor)
    assign(conductor, engine)
    assert engine.order == ["begun", "ended", "begun", "ended", "assign"]


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
