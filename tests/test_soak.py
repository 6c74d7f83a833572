"""Host devices do not deadlock, however many steps pile up and from however many threads."""

import os
import subprocess
import sys

import pytest

import mirror
from mirror.executors import launch as guard


@pytest.mark.parametrize("num_threads", [1, 4])
def test_unawaited_steps_finish_with_equal_replicas(num_threads):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", str(num_threads)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "replicas equal" in done.stdout


def test_launches_in_flight_are_bounded(eight):
    for _ in range(10):
        eight.reduce("sum", 1.0)
    assert 0 < len(guard._in_flight) <= guard.MOST_IN_FLIGHT


def test_one_device_needs_no_bound():
    before = list(guard._in_flight)
    mirror.OneDeviceStrategy("/cpu:0").reduce("sum", 1.0)
    assert list(guard._in_flight) == before
