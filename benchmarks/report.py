"""Tables of strings, and formatting of numbers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks import plan
from benchmarks.record import Done
from benchmarks.stats import Estimate, Times, best_of, flat, median

NONE = "-"  # not measured


@dataclass(frozen=True)
class Table:
    """A titled table of strings."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """Returns the table aligned for a terminal."""
        widths = [max(map(len, column)) for column in zip(self.headers, *self.rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(pairs))
            for pairs in (list(zip(row, widths, strict=True)) for row in [self.headers, *self.rows])
        ]
        return "\n".join([self.title, lines[0], "-" * len(lines[0]), *lines[1:]])

    def markdown(self) -> str:
        """Returns the table in Markdown."""
        rule = ["---", *["---:"] * (len(self.headers) - 1)]
        lines = ["| " + " | ".join(row) + " |" for row in [self.headers, rule, *self.rows]]
        return "\n".join([f"**{self.title}**", "", *lines])


def measured(times: Times, name: str) -> bool:
    """Whether the contender was measured."""
    return name in times and bool(flat(times[name]))


def best_by_hand(times: Times, num_devices: int) -> str:
    """Returns the best hand-written contender; empty if none was measured."""
    names = [name for name in plan.by_hand(num_devices) if measured(times, name)]
    return best_of(times, names) if names else ""


def ms(times: Times, name: str) -> str:
    """Returns the contender's median in milliseconds."""
    return f"{median(times[name]):.3f}" if measured(times, name) else NONE


def with_interval(value: Estimate) -> str:
    """Returns an estimate with its interval: `1.02 [0.99, 1.04]`."""
    return f"{value.median:.2f} [{value.low:.2f}, {value.high:.2f}]"


def compared(
    times: Times,
    compare: Callable[[Times, str, str], Estimate],
    name: str,
    base: str,
    limit: float | None = None,
) -> list[str]:
    """Returns the cells of a comparison: the estimate and, if there is a limit, the verdict."""
    if not (measured(times, name) and measured(times, base)):
        return [NONE] if limit is None else [NONE, NONE]
    value = compare(times, name, base)
    cell = with_interval(value)
    return [cell] if limit is None else [cell, value.at_most(limit)]


def by_model(done: Iterable[Done]) -> list[tuple[str, int, dict]]:
    """Returns model, number of devices and result of all parts, grouped by model."""
    parts = [(name, d.job.devices, part) for d in done for name, part in d.result.items()]
    order = list(dict.fromkeys(name for name, _, _ in parts))
    return sorted(parts, key=lambda part: order.index(part[0]))
