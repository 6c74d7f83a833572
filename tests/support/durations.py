"""Finds the tests that take longest, which run with `--slow` only: see `tests/slow_tests.txt`.

    python -m pytest --slow --junitxml=report.xml
    python -m tests.support.durations report.xml [another.xml ...]

The longest of a test's durations counts, because either of two tests may be the one that compiles
what both need.
A test that takes over two seconds is slow, and so are the rows of a table that take over 0.3
seconds, but for the quickest one: most laws stay in the suite with some of their rows.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

MOST_SECONDS = 2.0
MOST_SECONDS_OF_A_ROW = 0.3
SLOW_TESTS = Path(__file__).parents[1] / "slow_tests.txt"


def slow_tests(seconds: dict[str, float]) -> list[str]:
    """Returns the ids of the tests that take too long."""
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
    """Returns the longest duration of each test, with setup and teardown."""
    found: dict[str, float] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("skipped") is not None:
                continue
            test = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            found[test] = max(float(case.attrib["time"]), found.get(test, 0.0))
    return found


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("usage: python -m tests.support.durations report.xml [another.xml ...]")
    found = slow_tests(read_reports(sys.argv[1:]))
    SLOW_TESTS.write_text("".join(f"{test}\n" for test in found))
