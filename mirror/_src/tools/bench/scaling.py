"""`Scaling`: results of `mirror bench`, as a table, a picture and JSON."""

import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirror._src.base.measure import quartiles
from mirror._src.base.tables import Table, new_figure
from mirror._src.base.terminal import wrap
from mirror._src.inspection.memory_report import MemoryReport, memory_table


@dataclass(frozen=True)
class Row:
    """Measurements of a step on one number of devices.

    Attributes:
        devices: Names of the devices.
        num_examples: Size of the global batch; `None` if no batch is split across the replicas.
        secs: Seconds per step in every round.
        bound: The most expensive part of the step, according to `strategy.explain`.
        verdict: A sentence that says what to change.
        memory: Bytes per device; `None` if not measured.
    """

    devices: tuple[str, ...]
    num_examples: int | None
    secs: tuple[float, ...]
    bound: str
    verdict: str
    memory: MemoryReport | None = None

    @property
    def ms(self) -> float:
        """Median milliseconds per step."""
        return statistics.median(self.secs) * 1e3

    @property
    def ms_quartiles(self) -> tuple[float, float]:
        """First and third quartile of the milliseconds per step."""
        first, third = quartiles(self.secs)
        return first * 1e3, third * 1e3

    @property
    def examples_per_sec(self) -> float | None:
        """Examples per second of all replicas together."""
        return None if self.num_examples is None else self.num_examples / self.ms * 1e3


@dataclass(frozen=True)
class Scaling:
    """Measurements of a step on increasing numbers of devices.

    Attributes:
        step: Name of the step.
        weak: Whether the batch is the same per replica, rather than in total.
        steps: Number of steps measured on each number of devices.
        on_host: Whether the devices are host devices, which share the machine's cores.
        rows: One row per number of devices, in increasing order. The first one is the baseline.
    """

    step: str
    weak: bool
    steps: int
    on_host: bool
    rows: tuple[Row, ...]

    def speedups(self, row: Row) -> list[float]:
        """Returns the speed-up over the baseline in every round: the ratio of work per second.

        If a step takes 30 ms on one device and 10 ms on four, the speed-up is 3. With four times
        the batch on four devices, it is 12.
        """
        baseline = self.rows[0]
        work = (row.num_examples or 1) / (baseline.num_examples or 1)
        return [a / b * work for a, b in zip(baseline.secs, row.secs, strict=True)]

    def speedup(self, row: Row) -> float:
        """Returns the median speed-up."""
        return statistics.median(self.speedups(row))

    def ideal(self, row: Row) -> float:
        """Returns the speed-up of perfect scaling."""
        return len(row.devices) / len(self.rows[0].devices)

    def efficiency(self, row: Row) -> float:
        """Returns the speed-up as a fraction of the ideal one."""
        return self.speedup(row) / self.ideal(row)

    @property
    def heading(self) -> str:
        """One line that says what was measured."""
        size, num_devices = self.rows[0].num_examples, len(self.rows[0].devices)
        if self.weak:
            batch = f"batch{f' of {size // num_devices}' if size else ''} per device"
        else:
            batch = f"global batch{f' of {size}' if size else ''}"
        kind = "weak" if self.weak else "strong"
        return f"{self.step}: {kind} scaling, {batch}; {self.steps} steps per number of devices"

    @property
    def table(self) -> Table:
        """One row per number of devices."""
        least = len(self.rows[0].devices)
        speedup = "speed-up" if least == 1 else f"speed-up over {least}"
        columns = ("devices", "ms/step", "quartiles", "examples/s", speedup, "efficiency")
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
        """Sentences that explain the figures."""
        last = self.rows[-1]
        notes = [f"On {len(last.devices)} devices: {last.verdict}"]
        if self.on_host and len(last.devices) > 1:
            notes.append(
                f"Host devices share the {os.cpu_count()} cores of this machine, so adding devices "
                "does not speed up the step."
            )
        return notes

    @property
    def memory_table(self) -> Table | None:
        """Bytes per device, one row per number of devices; `None` if not measured."""
        reports = [row.memory for row in self.rows if row.memory is not None]
        return memory_table(reports) if reports else None

    def __str__(self) -> str:
        memory = self.memory_table
        parts = [self.heading, str(self.table), "\n".join(self.notes)]
        if memory is not None:
            parts.append(f"bytes per device:\n{memory}")
        return wrap("\n\n".join(parts))

    def to_dict(self) -> dict[str, Any]:
        """Returns the results as numbers, text and lists, for JSON."""
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
        """Draws the speed-up against the number of devices, with the ideal line.

        Args:
            file: File to save the picture to. Its suffix selects the format.

        Returns:
            A `matplotlib.figure.Figure`. Notebooks display it; no window opens.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        figure = new_figure(6, 4)
        axes, counts = figure.subplots(), [len(row.devices) for row in self.rows]
        speedups = [self.speedup(row) for row in self.rows]
        spans = [quartiles(self.speedups(row)) for row in self.rows]
        below = [max(x - low, 0.0) for x, (low, _) in zip(speedups, spans, strict=True)]
        above = [max(high - x, 0.0) for x, (_, high) in zip(speedups, spans, strict=True)]
        axes.plot(counts, [self.ideal(row) for row in self.rows], "--", color="gray", label="ideal")
        axes.errorbar(counts, speedups, [below, above], fmt="o-", capsize=3, label="measured")
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
