"""Tests with `processes=`: the plugin runs them in new processes, and reports all of them."""

import contextlib
import os
import pathlib
import re

import pytest

from tests.support import fresh
from tests.support.messages import assert_message
from tests.support.pytest_runs import lines_with, run_pytest, statuses
from tests.support.waiting import wait_until

pytestmark = (
    pytest.mark.nightly
)  # every test starts processes, and some wait for those that are stuck

PROGRAM = (fresh.PROGRAMS / "plugin_processes.py").read_text()
CONFTEST = "def pytest_addoption(parser): parser.addoption('--mine', default='other')"
OWN = "MIRROR_TEST_RUN"  # identifies the processes of this file


def run(options: str, ini: str = "") -> str:
    """Runs tests of `plugin_processes.py`, and checks that they leave no process behind."""
    files = {"test_it.py": PROGRAM, "conftest.py": CONFTEST, "pytest.ini": f"[pytest]\n{ini}"}
    # In the default folder, a warning of pytest about what other runs delete there is an error.
    options = f"--mine=mine --basetemp=temp {options}"
    said = run_pytest(files, options, **{OWN: str(os.getpid())}).stdout
    wait_until(lambda: not members())
    return said


def members() -> list[str]:
    wanted = [f"{OWN}={os.getpid()}\0".encode(), b"MIRROR_PYTEST_PROCESS="]
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            environment = path.read_bytes()
            if all(text in environment for text in wanted):
                found.append(path.parent.name)
    return found


def test_tests_run_in_every_process_with_their_fixtures():
    """With options of an ini file that would select other tests, or start workers."""
    ini = "addopts = -n 0 -m 'not other'\nmirror_devices = 8"
    said = run("-rA test_it.py::test_step", ini)
    assert statuses(said) == [0], said
    for n in (2, 4):
        assert lines_with(said, "PASSED test_it.py::test_step[", f"2-processes-{n}", "3.0")
    for i in (0, 1):
        prints = lines_with(said, f"[{i}] fixture in process {i}").splitlines()
        assert len(prints) == 2
        assert all(f'"index": {i}' in line for line in prints)
        assert len(lines_with(said, f"[{i}] end of the fixture").splitlines()) == 2
    assert said.count("test session starts") == 1


def test_workers_of_xdist_start_processes():
    tests = ["TestClass", "test_skips", "test_fails_as_expected"]
    said = run(" ".join(["-v", "-n", "2", *(f"test_it.py::{test}" for test in tests)]))
    assert statuses(said) == [0], said
    for text in ("PASSED", "test_method[1-processes-1]"), ("PASSED", "test_without_the_fixture"):
        assert lines_with(said, *text), said
    assert "2 passed, 1 skipped, 1 xfailed" in said


def test_only_the_processes_import_jax():
    test = "import pytest\n@pytest.mark.mirror(processes=1)\ndef test_it(strategy): pass\n"
    said = run_pytest({"test_it.py": test}, "").stdout
    assert statuses(said) == [0], said
    assert said.endswith("LOADED mirror\n")


def test_failures_show_the_traceback_and_the_output_of_each_process():
    said = run("-rA test_it.py::test_one_fails")
    assert statuses(said) == [1], said
    first = lines_with(said, "test_one_fails[2-processes-2] in 2 processes")
    assert_message(first, names="process 1 failed in call")
    assert re.search(r"^E +assert \(1 \+ 2\) == 4", said, re.MULTILINE)
    assert re.search(r"test_it.py:\d+: AssertionError", said)
    for i in (0, 1):
        assert f"printed by process {i}" in said.split(f" output of process {i} ")[1]
    # Process 0 waits for the one that failed: where?
    assert "process 0 had not ended" in first
    assert "in test_one_fails" in said.split(" output of process 0 ")[1]


def test_a_timeout_ends_all_processes_and_the_run_goes_on():
    said = run("-v test_it.py::test_is_stuck test_it.py::TestClass::test_method")
    assert statuses(said) == [1], said
    first = lines_with(said, "test_is_stuck[2-processes-2] in 2 processes")
    assert "exceeded its timeout" in first
    for i in (0, 1):  # the exit of one does not end the other before its stacks are printed
        assert re.search(f"process {i} (exceeded its timeout|had not ended)", first), said
        assert "in test_is_stuck" in said.split(f" output of process {i} ")[1]
    assert "test_method[1-processes-1] PASSED" in said


def test_a_killed_process_is_named():
    said = run("test_it.py::test_is_killed")
    assert statuses(said) == [1], said
    assert "process 2 was ended by SIGKILL" in lines_with(said, "in 3 processes")
