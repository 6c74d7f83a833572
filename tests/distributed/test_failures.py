"""An exception that ends one process is reported by all of them, and ends the job soon."""

import pytest

from tests.support import processes

CODE = """
import time, numpy as np, mirror
mirror.distributed.initialize(heartbeat_secs=8)
strategy = mirror.MultiWorkerMirroredStrategy()
def step(x):
    return mirror.get_replica_context().all_reduce("sum", x.sum())
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


@pytest.mark.nightly
def test_an_error_of_all_processes_ends_them_in_order():
    ended = processes.run(CODE.replace("FAILING", "(0, 1)"))
    for each in ended:
        assert each.status == 1, each.output
        assert "ValueError: bad row 12 in batch 7" in each.output
        assert "coordination" not in each.output, "JAX reports no failure of its own"
