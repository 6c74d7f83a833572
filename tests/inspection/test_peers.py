"""Launches that wait for another process: the report of every other process names it."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading

import pytest

from tests.support import fresh, inside, processes
from tests.support.clocks import FakeClock
from tests.support.messages import assert_message
from tests.support.waiting import wait_until

launches, peers_module, store = inside.launches(), inside.peers_module(), inside.messages()
Peers, Post = peers_module.Peers, peers_module.Post
STEP = launches.Described("step", "train.py:5", spans_processes=True)
WAITING = Post(
    1, 0.1, 3, [(2, "step (train.py:5)"), (3, "step (train.py:5)")], 3, "", [], [], 0, False
)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The clock of the posts, which only tests advance."""
    fake = FakeClock()
    inside.use_clock(fake, monkeypatch)
    return fake


@pytest.fixture
def job(monkeypatch):
    """Process 1 of a job of four; returns the texts that the others have posted."""
    texts = {}
    monkeypatch.setattr(store, "process_index", lambda: 1)
    monkeypatch.setattr(store, "process_count", lambda: 4)
    monkeypatch.setattr(store, "is_chief", lambda: False)
    monkeypatch.setattr(store, "set", lambda key, text: texts.__setitem__(key[6:], text))
    monkeypatch.setattr(store, "get_all", lambda directory: dict(texts))
    monkeypatch.setattr(launches, "joint", launches.deque(maxlen=8))
    return texts


@pytest.fixture
def stalled(job):
    """The third launch of this process, which has not ended."""
    log = launches.start_log()
    for _ in range(2):
        log.begin(STEP).ends()
    launch = log.begin(STEP)
    launch.starts()
    yield launch
    launch.ends()
    launches.stop_log()


@contextlib.contextmanager
def looking_at(launch, clock, secs=1.0):
    """Yields a watch of the other processes, which have been looked at for a moment."""
    peers = Peers(secs)
    try:
        wait_until(clock.is_awaited)
        peers.look(launch, 0.9)
        yield peers
    finally:
        peers.close()


def post_for(secs, job, posts, clock):
    """Lets the others post for some seconds; a post of beat 0 stays as it is."""
    for beat in range(1, round(secs / 0.05) + 1):
        for i, post in posts.items():
            job[str(i)] = json.dumps(post if post.beat == 0 else post._replace(beat=beat))
        clock.advance(0.05)


CASES = {
    "fewer": (
        WAITING._replace(begun=2, oldest=0, places=["data.py:7 in load"]),
        ["2 of 3", "data.py:7 in load"],
    ),
    "another step": (
        WAITING._replace(names=[(3, "evaluate (train.py:30)")]),
        ["launch 3", "evaluate (train.py:30)"],
    ),
    "callback": (
        WAITING._replace(callbacks=["pure_callback at train.py:8 in step"]),
        ["launch 3", "pure_callback at train.py:8 in step"],
    ),
    "ended": (WAITING._replace(oldest=0), ["has ended launch 3"]),
    "compiles": (WAITING._replace(compiles="step (train.py:5)"), ["compiles step (train.py:5)"]),
    "closed": (WAITING._replace(oldest=0, is_closed=True), ["ended its watch", "3 launches"]),
}


def test_a_process_that_does_not_wait_is_described(job, stalled, clock, subtests):
    for name, (post, values) in CASES.items():
        with subtests.test(msg=name), looking_at(stalled, clock) as peers:
            post_for(0.5, job, {0: WAITING, 2: post, 3: WAITING}, clock)
            lines, mine = peers.lines(), Post(*json.loads(job["1"]))
            assert lines[-1] == "processes 0, 3 wait in launch 3, too"
            (line,) = lines[:-1]
            assert line.startswith("process 2 ")
            for value in values:
                assert value in line.replace("It compiles", "compiles"), line
            assert (mine.begun, mine.oldest, mine.is_closed) == (3, 3, False)
            assert any(place.startswith(("clocks.py:", "waiting.py:")) for place in mine.places)


def test_silent_and_unwatched_processes_are_named(job, stalled, clock):
    with looking_at(stalled, clock) as peers:
        post_for(1.6, job, {0: WAITING, 2: WAITING._replace(beat=0)}, clock)
        lines = peers.lines()
    assert len(lines) == 3
    assert re.match(r"process 2 has not been heard of for 1\.\d s", lines[0])
    assert "3 launches, the last: step (train.py:5)" in lines[0]
    assert lines[1:] == [
        "process 3 has posted nothing: it has not started a watch",
        "process 0 waits in launch 3, too",
    ]


@pytest.mark.parametrize("stops", [False, True])
def test_only_a_process_that_is_heard_of_compiles(stops, job, stalled, clock):
    compiles = WAITING._replace(beat=1 - stops, compiles="step (train.py:5)")
    with looking_at(stalled, clock) as peers:
        post_for(1.4, job, {2: compiles}, clock)
        assert peers.is_compiling() is not stops


def test_a_coordinator_that_does_not_answer_blocks_nothing(job, stalled, monkeypatch, clock):
    is_asked, answers = threading.Event(), threading.Event()

    def read_all(directory):
        is_asked.set()
        return answers.wait(60) and {}

    monkeypatch.setattr(store, "get_all", read_all)
    monkeypatch.setattr(peers_module, "heartbeat_secs", lambda: 2.0)
    try:
        with looking_at(stalled, clock, secs=60) as peers:
            assert not peers.must_report()
            wait_until(lambda: clock.jump(0.05) or is_asked.is_set())
            clock.jump(1.3)
            peers.look(stalled, 2.2)
            assert peers.must_report()
            (line,) = peers.lines()
            assert_message(line, values=["process 0", "coordinator"])
            assert "2 s" in peers.end_by_jax()
            answers.set()
    finally:
        answers.set()


def test_launches_of_this_process_alone_are_not_counted(job):
    log = launches.start_log()
    try:
        launch = log.begin(launches.Described("alone"))
        launch.starts()
        assert launch.joint_number == 0
        peers = Peers(1.0)
        peers.look(launch, 5.0)
        assert peers.lines() == []
        peers.close()
        launch.ends()
    finally:
        launches.stop_log()


CODE = """
import os, signal, sys, threading
import jax, numpy as np, mirror
mirror.distributed.initialize(heartbeat_secs=HEARTBEAT, shutdown_secs=SHUTDOWN)
strategy = mirror.MultiWorkerMirroredStrategy()
me = mirror.distributed.process_index()
def step(x):
    return mirror.all_reduce("sum", x.sum())
x = mirror.PerReplica.from_stacked(np.ones((strategy.num_replicas_in_sync, 3), np.float32))
def load(i):
    if me == WHO and i == 4:
        FAULT
    return x
watch = mirror.debugging.watch(SECS, "ACTION")
for i in range(8):
    total = strategy.run(step, (load(i),))
    EACH
print("has ended")
"""
FAULTS = {
    "sleeps": "threading.Event().wait()",
    "stopped": "threading.Event().wait(2); os.kill(os.getpid(), signal.SIGSTOP)",  # after a post
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "one more": "float(strategy.run(step, (x,)))",
}


def ended(
    fault,
    who,
    *,
    count=2,
    secs=6,
    action="exit",
    heartbeat=40,
    each="float(total)",
    after=6,
    shutdown=60,
):
    values = {"WHO": who, "FAULT": FAULTS[fault], "SECS": secs, "ACTION": action}
    values |= {"HEARTBEAT": heartbeat, "EACH": each, "SHUTDOWN": shutdown}
    code = re.sub("|".join(values), lambda found: str(values[found[0]]), CODE)
    devices = 1 if count > 2 else 2
    return processes.run(code, processes=count, devices=devices, timeout=900, after_failure=after)


@pytest.mark.nightly
@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_sleeps_is_named_by_all_others(who):
    found = ended("sleeps", who, count=3)
    for i in {0, 1, 2} - {who}:
        assert found[i].status == 75, found[i].output
        assert_message(
            found[i].output,
            values=[
                "step (<string>:7)",
                "launch 5,",
                f"process {who} ",
                "4 of 5",
                "<string>:12 in load",
            ],
        )
        assert f"process {3 - who - i} waits in launch 5, too" in found[i].output
    assert found[who].status != 0


CALLBACK = """
import threading
import numpy as np, optax, mirror
from flax import nnx
mirror.distributed.initialize(heartbeat_secs=40)
strategy = mirror.MultiWorkerMirroredStrategy()
class Sleeps(mirror.callbacks.Callback):
    def on_step(self, fit):
        if fit.position.step == 3 and mirror.distributed.process_index() == 1:
            threading.Event().wait()
def loss_fn(model, batch):
    return (model(batch) ** 2).sum(-1)
with strategy.scope():
    trainer = mirror.Trainer(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn)
mirror.debugging.watch(6, "exit")
trainer.fit(np.ones((60, 3), np.float32), batch_size=6, callbacks=Sleeps(), progress=False)
"""


@pytest.mark.slow
def test_a_process_that_sleeps_in_a_callback_is_named_by_all_others():
    found = processes.run(CALLBACK, processes=3, devices=1, timeout=900, after_failure=6)
    for i in (0, 2):
        assert found[i].status == 75, found[i].output
        values = ["launch 4,", "process 1 ", "3 of 4", "<string>:10 in on_step", "train_step"]
        assert_message(found[i].output, values=values)
        assert f"process {2 - i} waits in launch 4, too" in found[i].output


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.nightly
def test_a_process_that_is_stopped_is_named(who):
    other = ended("stopped", who)[1 - who]
    assert other.status == 75, other.output
    assert_message(
        other.output,
        values=[
            f"process {who} has not been heard of for ",
            "it has begun 4 launches, the last: step (<string>:7)",
            "It was last at <string>:12 in load",
        ],
    )


@pytest.mark.nightly
@pytest.mark.parametrize("who", [0, 1])
def test_the_report_precedes_the_end_by_jax(who):
    other = ended("stopped", who, secs=60, heartbeat=20)[1 - who]
    assert other.status not in (0, 75, None), other.output
    assert f"process {who} has not been heard of for " in other.output
    assert "after 20 s (heartbeat_secs" in other.output
    assert other.output.index("has not been heard of") < other.output.index("Check failure")


@pytest.mark.nightly
@pytest.mark.parametrize("who", [0, 1])
def test_a_step_of_one_process_alone_is_named(who):
    """The process that runs the step once more ends with an error."""
    found = ended("one more", who)
    assert found[who].status == 1, found[who].output
    assert_message(
        found[who].output,
        values=[
            f"Process {1 - who} has ended after launch 9",
            f"process {who} has begun launch 10",
        ],
        fix="End the program at the same step on every process",
    )
    assert "has ended\n" in found[1 - who].output


@pytest.mark.nightly
@pytest.mark.parametrize(("fault", "who"), [("sleeps", 1), ("stopped", 0)])
def test_raise_ends_the_process_without_the_barrier_of_jax(fault, who):
    other = ended(fault, who, action="raise", each="pass", shutdown=1000)[1 - who]
    assert other.status == 75, other.output
    assert_message(
        other.output, values=["mirror.StalledError", f"process {who} ", "launch 5,", "status 75"]
    )


@pytest.mark.nightly
def test_the_launcher_starts_all_processes_again(tmp_path):
    fault = "os.environ['MIRROR_RESTARTS'] == '0' and threading.Event().wait()"
    values = {"WHO": 1, "FAULT": fault, "SECS": 6, "ACTION": "exit", "HEARTBEAT": 40}
    values |= {"EACH": "float(total)", "SHUTDOWN": 60}
    script = tmp_path / "train.py"
    script.write_text(re.sub("|".join(values), lambda found: str(values[found[0]]), CODE))
    options = ["--processes", "2", "--devices", "1", "--restarts", "1", str(script)]
    path = os.pathsep.join(filter(None, [fresh.INHERITED.get("PYTHONPATH"), str(fresh.ROOT)]))
    done = subprocess.run(
        [sys.executable, "-m", "mirror", "launch", *options],
        env={**fresh.INHERITED, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert_message(done.stderr, values=["process 0 ended first", "status 75", "restart 1 of 1"])
    assert done.stdout.count("has ended") == 2


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_process_that_is_killed_ends_the_others(who):
    """Without a launcher. Its connections are closed, or it is named, whichever comes first."""
    found = ended("killed", who, secs=60, heartbeat=10, after=None)
    other = found[1 - who]
    assert other.status not in (0, None), other.output
    named = f"process {who} has not been heard of for " in other.output
    causes = ("Gloo", "coordination service", "lost the coordinator")
    output = other.output.replace("[Gloo] Rank", "")
    assert named or any(cause in output for cause in causes), output
