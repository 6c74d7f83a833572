"""Advice for names of TensorFlow, Keras and PyTorch, from the tables of the migration pages."""

import functools
import re

from mirror._src.base.migration_tables import NO_EQUIVALENT, TABLES

_OWNERS = {
    "strategy": "strategy",
    "replica_context": "replica_context",
    "model": "trainer",
    "variable": "variable",
    "callbacks": "mirror.callbacks",
}
_NAME = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`]*\))?`")


@functools.cache
def advice() -> dict[tuple[str, str], str]:
    """Returns the advice for each name of another library, by owner and name.

    The owners are `mirror` and its modules, and "strategy", "replica_context", "trainer" and
    "variable" for the attributes of objects.

    >>> advice()["strategy", "experimental_local_results"]
    'Instead of strategy.experimental_local_results, use strategy.local_results.'
    """
    found: dict[tuple[str, str], str] = {}
    for table in TABLES:
        for theirs, ours in table.rows:
            for full_name in _NAME.findall(theirs):
                head, _, rest = full_name.partition(".")
                is_object = bool(rest) and head in _OWNERS
                owner = _OWNERS[head] if is_object else table.owner
                shown = full_name if is_object else table.prefix + full_name
                parts = full_name.split(".")
                found.setdefault((owner, parts[-1]), _sentence(shown, ours))
    return found


def _sentence(theirs: str, ours: str) -> str:
    text = ours.replace("`", "")
    if text.startswith(NO_EQUIVALENT):
        return f"There is no equivalent of {theirs}: {text.removeprefix(NO_EQUIVALENT)}."
    if text.startswith("pass "):
        return f"Instead of {theirs}: {text}."
    return f"Instead of {theirs}, use {text}."
