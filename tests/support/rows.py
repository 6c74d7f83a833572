"""A table as one test."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def each(
    names: str | Sequence[str], rows: Iterable[Any] | Callable[[], Iterable[Any]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test once per row, like `pytest.mark.parametrize`, as one test with `subtests`.

    A row that fails does not end the others. Rows share the fixtures, except for `monkeypatch`.

    Args:
        names: Names of the arguments.
        rows: Their values, or a function that returns them when the test runs.
    """
    is_single = isinstance(names, str) and "," not in names
    split = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        kept = {k: v for k, v in signature.parameters.items() if k not in split}
        asks = "subtests" in kept
        added = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        kept.setdefault("subtests", added)

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            subtests = fixtures["subtests"] if asks else fixtures.pop("subtests")
            for row in rows() if callable(rows) else rows:
                values = dict(zip(split, (row,) if is_single else row, strict=True))
                with contextlib.ExitStack() as stack:
                    stack.enter_context(subtests.test(msg=", ".join(map(str, values.values()))))
                    own = dict(fixtures)
                    if "monkeypatch" in own:
                        own["monkeypatch"] = stack.enter_context(own["monkeypatch"].context())
                    test(**own, **values)

        run.__signature__ = signature.replace(parameters=list(kept.values()))
        return run

    return decorate
