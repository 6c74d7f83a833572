"""The tables of the migration pages, which are `mirror/_src/base/migration_tables.py`.

Example:

    python -m tests.support.name_tables --write  # updates docs/from-*.md
"""

import sys
from typing import NamedTuple

from tests.support import fresh, inside

DOCS = fresh.ROOT / "docs"
TABLES = inside.name_tables().TABLES
NO_EQUIVALENT = inside.name_tables().NO_EQUIVALENT


def text_of(table: NamedTuple) -> str:
    """Returns a table as Markdown."""
    rows = [(table.library, table.ours), ("---", "---"), *table.rows]
    return "".join(f"| {theirs} | {_with_dash(ours)} |\n" for theirs, ours in rows)


def _with_dash(ours: str) -> str:
    reason = ours.removeprefix(NO_EQUIVALENT)
    return ours if reason == ours else f"\N{EN DASH} {reason}"


def shown(table: NamedTuple) -> str:
    """Returns the table on its page that has the same header."""
    page = (DOCS / table.page).read_text()
    header = f"| {table.library} | {table.ours} |\n"
    start = page.index(header)
    lines = page[start:].splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return "".join(lines[:end])


def write() -> None:
    """Replaces the tables on the pages."""
    for table in TABLES:
        page = DOCS / table.page
        page.write_text(page.read_text().replace(shown(table), text_of(table)))


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        sys.exit("usage: python -m tests.support.name_tables --write")
