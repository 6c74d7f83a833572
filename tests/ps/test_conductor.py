"""The conductor, on processes that answer when the test says so."""

import pytest

from mirror._src.ps.conductor import Conductor
from mirror._src.ps.messages import Result, ServerSnapshot
from mirror._src.ps.schedule import Task

SECS = 10.0  # to wait for another thread


class Answers:
    """An engine of one server and one worker, which answers everything."""

    num_servers = num_workers = 1

    def __init__(self):
        self.error, self.is_silent = None, False

    def dumps(self, value):
        return value

    def set_up_worker(self, worker, done):
        done(1)

    def call_worker(self, worker, method, arguments, done):
        if not self.is_silent:
            done(self.error or Result(None))

    def call_servers(self, method, arguments, done, **options):
        done([ServerSnapshot({}) if method == "snapshot" else None])


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
    conductor.submit(Task("run", [()], lambda results: None, is_step=False))


def test_error_of_a_function_is_raised_once(conductor, engine):
    engine.error = ValueError("mine")
    run_function(conductor)
    with pytest.raises(ValueError, match="mine"):
        conductor.join(SECS)
    engine.error = None
    run_function(conductor)
    conductor.join(SECS)
    assert len(conductor.take_snapshot()) == 1


def test_wait_for_lost_workers_is_logged(conductor, engine, monkeypatch, caplog):
    engine.is_silent = True
    run_function(conductor)
    conductor._progress -= 1000
    conductor._log_if_stuck()
    assert "1 run, and 0 of 1 workers are lost" in caplog.text
