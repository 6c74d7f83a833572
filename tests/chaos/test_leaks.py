"""Steps, trainings, strategies and programs leave nothing behind: see `tests/support/leaks.py`."""

import json
import subprocess
import sys

import pytest

from tests.support import fresh
from tests.support.leaks import CASES, MAKES_PROGRAMS
from tests.support.strict import STRICT

SHARE = 20  # of the whole count, in CI
MOST_KIB = 8 * 1024
MOST_KIB_PER_PROGRAM = 64  # of XLA, which does not return all memory of a dropped program
MOST_OBJECTS = 500  # caches of libraries that fill up


def grown(name: str, count: int) -> dict[str, int]:
    """Returns how much more a new process keeps after a case."""
    command = [sys.executable, *STRICT, "-m", "tests.support.leaks", name, str(count)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        cwd=fresh.ROOT,
        env=fresh.INHERITED,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = json.loads(done.stdout.splitlines()[-1])
    return {kind: last[kind] - first[kind] for kind in first}


def assert_nothing_left(name: str, count: int) -> None:
    growth = grown(name, count)
    print(name, count, growth)
    for kind in ("arrays", "threads", "native threads", "files"):
        assert growth[kind] <= 0, growth
    assert growth["objects"] <= MOST_OBJECTS, growth
    num_programs = count if name in MAKES_PROGRAMS else 0
    assert growth["kib"] <= MOST_KIB + MOST_KIB_PER_PROGRAM * num_programs, growth


IN_CI = ("fit",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.nightly)
        for name in CASES
    ],
)
def test_nothing_is_left_behind(name):
    assert_nothing_left(name, CASES[name][1] // SHARE)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_behind_in_the_long_run(name):
    assert_nothing_left(name, CASES[name][1])
