"""The tables of the migration pages, which are in `mirror/_src/base/other_names.md`.

Example:

    python -m tests.support.name_tables --write  # updates docs/from-*.md
"""

import sys
from typing import NamedTuple

from tests.support import fresh, inside

DOCS = fresh.ROOT / "docs"
TABLES = inside.name_tables()


def shown(table: NamedTuple) -> str:
    """Returns the table on its page that has the same header."""
    page = (DOCS / table.page).read_text()
    start = page.index(table.text.partition("\n")[0] + "\n")
    lines = page[start:].splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return "".join(lines[:end])


def write() -> None:
    """Replaces the tables on the pages."""
    for table in TABLES:
        page = DOCS / table.page
        page.write_text(page.read_text().replace(shown(table), table.text))


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        sys.exit("usage: python -m tests.support.name_tables --write")
