"""Finds the tests that take longest, which run with `--slow` only: see `tests/slow_tests.txt`.

    python -m pytest --slow --junitxml=report.xml
    python -m tests.durations report.xml [another.xml ...]

The longest of a test's durations counts: which of two tests compiles what both need, may differ.
A test that takes over four seconds is slow. Of a table, its quickest row is not, and all others are
that take over half a second: each law stays in the suite, if not for each of its rows.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

MOST_SECONDS = 4.0
MOST_SECONDS_OF_A_ROW = 0.5
SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")


def slow_tests(seconds: dict[str, float]) -> list[str]:
    """The ids of those that take too long, of all tests with their durations."""
    tables = defaultdict(list)
    for test, duration in seconds.items():
        tables[test.split("[")[0]].append((duration, test))
    slow = []
    for rows in tables.values():
        (quickest, first), *others = sorted(rows)
        slow += [first] if quickest > MOST_SECONDS else []
        slow += [test for duration, test in others if duration > MOST_SECONDS_OF_A_ROW]
    return sorted(slow)


def read_reports(reports: Iterable[str]) -> dict[str, float]:
    """The most seconds that each test took, with what it set up and took down."""
    found: dict[str, float] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            test = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            found[test] = max(float(case.attrib["time"]), found.get(test, 0.0))
    return found


if __name__ == "__main__":
    SLOW_TESTS.write_text("".join(f"{test}\n" for test in slow_tests(read_reports(sys.argv[1:]))))
