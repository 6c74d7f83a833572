"""`Estimate`: bytes per device of a step on 1 to n devices, as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from mirror._src.base.errors import bytes_in_words, counted
from mirror._src.base.tables import Table
from mirror._src.base.terminal import wrap
from mirror._src.inspection.memory import memory_report
from mirror._src.inspection.memory_report import MemoryReport, memory_table
from mirror._src.strategy.strategy import Strategy
from mirror._src.tools.bench.workload import MakeWorkload
from mirror._src.tools.estimate.abstract import escapes_explained, without_arrays


@dataclass(frozen=True)
class Row:
    """Estimate of a step on one number of devices.

    Attributes:
        report: Bytes per device.
        allocated_bytes: Bytes that the user's function allocated on devices.
    """

    report: MemoryReport
    allocated_bytes: int


@dataclass(frozen=True)
class Estimate:
    """Bytes per device of a step that was not executed.

    Attributes:
        step: Name of the step.
        weak: Whether the batch is the same per replica, rather than in total.
        rows: One row per number of devices, in increasing order.
    """

    step: str
    weak: bool
    rows: tuple[Row, ...]

    @property
    def reports(self) -> list[MemoryReport]:
        """One report per number of devices."""
        return [row.report for row in self.rows]

    @property
    def heading(self) -> str:
        """One line that says what was estimated."""
        batch = "the same batch per replica" if self.weak else "the same global batch"
        return f"{self.step}: estimated bytes per device, {batch}; nothing was executed"

    @property
    def table(self) -> Table:
        """One row per number of devices."""
        return memory_table(self.reports)

    @property
    def notes(self) -> list[str]:
        """Sentences that explain the figures."""
        notes = list(dict.fromkeys(note for report in self.reports for note in report.notes[:2]))
        notes += self.reports[-1].notes[2:]
        notes.append(
            "The peak estimate is the sum of all rows, an upper bound: not all arrays are alive at "
            "the same time."
        )
        allocated = max(row.allocated_bytes for row in self.rows)
        if allocated:
            notes.append(
                f"{self.step} allocated {bytes_in_words(allocated)} on devices. Arrays created "
                "inside the function with jax.numpy or jax.random take no memory."
            )
        return notes

    def __str__(self) -> str:
        last = self.reports[-1]
        on = counted(len(last.devices), "device")
        detail = f"on {on}:\n{last.table}\n\n{last.advice}"
        return wrap("\n\n".join([self.heading, str(self.table), detail, "\n".join(self.notes)]))

    def to_dict(self) -> dict[str, Any]:
        """Returns the estimate as numbers, text and lists, for JSON."""
        return {
            "step": self.step,
            "scaling": "weak" if self.weak else "strong",
            "jax": jax.__version__,
            "rows": [
                {**row.report.to_dict(), "allocated_bytes": row.allocated_bytes}
                for row in self.rows
            ],
            "notes": self.notes,
        }


def estimate_row(
    text: str, make: MakeWorkload, strategy: Strategy, donate_argnums: Sequence[int] = ()
) -> Row:
    """Returns the bytes per device of a workload on the devices of a strategy; executes nothing.

    Args:
        text: The user's name for the workload, for messages.
        make: Makes the workload; see `mirror._src.tools.bench.workload.workload_of`.
        strategy: The step is compiled for its devices; no array is placed on them.
        donate_argnums: As in `strategy.run`.

    Raises:
        WorkloadError: If `make` or its step reads the value of an array.
        ReplicaDivergenceError: If `strategy.run` would raise it.
    """
    step, args, types, allocated = without_arrays(text, make, strategy)
    with escapes_explained(text):
        examined = strategy._runner.examined_without_arrays(
            step, args, types, tuple(donate_argnums)
        )
    return Row(memory_report(examined, strategy._replicas), allocated)
