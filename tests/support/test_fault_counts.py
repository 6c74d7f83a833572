"""The page on reliability names the classes of faults, and at most the tests that there are."""

import re

import pytest

from tests.support import fault_counts, fresh


@pytest.fixture(scope="module")
def tests() -> list[str]:
    return fault_counts.collected()


def test_each_class_has_its_tests(tests):
    """At least as many as faults were tried before, and none is in two classes."""
    patterns = [p for each in fault_counts.CLASSES for p in each.tests if fault_counts.is_there(p)]
    unused = [p for p in patterns if not any(re.match(p, test) for test in tests)]
    assert not unused, f"no test matches {unused}"
    for test in tests:
        matching = [p for p in patterns if re.match(p, test)]
        assert len(matching) <= 1, f"{test} matches {matching}"
    found = fault_counts.counts(tests)
    for each in fault_counts.CLASSES:
        if all(map(fault_counts.is_there, each.tests)):
            assert found[each.name] >= each.tried, each.name


def test_page_claims_no_more_tests_than_there_are(tests):
    _, shown, _ = fault_counts.parts_of_page()
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \| (\d+) \|$", shown, re.MULTILINE)
    *rows, total = [(name, int(claimed)) for name, claimed, *_ in rows]
    found = fault_counts.counts(tests)
    update = "run python -m tests.support.fault_counts --write"
    assert [name for name, _ in rows] == [name for name in found if found[name]], update
    for name, claimed in rows:
        assert claimed <= found[name], f"{name}: {update}"
    assert rows
    assert total == ("**all**", sum(claimed for _, claimed in rows))


def test_page_names_tests_that_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", fault_counts.PAGE.read_text())
    assert len(named) > 20
    missing = [
        f"{file}::{name}"
        for file, name in named
        if f"\ndef {name}(" not in (fresh.ROOT / file).read_text()
    ]
    assert not missing
