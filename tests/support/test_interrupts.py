"""The suite is independent of how its process was started."""

import signal
import subprocess
import sys

import pytest

from tests.support import fresh

TEST = "tests/devices/test_collective_check.py"


@pytest.mark.slow
def test_interrupt_tests_pass_where_sigint_is_inherited_as_ignored():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "interrupt", TEST]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            command, cwd=fresh.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
