"""Checks of error messages that do not depend on their wording."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest


def assert_message(
    error: BaseException | pytest.ExceptionInfo[Any] | str,
    *,
    names: Iterable[str] | str = (),
    values: Iterable[object] | object = (),
    fix: Iterable[str] | str = (),
) -> None:
    """Checks that a message contains these texts, in any order.

    Args:
        error: The exception, what `pytest.raises` gives, or the text itself.
        names: Names that the user wrote: arguments, functions, whole paths of leaves; "kernel" is
            not in "model.kernel".
        values: What was found or is required. A number matches as a whole: 3 is not in "31".
        fix: Code or names of options from the line that fixes it; "run" is in "strategy.run(...)".
    """
    if isinstance(error, pytest.ExceptionInfo):
        error = error.value
    text = " ".join(str(error).split())  # wrapped or not
    whole, parts = [*_texts(names), *_texts(values)], _texts(fix)
    assert whole or parts, "nothing to look for"
    missing = [each for each in whole if not _is_in(each, text, r"(?<![\w.])")]
    missing += [each for each in parts if not _is_in(each, text, r"(?<!\w)")]
    assert not missing, f"{missing} missing in: {text}"


@contextlib.contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...],
    *,
    names: Iterable[str] | str = (),
    values: Iterable[object] | object = (),
    fix: Iterable[str] | str = (),
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """`pytest.raises` and then `assert_message`."""
    with pytest.raises(kind) as caught:
        yield caught
    assert_message(caught, names=names, values=values, fix=fix)


def refused(
    kind: type[BaseException] | tuple[type[BaseException], ...],
    call: Callable[..., object],
    *parts: str,
) -> None:
    """Checks that a call raises an error whose message contains these parts, as they stand."""
    with pytest.raises(kind) as caught:
        call()
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, (missing, str(caught.value))


def _texts(wanted: Any) -> list[str]:
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        return [str(wanted)]
    return [" ".join(str(each).split()) for each in wanted]


def _is_in(wanted: str, text: str, before: str) -> bool:
    before = before if re.match(r"\w", wanted) else ""
    after = r"(?!\w|\.\d)" if re.search(r"\w$", wanted) else ""
    return re.search(before + re.escape(wanted) + after, text) is not None
