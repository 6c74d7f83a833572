"""No mix of launches waits for itself: see `tests/support/mixes.py`."""

import subprocess
import sys

import pytest

from tests.support import fresh
from tests.support.mixes import MIXES

SECS = 2
DEADLINE = 100  # XLA aborts after 40 s


@pytest.mark.nightly
@pytest.mark.parametrize("name", MIXES)
def test_mixes_of_launches_end(name):
    command = [sys.executable, "-m", "tests.support.mixes", name, str(SECS)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=fresh.ROOT,
        env=fresh.INHERITED,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = done.stdout.split("calls:")[1].split()
    assert all(int(count) > 0 for count in counts), done.stdout
