"""Prints the tables and draws the picture of a saved run.

python -m benchmarks.tables FILE [--markdown] [--picture FILE.png]
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import step_tables, suite_tables
from benchmarks.picture import draw
from benchmarks.record import Done, Record
from benchmarks.report import Table

_MAKERS: tuple[tuple[str, Callable[[Sequence[Done]], Table]], ...] = (
    ("own", step_tables.own_summary),
    ("own", step_tables.own_table),
    ("own", step_tables.rivals_table),
    ("steps", step_tables.paired_table),
    ("dispatch", suite_tables.dispatch_table),
    ("deep", suite_tables.deep_table),
    ("rows", suite_tables.rows_table),
    ("staged", suite_tables.staged_table),
    ("trainer", suite_tables.trainer_table),
    ("first", suite_tables.first_table),
    ("starts", suite_tables.starts_table),
    ("memory", suite_tables.memory_table),
    ("slices", suite_tables.slices_table),
)


def tables(record: Record) -> list[Table]:
    """Returns the tables of all measured suites, and of failed measurements."""
    results = []
    for on_host, (kind, make) in itertools.product((True, False), _MAKERS):
        done = [d for d in record.done if d.job.kind == kind and d.result]
        done = [d for d in done if d.job.on_host is on_host]
        if done and (table := make(done)).rows:
            if not on_host:
                table = replace(table, title=f"{table.title}, on {done[0].device}")
            results.append(table)
    lost = step_tables.lost_table(record.done)
    return [*results, lost] if lost.rows else results


def text(record: Record, *, markdown: bool) -> str:
    """Returns the title and all tables."""
    shown = [table.markdown() if markdown else table.text() for table in tables(record)]
    return "\n\n".join([record.title, *shown])


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables, and draws the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("file", type=Path, help="written by `python -m benchmarks --json FILE`")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="also draw the picture")
    options = parser.parse_args(argv)
    record = Record.load(options.file)
    print(text(record, markdown=options.markdown))
    if options.picture:
        draw(record, options.picture)


if __name__ == "__main__":
    main()
