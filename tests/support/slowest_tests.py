"""Prints the slowest tests of several runs of pytest: `.ci/run` calls it at its end.

python -m pytest --junitxml=reports/all.xml
python -m tests.support.slowest_tests reports [COUNT]
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

COUNT = 20


def durations(folder: Path) -> Iterator[tuple[float, str, str]]:
    """Yields the seconds of each test, with setup and teardown, its report and its name.

    A report that is incomplete, because its run was killed, is skipped.
    """
    for file in sorted(folder.glob("*.xml")):
        try:
            cases = list(ElementTree.parse(file).iter("testcase"))
        except ElementTree.ParseError:
            continue
        for case in cases:
            module = case.get("classname", "").replace(".", "/")
            yield float(case.get("time", 0)), file.stem, f"{module}::{case.get('name')}"


def lines(folder: Path, count: int = COUNT) -> list[str]:
    """Returns a line per test, the slowest first."""
    slowest = sorted(durations(folder), reverse=True)[:count]
    return [f"{secs:8.1f} s  {report:<24} {name}" for secs, report, name in slowest]


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m tests.support.slowest_tests FOLDER [COUNT]")
    print("\n".join(lines(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
