"""Counts the tests of each class of faults, for docs/reliability.md.

    python -m tests.support.fault_counts           # prints the table
    python -m tests.support.fault_counts --write   # also writes it into the page

A test is a row of a table: a fault at a place, on an executor or with a policy.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import NamedTuple

from tests.support import fresh

PAGE = fresh.ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->"
_HEAD = "| fault | tests | in the first round: tried | failed |\n| --- | --- | --- | --- |\n"
_POSITIONS = r"\[(step|epoch|epoch_step|passes|samples|.*(position|meter|history|callbacks|state))"

CHECKPOINTS = "tests/training/test_checkpoints.py::"
RESUME = "tests/training/test_resume.py::"
FAULTS = "tests/chaos/test_checkpoint_faults.py::"
DISKS = "tests/chaos/test_disks.py::"
SIGNALS = "tests/chaos/test_signals.py::"
COUNTED = "tests/chaos/test_counted.py::"
CALLBACKS = "tests/executors/test_callbacks.py::"


class Class(NamedTuple):
    """A class of faults.

    Attributes:
        name: Its name on the page.
        tests: Regular expressions for the beginnings of the ids of its tests.
        tried: Number of faults that were tried before there were tests for them.
        failed: Number of these that broke a promise.
    """

    name: str
    tests: tuple[str, ...]
    tried: int
    failed: int


CLASSES = (
    Class(
        "`kill -9` during a save",
        (
            "tests/chaos/test_kills.py::test_kill_in",
            CHECKPOINTS + "test_killed_process",
            RESUME + "test_killed_training",
        ),
        100,
        0,
    ),
    Class("clock that jumps or stands still", (FAULTS + "test_order_does_not",), 4, 4),
    Class(
        "power failure during or after a save",
        (FAULTS + "test_directory_gets", FAULTS + "test_saved_checkpoint_survives"),
        12,
        6,
    ),
    Class(
        "two processes, one directory",
        (
            FAULTS + "test_second_process",
            FAULTS + "test_other_process",
            FAULTS + "test_directory_without_locks",
        ),
        2,
        2,
    ),
    Class(
        "several stores in one process",
        (
            FAULTS + "test_two_stores",
            FAULTS + "test_stores_in_threads",
            FAULTS + "test_two_checkpoint_callbacks",
        ),
        2,
        2,
    ),
    Class(
        "disk that is full, read-only, gone or replaced",
        (
            DISKS + "test_disk_",
            DISKS + "test_store_is_opened",
            DISKS + "test_training_continues",
            DISKS + "test_directory_of_another_user",
            FAULTS + "test_directory_that_disappears",
            CHECKPOINTS + "test_save_reports",
            RESUME + "test_training_survives",
        ),
        14,
        3,
    ),
    Class(
        "odd names, paths out of the directory, links and files in the way",
        (
            DISKS + "test_directory_with_an_odd_name",
            DISKS + "test_directory_whose_name",
            DISKS + "test_name_of_an_array",
            DISKS + "test_something_else",
            DISKS + "test_directory_is_a_link",
            FAULTS + "test_link",
            CHECKPOINTS + "test_store_does_not_overwrite",
        ),
        23,
        4,
    ),
    Class(
        "damaged and forged checkpoint files",
        (
            rf"{FAULTS}test_restore_changes_everything_or_nothing(?!{_POSITIONS})",
            FAULTS + "test_arrays_",
            CHECKPOINTS + "test_load_",
            CHECKPOINTS + "test_store_repairs",
        ),
        39,
        2,
    ),
    Class(
        "restoring another model, position or callback state",
        (
            rf"{FAULTS}test_restore_changes_everything_or_nothing{_POSITIONS}",
            FAULTS + "test_foreign_state",
            FAULTS + "test_restore_compares",
            RESUME + "test_restore_rejects",
        ),
        17,
        10,
    ),
    Class(
        "SIGINT, SIGTERM, SIGHUP, SIGSTOP",
        (SIGNALS, RESUME + "test_sigterm", "tests/cli/test_demo.py::test_ctrl_c"),
        28,
        6,
    ),
    Class(
        "data, callbacks or loss that raise",
        ("tests/training/test_training_faults.py::",),
        28,
        1,
    ),
    Class(
        "host callbacks that raise in a step",
        (CALLBACKS + "test_run_reraises", CALLBACKS + "test_(failed|several|callback|threads)"),
        3,
        1,
    ),
    Class("NaN, and batches that change", (COUNTED + "test_batch",), 24, 1),
    Class(
        "calls inside calls, threads, event loops",
        (COUNTED + "test_(call|fit)", CALLBACKS + "test_strategy_call"),
        6,
        1,
    ),
    Class(
        "mixes of launches and eager work",
        ("tests/chaos/test_launch_mixes.py::", "tests/devices/test_launch.py::"),
        27,
        3,
    ),
    Class(
        "command line and environment",
        (
            "tests/cli/test_main.py::test_(full_disk|closed_pipe|invalid_number|valid_number)",
            "tests/cli/test_demo.py::test_impossible",
            "tests/chaos/test_environments.py::",
        ),
        15,
        5,
    ),
)


def file_of(pattern: str) -> str:
    return pattern.split("::")[0]


def is_there(pattern: str) -> bool:
    return (fresh.ROOT / file_of(pattern)).exists()


def collected() -> list[str]:
    """Returns the ids of all tests in the files of the classes."""
    files = sorted({file_of(p) for each in CLASSES for p in each.tests if is_there(p)})
    options = ["-q", "-n", "0", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=fresh.ROOT,
        env={**fresh.INHERITED, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode:
        raise RuntimeError(f"pytest could not collect the tests:\n{done.stdout}{done.stderr}")
    return [line for line in done.stdout.splitlines() if line.startswith("tests/")]


def counts(tests: Iterable[str]) -> dict[str, int]:
    """Returns the number of tests by the name of their class."""
    tests = list(tests)
    return {
        each.name: sum(any(re.match(p, test) for p in each.tests) for test in tests)
        for each in CLASSES
    }


def table(found: dict[str, int]) -> str:
    """Returns the table of the page, without classes whose tests are not in this tree."""
    rows = [(each.name, found[each.name], each.tried, each.failed) for each in CLASSES]
    rows = [row for row in rows if row[1]]
    total = ("**all**", *(sum(column) for column in list(zip(*rows, strict=True))[1:]))
    lines = [" | ".join(map(str, row)) for row in (*rows, total)]
    return _HEAD + "".join(f"| {line} |\n" for line in lines)


def parts_of_page() -> tuple[str, str, str]:
    """Returns the text of the page before the table, the table, and the text after."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    shown, _, after = rest.partition(END)
    return before, shown, after


if __name__ == "__main__":
    text = table(counts(collected()))
    print(text, end="")
    if "--write" in sys.argv[1:]:
        before, _, after = parts_of_page()
        PAGE.write_text(before + BEGIN + text + END + after)
