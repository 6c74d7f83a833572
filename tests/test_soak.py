"""Host devices do not deadlock, however many steps pile up and from however many threads."""

import functools
import os
import subprocess
import sys

import pytest

import mirror
from mirror.executors import launch as guard
from tests import fresh

NUM_THREADS = [1, 4]
# As it was before any test.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}


def soak(num_threads: int) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tests.soak", str(num_threads)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=fresh.ROOT,
        env=ENVIRONMENT,
        check=False,
    )


AHEAD = {str(n): functools.partial(soak, n) for n in NUM_THREADS}


@pytest.mark.parametrize("num_threads", NUM_THREADS)
def test_unawaited_steps_finish_with_equal_replicas(num_threads, ahead):
    done = ahead[__name__][str(num_threads)].result()
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
