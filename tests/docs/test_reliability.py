"""The page on reliability names the classes of faults and their tests."""

import ast
import functools
import re

from tests.support import fresh

PAGE = (fresh.ROOT / "docs" / "reliability.md").read_text()

CHECKPOINTS = "tests/training/test_checkpoints.py::"
RESUME = "tests/training/test_resume.py::"
FAULTS = "tests/chaos/test_checkpoint_faults.py::"
DISKS = "tests/chaos/test_disks.py::"
SIGNALS = "tests/chaos/test_signals.py::"
COUNTED = "tests/chaos/test_counted.py::"
CALLBACKS = "tests/engine/test_callbacks.py::"

# The classes of faults: how many were tried by hand before there were tests, how many of them broke
# a promise, and the beginnings of the names of the tests.
CLASSES = {
    "`kill -9` during a save": (
        (100, 0),
        [
            "tests/chaos/test_kills.py::test_kill_in",
            CHECKPOINTS + "test_killed_process",
            RESUME + "test_killed_training",
        ],
    ),
    "clock that jumps or stands still": (
        (4, 4),
        [
            FAULTS + "test_order_does_not",
        ],
    ),
    "power failure during or after a save": (
        (12, 6),
        [
            FAULTS + "test_file_gets",
            FAULTS + "test_saved_checkpoint_survives",
        ],
    ),
    "two processes, one directory": (
        (2, 2),
        [
            FAULTS + "test_second_process",
            FAULTS + "test_other_process",
            FAULTS + "test_directory_without_locks",
        ],
    ),
    "several stores in one process": (
        (2, 2),
        [
            FAULTS + "test_two_stores",
            FAULTS + "test_stores_in_threads",
            FAULTS + "test_two_checkpoint_callbacks",
        ],
    ),
    "disk that is full, read-only, gone or replaced": (
        (14, 3),
        [
            DISKS + "test_disk_",
            DISKS + "test_store_is_opened",
            DISKS + "test_training_continues",
            DISKS + "test_directory_of_another_user",
            FAULTS + "test_directory_that_disappears",
            CHECKPOINTS + "test_save_reports",
            RESUME + "test_training_survives",
        ],
    ),
    "odd names, paths out of the directory, links and files in the way": (
        (23, 4),
        [
            DISKS + "test_directory_with_an_odd_name",
            DISKS + "test_directory_whose_name",
            DISKS + "test_name_of_an_array",
            DISKS + "test_something_else",
            DISKS + "test_directory_is_a_link",
            FAULTS + "test_link",
            CHECKPOINTS + "test_store_does_not_overwrite",
        ],
    ),
    "damaged and forged checkpoint files": (
        (39, 2),
        [
            FAULTS + "test_restore_changes_everything_or_nothing",
            FAULTS + "test_arrays_",
            CHECKPOINTS + "test_load_",
            CHECKPOINTS + "test_store_removes",
        ],
    ),
    "restoring another model, position or callback state": (
        (17, 10),
        [
            FAULTS + "test_restore_changes_everything_or_nothing",
            FAULTS + "test_foreign_state",
            FAULTS + "test_restore_compares",
            RESUME + "test_restore_rejects",
        ],
    ),
    "SIGINT, SIGTERM, SIGHUP, SIGSTOP": (
        (28, 6),
        [
            SIGNALS,
            RESUME + "test_sigterm",
            "tests/tools/test_demo.py::test_ctrl_c",
        ],
    ),
    "data, callbacks or loss that raise": (
        (28, 1),
        [
            "tests/training/test_training_faults.py::",
        ],
    ),
    "host callbacks that raise in a step": (
        (3, 1),
        [
            CALLBACKS + "test_run_reraises",
            CALLBACKS + "test_failed",
            CALLBACKS + "test_several",
            CALLBACKS + "test_callback",
            CALLBACKS + "test_threads",
        ],
    ),
    "NaN, and batches that change": (
        (24, 1),
        [
            COUNTED + "test_batch",
        ],
    ),
    "calls inside calls, threads, event loops": (
        (6, 1),
        [
            COUNTED + "test_call",
            COUNTED + "test_fit",
            CALLBACKS + "test_strategy_call",
        ],
    ),
    "mixes of launches and eager work": (
        (27, 3),
        [
            "tests/chaos/test_launch_mixes.py::",
            "tests/devices/test_launch.py::",
        ],
    ),
    "command line and environment": (
        (15, 5),
        [
            "tests/tools/test_main.py::test_full_disk",
            "tests/tools/test_main.py::test_closed_pipe",
            "tests/tools/test_main.py::test_invalid_number",
            "tests/tools/test_main.py::test_valid_number",
            "tests/tools/test_demo.py::test_impossible",
            "tests/chaos/test_environments.py::",
        ],
    ),
}


@functools.cache
def names_in(file: str) -> list[str]:
    """Returns the names of the tests in a file."""
    tree = ast.parse((fresh.ROOT / file).read_text())
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("test_")]


def test_each_class_of_faults_has_its_tests(subtests):
    for name, (_, beginnings) in CLASSES.items():
        for beginning in beginnings:
            with subtests.test(msg=f"{name}: {beginning}"):
                file, _, first = beginning.partition("::")
                assert any(test.startswith(first) for test in names_in(file))


def test_page_sums_up_the_round_by_hand():
    tried, failed = (sum(counts[i] for counts, _ in CLASSES.values()) for i in (0, 1))
    assert f"{tried} faults of {len(CLASSES)} classes were tried by hand; {failed} broke" in PAGE


def test_page_names_existing_tests_for_each_promise():
    promises = re.findall(r"^- \*\*([A-Z]\d)\*\* ", PAGE, re.M)
    assert len(promises) > 20
    named, file, promise = set(), "", ""
    (listed,) = re.findall(r"^## Tests\n\n```text\n(.*?)^```$", PAGE, re.DOTALL | re.M)
    for line in listed.splitlines():
        if line.startswith("tests/"):
            file = line
        else:
            *label, name = line.split()
            promise = label[0] if label else promise
            assert name in names_in(file), f"{file}::{name}"
            named.add(promise)
    assert sorted(named) == sorted(promises)
