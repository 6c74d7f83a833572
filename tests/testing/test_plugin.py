"""The pytest plugin as a user meets it: in runs of pytest that are processes of their own."""

import pathlib
import re
import subprocess
import tempfile
import textwrap

import pytest

from pytest_mirror import timeout
from tests.support import fresh
from tests.support.messages import assert_message

# As an installed mirror has it: pytest finds the plugin by this, and blocks it by this name.
ENTRY_POINT = {"entry_points.txt": "[pytest11]\nmirror = pytest_mirror\n"}
METADATA = {"METADATA": "Metadata-Version: 2.1\nName: mirror-stand-in\nVersion: 0\n"}


def run_pytest(
    files: dict[str, str], *runs: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs of pytest, one after the other in one process, over a folder with these files.

    The exit statuses are in lines `STATUS i`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        installed = {f"stand_in-0.dist-info/{k}": v for k, v in (ENTRY_POINT | METADATA).items()}
        for path, text in ({"pytest.ini": "[pytest]\n"} | files | installed).items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(textwrap.dedent(text))
        code = f"""\
            import os, sys, pytest
            os.chdir({name!r})
            for options in {runs!r}:
                status = pytest.main(["-W", "error", "-p", "no:cacheprovider", *options.split()])
                print("STATUS", int(status), flush=True)
            print("LOADED", *sorted({{"jax", "mirror", "pytest_mirror"}} & set(sys.modules)))
            """
        path = f"{fresh.ROOT}:{name}"
        return fresh.start(
            code, environment={"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment}
        )


def statuses(output: str) -> list[int]:
    return [int(found) for found in re.findall(r"^STATUS (\d+)", output, re.MULTILINE)]


MARKS = """\
    import pytest

    @pytest.mark.mirror(replicas=[1, 2, 4], executors=["pmap", "vmap", "staged"])
    def test_sum(strategy, request):
        layout = request.node.callspec.id
        assert layout.endswith(f"-{strategy.num_replicas_in_sync}")
        assert float(strategy.reduce("sum", 1.0)) == strategy.num_replicas_in_sync
        assert len(set(strategy.devices)) == (1 if "vmap" in layout else int(layout[-1]))

    @pytest.mark.mirror(executors="staged")
    class TestMarks:
        def test_of_the_class(self, strategy):
            assert strategy.num_replicas_in_sync == 4

        @pytest.mark.mirror(replicas=2, timeout=60)
        def test_the_closest_wins(self, strategy):
            assert strategy.num_replicas_in_sync == 2

        def test_without_the_fixture(self):
            pass

    @pytest.mark.parametrize("x", [1, 2])
    def test_default(strategy, x):
        assert strategy.num_replicas_in_sync == len(set(strategy.devices)) == 4

    @pytest.mark.mirror(replicas=8)
    def test_needs_more(strategy):
        pass
    """
IDS = [f"test_sum[{e}-{n}]" for e in ("pmap", "vmap", "staged") for n in (1, 2, 4)]
IDS += ["TestMarks::test_of_the_class[staged-all]", "TestMarks::test_the_closest_wins[staged-2]"]
IDS += ["TestMarks::test_without_the_fixture", "test_default[1]", "test_default[2]"]

KEYWORDS = ["replicas", "executors", "timeout"]
# Each is the text after `@pytest.mark.mirror`, the test's arguments, and what the message holds.
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
# What is asked for, and what the message holds; in this order in one process.
REFUSED = {
    "--mirror-devices=0": {"names": "--mirror-devices=0", "values": 1},
    "--mirror-devices=x": {"names": "--mirror-devices=x", "values": 1},
    "--mirror-devices=": {"names": "--mirror-devices=", "values": 1},
    "-o mirror_devices=x": {"names": ["mirror_devices=x", "pytest.ini"], "values": 1},
    "--mirror-timeout=nan": {"names": "--mirror-timeout=nan", "values": [60, 0]},
    "--mirror-timeout=x": {"names": "--mirror-timeout=x", "values": 0},
    "--mirror-timeout=1e9": {"names": "--mirror-timeout=1e9", "values": 0},
    "--mirror-devices=4 -n 2": {"names": ["--mirror-devices=4", FORCED], "values": [4, 3]},
    "--mirror-devices=3 test_it.py": None,
    "--mirror-devices=5 late": {"names": "--mirror-devices=5", "fix": "JAX_NUM_CPU_DEVICES=5"},
}

HANGS = """\
    import ctypes, time, pytest

    @pytest.mark.mirror(timeout=1)
    def test_marked():
        print("printed before")
        time.sleep(60)

    def test_of_the_option():
        time.sleep(60)

    @pytest.mark.mirror(timeout=1)
    def test_keeps_the_lock_of_the_interpreter():
        ctypes.PyDLL(None).sleep(60)

    @pytest.mark.mirror(timeout=0)
    def test_may_take_long():
        time.sleep(2.5)

    def test_is_debugged(pytestconfig):
        pytestconfig.hook.pytest_enter_pdb(config=pytestconfig, pdb=None)
        time.sleep(2.5)
    """

STALLED = """\
    import time, jax, numpy as np, pytest, mirror

    def wait(replica):
        if replica == 1:
            time.sleep(60)
        return np.float32(0)

    def step(x):
        context = mirror.get_replica_context()
        shape = jax.ShapeDtypeStruct((), np.float32)
        y = jax.pure_callback(wait, shape, context.replica_id_in_sync_group)
        return context.all_reduce("sum", x + y)

    @pytest.mark.mirror(replicas=4, timeout=4)
    def test_stalls(strategy):
        float(strategy.run(step, (np.float32(1),)))
    """
WARN_SOON = "--xla_cpu_collective_call_warn_stuck_timeout_seconds=1"


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
    "stalled": lambda: run_pytest(
        {"test_it.py": STALLED}, "--mirror-devices=4", XLA_FLAGS=WARN_SOON
    ),
}


def output(ahead, name: str) -> str:
    return ahead[__name__][name].result().stdout


def lines_with(said: str, *texts: str) -> str:
    """Those lines that contain all of the texts."""
    return "\n".join(line for line in said.splitlines() if all(text in line for text in texts))


def assert_needs_more(said: str, times: int) -> None:
    """Checks that the test with too many replicas is refused at least so many times."""
    lines = lines_with(said, "cpu:0, cpu:1, cpu:2, cpu:3", "--mirror-devices=8").splitlines()
    assert len(lines) >= times, said
    for line in lines:
        assert_message(line, names="test_needs_more[pmap-8]", values=[8, 4])


def test_a_mark_makes_a_test_for_each_layout_and_again_in_the_same_process(ahead):
    said = output(ahead, "twice")
    assert statuses(said) == [1, 1], said
    for name in IDS:
        assert said.count(f"test_it.py::{name} PASSED") == 2, said
    assert_needs_more(said, 2)
    assert said.count(f"{len(IDS)} passed, 1 error") == 2
    assert "skipped" not in said


def test_each_worker_forces_its_devices(ahead):
    said = output(ahead, "workers")
    assert statuses(said) == [1], said
    for n in (1, 2, 4):
        assert f"PASSED test_it.py::test_sum[pmap-{n}]" in said
    assert_needs_more(said, 1)


@pytest.mark.parametrize("name", WRONG_MARKS)
def test_an_error_in_a_mark_is_one_of_collection(ahead, name):
    said = output(ahead, "marks")
    assert f"ERROR collecting test_{name}.py" in said
    message = lines_with(said, "@pytest.mark.mirror", f"test_{name}.py::test_{name}")
    assert_message(message, **WRONG_MARKS[name][2])


def test_the_mark_of_a_testcase_is_not_ignored(ahead):
    said = output(ahead, "marks")
    message = lines_with(said, "@pytest.mark.mirror", "test_case.py::Case::test_method")
    assert_message(message, fix="strategy")


def test_it_costs_other_projects_nothing_and_can_be_left_out(ahead):
    """Every run of pytest loads it: without its options and its fixture it brings no JAX."""
    said = output(ahead, "marks")
    assert statuses(said) == [1, 0, 0, 4], said
    assert "unrecognized arguments: --mirror-devices=4" in said
    assert said.endswith("LOADED pytest_mirror\n")


def test_what_cannot_be_is_refused_before_any_test(ahead):
    said = output(ahead, "refused")
    assert statuses(said) == [4 if wanted else 0 for wanted in REFUSED.values()], said
    *parts, _ = re.split(r"^STATUS \d+$", said, flags=re.MULTILINE)
    for part, wanted in zip(parts, REFUSED.values(), strict=True):
        if wanted:
            assert_message(part, **wanted)


def assert_ended(said: str, test: str, secs: str) -> None:
    assert_message(lines_with(said, f"FAILED test_it.py::{test}"), values=f"{secs} s")


def test_what_hangs_fails_by_name(ahead):
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


def test_a_stalled_replica_is_reported_as_far_as_is_known(ahead):
    said = output(ahead, "stalled")
    assert statuses(said) == [], said  # the process has been ended
    assert_ended(said, "test_stalls[pmap-4]", "4")
    assert ahead[__name__]["stalled"].result().returncode == 1
    assert_message(lines_with(said, "XLA", "replicas", "all reduce"), values=[3, 4])
    every = ", ".join(f"/device:CPU:{i}" for i in range(4))
    assert_message(lines_with(said, "launch", f"({every})"), values=1)
    assert "if replica == 1:" not in said
    assert "time.sleep(60)" in said  # where replica 1 is


def test_xla_counts_and_names_nobody():
    line = (
        "[id={}] This thread has been waiting for `all reduce Key{{op_id={}}}` for 20 seconds and "
        "may be stuck. Expected 8 threads to join the rendezvous, but not all of them arrived."
    )
    text = "\n".join([*(line.format(i, 1) for i in range(3)), line.format(0, 2), "another line"])
    first, second = timeout._arrivals(text)
    assert_message(first, names="all reduce Key{op_id=1}", values=[3, 8])
    assert_message(second, names="all reduce Key{op_id=2}", values=[1, 8])
