"""Names of TensorFlow, Keras and PyTorch, and guesses; `other_names.md` gives the replacements."""

import functools
import importlib.resources
import re
from typing import NamedTuple


class NameTable(NamedTuple):
    """A table of `other_names.md`.

    Attributes:
        page: Name of the page that shows the table, or "".
        owner: Module or object whose names it explains, such as "mirror.config" or "strategy"; for
            arguments, "devices=".
        prefix: Prefix of the names in the first column.
        text: The table.
        rows: The cells of every row. Without a page, the second cell is a sentence.
    """

    page: str
    owner: str
    prefix: str
    text: str
    rows: list[tuple[str, str]]


_OWNERS = {
    "strategy": "strategy",
    "replica_context": "replica_context",
    "model": "trainer",
    "variable": "variable",
    "callbacks": "mirror.callbacks",
}
_NAME = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`]*\))?`")
_DASH = "\N{EN DASH} "


def name_tables() -> list[NameTable]:
    """Returns the tables, guesses first."""
    text = importlib.resources.files(__package__).joinpath("other_names.md").read_text("utf-8")
    tables = []
    for section in text.split("\n## ")[1:]:
        heading, _, table = section.partition("\n\n")
        page, _, names = heading.rpartition(": ")
        owner, _, prefix = names.partition(", ")
        lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:] if line]
        rows = [(theirs, ours) for theirs, ours in lines]
        tables.append(NameTable(page, owner, prefix, table.strip() + "\n", rows))
    return tables


@functools.cache
def advice() -> dict[tuple[str, str], str]:
    """Returns the advice for each name of another library, by owner and name.

    The owners are `mirror` and its modules, "strategy", "replica_context", "trainer" and "variable"
    for the attributes of objects, and parameters such as "devices=" for arguments.

    >>> advice()["strategy", "experimental_local_results"]
    'Instead of strategy.experimental_local_results, use strategy.local_results.'
    """
    found: dict[tuple[str, str], str] = {}
    for table in name_tables():
        for theirs, ours in table.rows:
            for full_name in _NAME.findall(theirs):
                head, _, name = full_name.rpartition(".")
                head = head.partition(".")[0]
                owner = _OWNERS.get(head, table.owner)
                shown = full_name if head in _OWNERS else table.prefix + full_name
                text = ours.replace("`", "")
                found.setdefault((owner, name), _sentence(shown, text) if table.page else text)
    return found


def _sentence(theirs: str, ours: str) -> str:
    if ours.startswith(_DASH):
        return f"There is no equivalent of {theirs}: {ours.removeprefix(_DASH)}."
    if ours.startswith("pass "):
        return f"Instead of {theirs}: {ours}."
    return f"Instead of {theirs}, use {ours}."
