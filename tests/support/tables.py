"""Tables whose rows are subtests of one test."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import pytest

_Table: TypeAlias = Callable[[], Iterator[tuple[str, dict[str, Any]]]]


class Made(Mapping[str, Any]):
    """A table of constructors that gives new objects each time a test runs."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Any:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def rows(
    names: str, table: Mapping[str, Any] | Iterable[Any] | Callable[[], Iterable[Any]]
) -> Callable[..., Any]:
    """Runs a test once per row, like `pytest.mark.parametrize`, but as subtests of one test.

    A row that fails does not end the others. The rows share the fixtures of the test, except for
    `monkeypatch`. Stacked tables give all combinations.

    Args:
        names: Arguments that a row gives, separated by commas.
        table: Values of the arguments, a mapping from the name of a row to them, or a function
            that returns either when the test runs.
    """
    keys = [name.strip() for name in names.split(",")]

    def labeled() -> Iterator[tuple[str, dict[str, Any]]]:
        given = table() if callable(table) else table
        is_named = isinstance(given, Mapping)
        for label, row in given.items() if is_named else ((_label(row), row) for row in given):
            yield label, dict(zip(keys, row if len(keys) > 1 else [row], strict=True))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        tables = [labeled, *getattr(test, "tables", [])]
        body = getattr(test, "body", test)

        parameters = inspect.signature(test).parameters
        asks = "subtests" in inspect.signature(body).parameters

        def each_row(subtests: pytest.Subtests, **fixtures: Any) -> None:
            for labels, arguments in _combinations(tables):
                with contextlib.ExitStack() as stack:
                    stack.enter_context(subtests.test(", ".join(labels)))
                    own = {**fixtures, **({"subtests": subtests} if asks else {})}
                    if "monkeypatch" in own:
                        own["monkeypatch"] = stack.enter_context(own["monkeypatch"].context())
                    body(**own, **arguments)

        fixtures = [p for name, p in parameters.items() if name not in (*keys, "subtests")]
        subtests = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        each_row.__dict__.update(test.__dict__, tables=tables, body=body)
        each_row.__dict__["__signature__"] = inspect.Signature(
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in fixtures] + [subtests]
        )
        each_row.__name__, each_row.__doc__ = test.__name__, test.__doc__
        each_row.__module__, each_row.__qualname__ = test.__module__, test.__qualname__
        return each_row

    return decorate


def _combinations(tables: Sequence[_Table]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yields all combinations of rows; the last table gives new objects for each one."""
    if not tables:
        yield [], {}
        return
    for label, arguments in tables[0]():
        for labels, others in _combinations(tables[1:]):
            yield [label, *labels], {**arguments, **others}


def _label(row: Any) -> str:
    return getattr(row, "__name__", None) or repr(row)


def mostly_slow(table: Iterable[Any], *quick: Any, nightly: Iterable[Any] = ()) -> list[Any]:
    """Returns lists for `parametrize`: these rows; the others, which are slow; nightly ones."""
    every, late = list(table), list(nightly)
    assert all(row in every for row in (*quick, *late)), "not a row of the table"
    night = [row for row in every if row in late]
    rest = [row for row in every if row not in quick and row not in night]
    lists = [
        pytest.param(list(quick), id="quick"),
        pytest.param(rest, id="rest", marks=pytest.mark.slow),
        pytest.param(night, id="night", marks=pytest.mark.nightly),
    ]
    return [each for each in lists if each.values[0]]


def mostly_nightly(table: Iterable[Any], *quick: Any) -> list[Any]:
    """Returns two lists for `parametrize`: these rows, and the others, which are nightly."""
    every = list(table)
    return mostly_slow(every, *quick, nightly=[row for row in every if row not in quick])
