"""`MultiWorkerMirroredStrategy`: values, steps and refusals, in jobs of several processes."""

import copy

import jax
import pytest

import mirror
from tests.support import inside, processes
from tests.support.messages import raises
from tests.support.tables import rows


def test_without_a_cluster_it_is_a_mirrored_strategy():
    strategy = mirror.MultiWorkerMirroredStrategy()
    assert strategy.devices == strategy.local_devices == tuple(jax.devices())
    assert strategy.local_replica_ids == tuple(range(8))
    assert (strategy.is_chief, strategy.num_workers, strategy.cluster_resolver) == (True, 1, None)
    step = lambda x: mirror.all_reduce("sum", x)  # noqa: E731
    assert strategy.run(step, (mirror.PerReplica(list(range(8))),)) == 28
    assert copy.deepcopy(strategy).num_workers == 1
    pairs = mirror.MultiWorkerMirroredStrategy(replicas_per_device=2, axis_name="batch")
    assert pairs.num_replicas_in_sync == 16
    pairs.check_mirrored({"w": pairs.run(lambda: 1.0)})
    assert pairs.verify(lambda x: x * 2, (mirror.PerReplica([[1.0]] * 16),)).largest == 0


@rows(
    "arguments, error, fix",
    [
        ({"replicas_per_device": 0}, ValueError, "a positive integer"),
        ({"axis_name": ""}, ValueError, "axis_name='batch'"),
        ({"cluster_resolver": "worker"}, TypeError, "TFConfigClusterResolver()"),
        ({"cross_device_ops": 3}, TypeError, "mirror.AllReduce()"),
    ],
)
def test_wrong_arguments_are_rejected(arguments, error, fix):
    with raises(error, names=list(arguments), fix=fix):
        mirror.MultiWorkerMirroredStrategy(**arguments)


# Processes, devices of each, replicas on each device.
LAYOUTS = {"2x2": (2, 2, 1), "4x1": (4, 1, 1), "2x1 in pairs": (2, 1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        LAYOUTS["2x2"],
        *(
            pytest.param(LAYOUTS[name], marks=pytest.mark.nightly)
            for name in ("4x1", "2x1 in pairs")
        ),
    ],
)
def test_values_and_refusals(layout):
    count, devices, replicas = layout
    ended = processes.run_program(
        "several_values", str(replicas), processes=count, devices=devices, after_failure=15
    )
    for output in processes.outputs_of(ended):
        assert output.count("passed ") == 17


@pytest.mark.nightly
def test_steps_agree_with_one_device():
    """Four processes; `tests/engine/test_agreement.py` runs the same program on two."""
    ended = processes.run_program(
        "several_agreeing", processes=4, devices=1, after_failure=15, timeout=900
    )
    for output in processes.outputs_of(ended):
        assert output.count("agrees: ") == 15


@pytest.mark.nightly
@pytest.mark.parametrize("arguments", [["600"], ["100", "unpacked"]], ids=["packed", "unpacked"])
def test_local_reads_wait_for_nobody_and_many_steps_finish(arguments):
    """`tests/laws/test_several_processes.py` runs more of them, and in four processes."""
    ended = processes.run_program("several_alone", *arguments, after_failure=15)
    first, *others = processes.outputs_of(ended)
    assert "alone" in first
    assert all("finished" in output for output in (first, *others))


LATE = """
import os, time
import numpy as np, mirror
from tests.support import inside
print("creates", flush=True)
strategy = mirror.MultiWorkerMirroredStrategy()
print("has created", flush=True)
launches = inside.eager_guard()
begin, late = launches.Uncounted, float(os.environ["LATE_SECS"])
def come_late():
    if not strategy.is_chief:
        time.sleep(late)
    return begin()
launches.Uncounted = come_late
x = mirror.PerReplica.from_stacked(np.ones((4, 3), np.float32))
total = strategy.run(lambda x: mirror.all_reduce("sum", x), (x,))
print("total", np.asarray(total).tolist())
"""


@pytest.mark.nightly
@pytest.mark.parametrize("late", ["0", "40"])
def test_a_process_may_come_late_to_the_first_step(late):
    """It may compile longer. XLA waits for 30 s until all have opened the connections of gloo."""
    ended = processes.run(LATE, environment={"LATE_SECS": late}, after_failure=15)
    for output in processes.outputs_of(ended):
        opened = output.split("creates")[1].split("has created")[0]
        assert "is connected to 3 peer ranks" in opened, "the connections are opened at once"
        assert "total [4.0, 4.0, 4.0]" in output


def test_devices_that_cannot_be_connected_are_an_error(monkeypatch):
    def fail(*args):
        raise jax.errors.JaxRuntimeError("Gloo context initialization failed: DEADLINE_EXCEEDED")

    replicas = inside.replica_devices()(tuple(jax.devices()))
    monkeypatch.setattr(replicas, "stack", fail)
    values = ["Process 0", "Gloo context initialization failed"]
    with raises(RuntimeError, values=values, fix="/etc/hosts"):
        inside.connect(replicas)


@pytest.mark.slow
def test_a_mismatch_in_devices_is_named_by_all():
    code = "import mirror; mirror.MultiWorkerMirroredStrategy()"
    each = [{"JAX_NUM_CPU_DEVICES": "2"}, {"JAX_NUM_CPU_DEVICES": "3"}]
    for ended in processes.run(code, each=each, after_failure=15):
        assert ended.status == 1, ended.output
        assert "2 x CPU on process 0" in ended.output
        assert "3 x CPU on process 1" in ended.output
        assert "mirror launch --devices" in ended.output
