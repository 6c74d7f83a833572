"""`Scaling`: how a step scales, as a table, a picture and JSON."""

import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirror._src.explain.memory_report import MemoryReport, memory_table
from mirror._src.utils.tables import Table, new_figure


@dataclass(frozen=True)
class Row:
    """A step on some devices.

    Attributes:
        devices: their names.
        num_examples: in a step, of all replicas together; `None`: no batch is split over them.
        secs: of a step, for each round.
        bound: what takes the most, as `strategy.explain` finds it.
        verdict: what to change, in a sentence.
        memory: bytes per device; `None`: not measured.
    """

    devices: tuple[str, ...]
    num_examples: int | None
    secs: tuple[float, ...]
    bound: str
    verdict: str
    memory: MemoryReport | None = None

    @property
    def ms(self) -> float:
        """Milliseconds a step: the median."""
        return statistics.median(self.secs) * 1e3

    @property
    def ms_quartiles(self) -> tuple[float, float]:
        """Between these lies the middle half of the rounds."""
        return tuple(q * 1e3 for q in quartiles(self.secs))  # type: ignore[return-value]

    @property
    def examples_per_sec(self) -> float | None:
        """Of all replicas together."""
        return None if self.num_examples is None else self.num_examples / self.ms * 1e3


@dataclass(frozen=True)
class Scaling:
    """How a step scales over devices.

    Attributes:
        step: what was measured.
        weak: whether each replica, and not all together, has the same batch.
        steps: how many were measured on each count of devices.
        on_host: whether they are host devices, which share the machine's cores.
        rows: one for each count, the smallest first, against which the others are held.
    """

    step: str
    weak: bool
    steps: int
    on_host: bool
    rows: tuple[Row, ...]

    def speedups(self, row: Row) -> list[float]:
        """How many times as much work is done in a second, within each round.

        A step of 30 ms on one device, and of 10 ms on four: 3. With four times the batch: 12.
        """
        first = self.rows[0]
        work = (row.num_examples or 1) / (first.num_examples or 1)
        return [a / b * work for a, b in zip(first.secs, row.secs, strict=True)]

    def speedup(self, row: Row) -> float:
        """The median of the rounds."""
        return statistics.median(self.speedups(row))

    def ideal(self, row: Row) -> float:
        """What it would be if nothing were lost."""
        return len(row.devices) / len(self.rows[0].devices)

    def efficiency(self, row: Row) -> float:
        """What part of the ideal is reached."""
        return self.speedup(row) / self.ideal(row)

    @property
    def heading(self) -> str:
        """What was measured."""
        size = self.rows[0].num_examples
        per = f" of {size // len(self.rows[0].devices)}" if size and self.weak else ""
        whole = f" of {size}" if size and not self.weak else ""
        batch = f"the same batch{per} on each device" if self.weak else f"the same batch{whole}"
        kind = "weak" if self.weak else "strong"
        return f"{self.step}: {kind} scaling, {batch}; {self.steps} steps on each count of devices"

    @property
    def table(self) -> Table:
        """A row for each count of devices."""
        against = len(self.rows[0].devices)
        heading = "speed-up" if against == 1 else f"speed-up against {against}"
        columns = ("devices", "ms a step", "middle half", "examples/s", heading, "efficiency")
        return Table((*columns, "verdict"), map(self._cells, self.rows))

    def _cells(self, row: Row) -> tuple[str, ...]:
        low, high = row.ms_quartiles
        rate = row.examples_per_sec
        return (
            str(len(row.devices)),
            f"{row.ms:.2f}",
            f"{low:.2f} to {high:.2f}",
            "unknown" if rate is None else f"{rate:.0f}",
            f"{self.speedup(row):.2f}",
            f"{self.efficiency(row):.0%}",
            f"{row.bound}-bound",
        )

    @property
    def notes(self) -> list[str]:
        """What the figures mean, and what to change."""
        last = self.rows[-1]
        notes = [f"On {len(last.devices)} devices: {last.verdict}"]
        if self.on_host and len(last.devices) > 1:
            notes.append(
                f"Host devices share the {os.cpu_count()} cores of this machine: more of them are "
                "not faster."
            )
        return notes

    @property
    def memory_table(self) -> Table | None:
        """Bytes per device, a row for each count of devices; `None`: not measured."""
        reports = [row.memory for row in self.rows if row.memory is not None]
        return memory_table(reports) if reports else None

    def __str__(self) -> str:
        memory = self.memory_table
        parts = [self.heading, str(self.table), "\n".join(self.notes)]
        if memory is not None:
            parts.append(f"bytes per device:\n{memory}")
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, text and lists, for JSON."""
        return {
            "step": self.step,
            "scaling": "weak" if self.weak else "strong",
            "steps": self.steps,
            "on_host": self.on_host,
            "cores": os.cpu_count(),
            "rows": [self._row_to_dict(row) for row in self.rows],
            "notes": self.notes,
        }

    def _row_to_dict(self, row: Row) -> dict[str, Any]:
        return {
            "devices": list(row.devices),
            "num_examples": row.num_examples,
            "ms": row.ms,
            "ms_quartiles": list(row.ms_quartiles),
            "examples_per_sec": row.examples_per_sec,
            "speedup": self.speedup(row),
            "speedup_quartiles": list(quartiles(self.speedups(row))),
            "efficiency": self.efficiency(row),
            "bound": row.bound,
            "verdict": row.verdict,
            "memory": None if row.memory is None else row.memory.to_dict(),
        }

    def plot(self, file: str | Path | None = None) -> Any:
        """Draws the speed-up over the devices, and the ideal line.

        Args:
            file: where to write it, too; its ending says the format.

        Returns:
            A `matplotlib.figure.Figure`, which a notebook shows; no window is opened.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        figure = new_figure(6, 4)
        axes, counts = figure.subplots(), [len(row.devices) for row in self.rows]
        found = [self.speedup(row) for row in self.rows]
        spans = [quartiles(self.speedups(row)) for row in self.rows]
        below = [max(x - low, 0.0) for x, (low, _) in zip(found, spans, strict=True)]
        above = [max(high - x, 0.0) for x, (_, high) in zip(found, spans, strict=True)]
        axes.plot(counts, [self.ideal(row) for row in self.rows], "--", color="gray", label="ideal")
        axes.errorbar(counts, found, [below, above], fmt="o-", capsize=3, label="measured")
        axes.set_xticks(counts)
        axes.set_xlabel("devices")
        axes.set_ylabel(self.table.headings[4])
        axes.set_title(f"{self.step}, {'weak' if self.weak else 'strong'} scaling")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        if file is not None:
            figure.savefig(file, dpi=120)
        return figure


def quartiles(values: tuple[float, ...] | list[float]) -> tuple[float, float]:
    """The bounds of the middle half; one value alone is both.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 4.0)
    """
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third
