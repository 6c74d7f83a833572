"""An exception that ends one process is reported by all of them, and ends the job soon."""

import os
import subprocess
import sys

import pytest

from tests.support import inside, processes
from tests.support.messages import assert_message

CODE = """
import time, numpy as np, mirror
mirror.distributed.initialize(heartbeat_secs=8)
strategy = mirror.MultiWorkerMirroredStrategy()
def step(x):
    return mirror.all_reduce("sum", x.sum())
x = mirror.PerReplica.from_stacked(np.ones((strategy.num_replicas_in_sync, 3), np.float32))
for i in range(9):
    if i == 7 and mirror.distributed.process_index() in FAILING:
        raise ValueError("bad row 12 in batch 7")
    loss = float(strategy.run(step, (x,)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_the_others_report_the_error_and_end(failing):
    ended = processes.run(CODE.replace("FAILING", f"({failing},)"))
    other = ended[1 - failing]
    assert ended[failing].status == 1, ended[failing].output
    assert "ValueError: bad row 12 in batch 7" in ended[failing].output
    assert f"Process {failing} has failed: ValueError: bad row 12 in batch 7" in other.output
    assert other.status not in (0, None), "JAX ends it after heartbeat_secs"


@pytest.mark.slow
def test_a_killed_process_is_named():
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    code = CODE.replace('raise ValueError("bad row 12 in batch 7")', kill)
    code = code.replace("FAILING", "(1,)")
    other, killed = processes.run(code, devices=1)  # with one, gloo ends the launch
    assert killed.status == -9, killed.output
    assert other.status not in (0, None), other.output
    assert_message(other.output, names=["process 0", "Process 1"], fix="exit status")


@pytest.mark.nightly
def test_an_error_of_all_processes_ends_them_in_order():
    ended = processes.run(CODE.replace("FAILING", "(0, 1)"))
    for each in ended:
        assert each.status == 1, each.output
        assert "ValueError: bad row 12 in batch 7" in each.output
        assert "coordination" not in each.output, "JAX reports no failure of its own"


def test_another_process_with_the_same_number_is_recognized():
    code = "print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        child.stdout.readline()  # before it runs Python, it has no command line
        pids = [str(os.getpid()), str(child.pid)]
        found = [inside.failures().running(pid).split() for pid in pids]
    assert [number for number, _, _ in found] == pids
    assert len({start for _, start, _ in found}) == 2
    assert not inside.failures().running(pids[1])


ENDS = {  # by name in several_ending.py: texts of all processes, statuses
    "exit": (["Process 1 has ended", "sys.exit"], [1, 3]),
    "return": (["Process 1 has ended", "several_ending.py"], [1, 0]),
    "chief returns": (["Process 0 has ended", "several_ending.py"], [0, 1]),
    "one more launch": (["Process 0 has ended", "several_ending.py"], [0, 1]),
    "static argument": (["ProgramMismatchError", "process 0 runs step", "process 1 runs"], [1, 1]),
    "shape": (
        ["step (several_ending.py:", "), process 1 runs step (several_ending.py:", "float32[3,3]"],
        [1, 1],
    ),
    "less data": (["Process 1 has ended"], [1, 0]),
    "exception": (["ValueError: bad row 12"], [1, 1]),
    "batch size": (["ReplicaDivergenceError", "batch['x']"], [1, 1]),
    "evaluate": (["ProgramMismatchError", "train_step", "evaluate_step"], [1, 1]),
    "save": (
        ["trainer.save failed: processes [1] have not called trainer.save"],
        [1, 1],
    ),
    "exit before barrier": (["reached barrier 'saved': Process 1 has ended"], [1, 3]),
    "exit before save": (["trainer.save failed: Process 1 has ended"], [1, 3]),
    "assign": (["ReplicaDivergenceError", "model.bias", "process 1"], [1, 1]),
}
IN_CI = ("exit", "exit before barrier", "one more launch", "evaluate", "save")


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=pytest.mark.slow if how in IN_CI else pytest.mark.nightly)
        for how in ENDS
    ],
)
def test_what_one_process_does_ends_all_with_an_error_and_their_own_status(how):
    """Before JAX takes a silent process for dead, and aborts the others."""
    texts, statuses = ENDS[how]
    devices = 2 if how == "one more launch" else 1  # with one, gloo ends the launch
    ended = processes.run_program("several_ending", how, devices=devices)
    everything = "\n".join(each.output for each in ended)
    assert [each.status for each in ended] == statuses, everything
    for each in ended:
        missing = [text for text in texts if text not in each.output]
        assert not missing, (missing, each.output)
        assert "stack trace" not in each.output, "nothing is aborted"
