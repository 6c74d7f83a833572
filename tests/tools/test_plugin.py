"""The pytest plugin, in runs of pytest in separate processes."""

import re
import subprocess

import pytest

from tests.support import fresh
from tests.support.messages import assert_message
from tests.support.pytest_runs import lines_with, run_pytest, statuses
from tests.support.tables import rows

MARKS = (fresh.PROGRAMS / "plugin_marks.py").read_text()
IDS = [f"test_sum[{e}-{n}]" for e in ("pmap", "vmap", "staged") for n in (1, 2, 4)]
IDS += ["TestMarks::test_of_the_class[staged-all]", "TestMarks::test_the_closest_wins[staged-2]"]
IDS += ["TestMarks::test_without_the_fixture", "test_default[1]", "test_default[2]"]

KEYWORDS = ["replicas", "executors", "processes", "timeout"]
# The text after `@pytest.mark.mirror`, the arguments of the test, and what the message contains.
WRONG_MARKS = {
    "executor": (
        *("(executors=['pmap', 'spmd'])", "strategy"),
        {"names": "'spmd'", "fix": ["pmap", "vmap", "staged"]},
    ),
    "replicas": (
        *("(replicas=[2, 0])", "strategy"),
        {"names": "replicas", "values": ["[2, 0]", 0, 1]},
    ),
    "bool": ("(replicas=True)", "strategy", {"names": "replicas", "values": [True, 1]}),
    "keyword": ("(device=3)", "strategy", {"names": "'device'", "fix": KEYWORDS}),
    "position": ("(3)", "strategy", {"values": 3, "fix": KEYWORDS}),
    "timeout": ("(timeout='5')", "", {"names": "timeout", "values": ["'5'", 0]}),
    "empty": ("(replicas=[])", "strategy", {"names": "replicas", "values": "[]"}),
    "twice": ("(replicas=[2, 2])", "strategy", {"names": "replicas", "values": "[2, 2]"}),
    "processes": (
        *("(processes=[2, 0])", "strategy"),
        {"names": "processes", "values": ["[2, 0]", 1]},
    ),
    "multiple": (
        *("(processes=2, replicas=[2, 3])", "strategy"),
        {"names": "replicas", "values": ["processes=2", 3], "fix": "replicas=4"},
    ),
    "both": (
        *("(processes=2, executors='vmap')", "strategy"),
        {"names": ["processes=(2,)", "executors=('vmap',)"], "fix": "Omit executors"},
    ),
    "unused": ("(replicas=2)", "", {"fix": "strategy"}),
}
MARK = "import pytest\n@pytest.mark.mirror{}\ndef test_{}({}): pass\n"
OF_TESTCASE = """\
    import unittest, pytest
    class Case(unittest.TestCase):
        @pytest.mark.mirror(replicas=2)
        def test_method(self): pass
    """

FORCED = "XLA_FLAGS=--xla_force_host_platform_device_count=3"
# The options, and what the message contains; in this order in one process.
REFUSED = {
    "--mirror-devices=0": {"names": "--mirror-devices=0", "values": 8},
    "--mirror-devices=x": {"names": "--mirror-devices=x", "values": 8},
    "--mirror-devices=": {"names": "--mirror-devices=", "values": 8},
    "-o mirror_devices=x": {"names": ["mirror_devices=x", "pytest.ini"], "values": 8},
    "--mirror-timeout=nan": {"names": "--mirror-timeout=nan", "values": [60, 0]},
    "--mirror-timeout=x": {"names": "--mirror-timeout=x", "values": 0},
    "--mirror-timeout=1e9": {"names": "--mirror-timeout=1e9", "values": 0},
    "--mirror-devices=4 -n 2": {"names": ["--mirror-devices=4", FORCED], "values": [4, 3]},
    "--mirror-devices=3 test_it.py": None,
    "--mirror-devices=5 late": {"names": "--mirror-devices=5", "fix": "JAX_NUM_CPU_DEVICES=5"},
}

HANGS = (fresh.PROGRAMS / "plugin_hangs.py").read_text()

STALLED = (fresh.PROGRAMS / "plugin_stalls.py").read_text()


def refused() -> subprocess.CompletedProcess[str]:
    files = {
        "test_it.py": "def test_it(): pass",
        "late/conftest.py": "import os, jax\ndel os.environ['XLA_FLAGS']\njax.devices()\n",
        "late/test_late.py": "def test_late(): pass",
    }
    return run_pytest(files, *REFUSED, XLA_FLAGS="--xla_force_host_platform_device_count=3")


def marks_without_jax() -> subprocess.CompletedProcess[str]:
    files = {f"test_{k}.py": MARK.format(v[0], k, v[1]) for k, v in WRONG_MARKS.items()}
    files |= {"test_case.py": OF_TESTCASE, "test_plain.py": "def test_plain(): pass"}
    return run_pytest(
        files,
        "--continue-on-collection-errors --strict-markers",
        "test_plain.py",
        "test_plain.py -p no:mirror",
        "test_plain.py -p no:mirror --mirror-devices=4",
    )


AHEAD = {
    "twice": lambda: run_pytest({"test_it.py": MARKS}, *["--mirror-devices=4 -v"] * 2),
    "workers": lambda: run_pytest(
        {"test_it.py": MARKS, "pytest.ini": "[pytest]\nmirror_devices = 4\n"}, "-v -n 2 -k pmap"
    ),
    "marks": marks_without_jax,
    "refused": refused,
    "hangs": lambda: run_pytest({"test_it.py": HANGS}, "-n 3 --mirror-timeout=1.5"),
    "stalled": lambda: run_pytest({"test_it.py": STALLED}, "--mirror-devices=4"),
}


def output(ahead, name: str) -> str:
    return ahead[__name__][name].result().stdout


def assert_needs_more(said: str, times: int) -> None:
    """Checks that the test with too many replicas is rejected at least this many times."""
    lines = lines_with(said, "cpu:0, cpu:1, cpu:2, cpu:3", "--mirror-devices=8").splitlines()
    assert len(lines) >= times, said
    for line in lines:
        assert_message(line, names="test_needs_more[pmap-8]", values=[8, 4])


@pytest.mark.nightly
def test_mark_creates_a_test_per_layout_in_every_session(ahead):
    said = output(ahead, "twice")
    assert statuses(said) == [1, 1], said
    for name in IDS:
        assert said.count(f"test_it.py::{name} PASSED") == 2, said
    assert_needs_more(said, 2)
    assert said.count(f"{len(IDS)} passed, 1 error") == 2
    assert "skipped" not in said


@pytest.mark.nightly
def test_each_worker_forces_its_devices(ahead):
    said = output(ahead, "workers")
    assert statuses(said) == [1], said
    for n in (1, 2, 4):
        assert f"PASSED test_it.py::test_sum[pmap-{n}]" in said
    assert_needs_more(said, 1)


@rows("name", list(WRONG_MARKS))
def test_error_in_a_mark_is_a_collection_error(ahead, name):
    said = output(ahead, "marks")
    assert f"ERROR collecting test_{name}.py" in said
    message = lines_with(said, "@pytest.mark.mirror", f"test_{name}.py::test_{name}")
    assert_message(message, **WRONG_MARKS[name][2])


def test_mark_of_a_testcase_is_rejected(ahead):
    said = output(ahead, "marks")
    message = lines_with(said, "@pytest.mark.mirror", "test_case.py::Case::test_method")
    assert_message(message, fix="strategy")


def test_plugin_does_not_import_jax_and_can_be_disabled(ahead):
    """Every run of pytest loads it; without its options and its fixture it does not import JAX."""
    said = output(ahead, "marks")
    assert statuses(said) == [1, 0, 0, 4], said
    assert "unrecognized arguments: --mirror-devices=4" in said
    assert said.endswith("LOADED mirror\n")


@pytest.mark.slow
def test_invalid_options_are_rejected_before_any_test(ahead):
    said = output(ahead, "refused")
    assert statuses(said) == [4 if wanted else 0 for wanted in REFUSED.values()], said
    *parts, _ = re.split(r"^STATUS \d+$", said, flags=re.MULTILINE)
    for part, wanted in zip(parts, REFUSED.values(), strict=True):
        if wanted:
            assert_message(part, **wanted)


def assert_ended(said: str, test: str, secs: str) -> None:
    assert_message(lines_with(said, f"FAILED test_it.py::{test}"), values=f"{secs} s")


@pytest.mark.slow
def test_hanging_tests_fail_by_name(ahead):
    said = output(ahead, "hangs")
    assert statuses(said) == [1], said
    assert_ended(said, "test_marked", "1")
    assert_ended(said, "test_of_the_option", "1.5")
    assert "printed before" in said
    assert "time.sleep(60)" in said  # where it is
    for test in ("test_marked", "test_of_the_option", "test_keeps_the_lock_of_the_interpreter"):
        assert re.search(rf"worker 'gw\d' crashed while running 'test_it.py::{test}'", said), said
    assert re.search(r'File ".*test_it.py", line \d+ in test_keeps_the_lock', said)
    assert "3 failed, 2 passed" in said


@pytest.mark.nightly
def test_stalled_replica_is_reported(ahead):
    said = output(ahead, "stalled")
    assert statuses(said) == [], said  # the process has been ended
    assert_ended(said, "test_stalls[pmap-4]", "4")
    assert ahead[__name__]["stalled"].result().returncode == 1
    every = ", ".join(f"/device:CPU:{i}" for i in range(4))
    assert_message(lines_with(said, "launch", f"({every})"), values=1)
    assert "if replica == 1:" not in said
    assert "time.sleep(60)" in said  # where replica 1 is
