"""`rows`: all rows run, each with its own `monkeypatch`, and a row that fails is reported."""

import contextlib
import inspect
import os

from tests.support.tables import rows


class Subtests:
    """Keeps the outcomes of the rows, as the fixture of pytest does."""

    def __init__(self):
        self.outcomes = []

    @contextlib.contextmanager
    def test(self, msg):
        try:
            yield
        except AssertionError:
            self.outcomes.append((msg, "failed"))
        else:
            self.outcomes.append((msg, "passed"))


def test_all_rows_run_with_the_fixtures():
    calls, subtests = [], Subtests()

    @rows("a, b", lambda: [(1, 2), (3, 4), (5, 6)])
    def check(a, fixture, b):
        calls.append((a, fixture, b))
        assert a != 3

    assert list(inspect.signature(check).parameters) == ["fixture", "subtests"]
    check(fixture="x", subtests=subtests)
    assert calls == [(1, "x", 2), (3, "x", 4), (5, "x", 6)]
    assert subtests.outcomes == [("(1, 2)", "passed"), ("(3, 4)", "failed"), ("(5, 6)", "passed")]


def test_tables_may_be_multiplied():
    calls, subtests = [], Subtests()

    @rows("name", {"first": "x", "second": "y"})
    @rows("number", lambda: iter([1, 2]))
    def check(name, number, subtests):
        with subtests.test("inner"):
            calls.append((name, number))

    check(subtests=subtests)
    assert [msg for msg, _ in subtests.outcomes if msg != "inner"] == [
        *("first, 1", "first, 2"),
        *("second, 1", "second, 2"),
    ]
    assert calls == [("x", 1), ("x", 2), ("y", 1), ("y", 2)]


def test_rows_have_their_own_monkeypatch(monkeypatch):
    monkeypatch.setenv("MIRROR_ROW", "before")

    @rows("value", ["1", "2"])
    def check(value, monkeypatch):
        assert os.environ["MIRROR_ROW"] == "before"
        monkeypatch.setenv("MIRROR_ROW", value)

    subtests = Subtests()
    check(monkeypatch=monkeypatch, subtests=subtests)
    assert subtests.outcomes == [("'1'", "passed"), ("'2'", "passed")]
