"""`Estimate`: bytes per device of a step on 1 to n devices, as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from mirror._src.cli.bench.workload import MakeWorkload
from mirror._src.cli.estimate.abstract import escapes_explained, without_arrays
from mirror._src.explain.memory import memory_report
from mirror._src.explain.memory_report import MemoryReport, memory_table
from mirror._src.strategy.strategy import Strategy
from mirror._src.utils.errors import bytes_in_words, counted
from mirror._src.utils.tables import Table


@dataclass(frozen=True)
class Row:
    """A step on some devices.

    Attributes:
        report: Its bytes per device.
        allocated_bytes: Bytes that the function allocated on devices while it made the step.
    """

    report: MemoryReport
    allocated_bytes: int


@dataclass(frozen=True)
class Estimate:
    """Bytes per device of a step that was not executed.

    Attributes:
        step: The name that was asked for.
        weak: Whether each replica, and not all together, has the same batch.
        rows: One for each number of devices, the smallest first.
    """

    step: str
    weak: bool
    rows: tuple[Row, ...]

    @property
    def reports(self) -> list[MemoryReport]:
        """The report for each number of devices."""
        return [row.report for row in self.rows]

    @property
    def heading(self) -> str:
        """What was estimated."""
        batch = "the same batch per replica" if self.weak else "the same global batch"
        return f"{self.step}: estimated bytes per device, {batch}; nothing was executed"

    @property
    def table(self) -> Table:
        """A row for each number of devices."""
        return memory_table(self.reports)

    @property
    def notes(self) -> list[str]:
        """How the figures were found."""
        notes = list(dict.fromkeys(note for report in self.reports for note in report.notes[:2]))
        notes += self.reports[-1].notes[2:]
        notes.append(
            "The peak estimate is the sum, an upper bound: not everything is alive at one time."
        )
        allocated = max(row.allocated_bytes for row in self.rows)
        if allocated:
            notes.append(
                f"{self.step} allocated {bytes_in_words(allocated)} on devices. Arrays that "
                "jax.numpy and jax.random create in the function itself take no memory."
            )
        return notes

    def __str__(self) -> str:
        last = self.reports[-1]
        on = counted(len(last.devices), "device")
        detail = f"on {on}:\n{last.table}\n\n{last.advice}"
        return "\n\n".join([self.heading, str(self.table), detail, "\n".join(self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as numbers, text and lists, for JSON."""
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
        make: Makes it; see `mirror._src.cli.bench.workload.workload_of`.
        strategy: The strategy. Its devices are compiled for, and nothing is put on them.
        donate_argnums: As of `strategy.run`.

    Raises:
        WorkloadError: If `make` or its step reads values that an estimate does not have.
        ReplicaDivergenceError: As from `strategy.run`.
    """
    step, args, types, allocated = without_arrays(text, make, strategy)
    with escapes_explained(text):
        examined = strategy._runner.examined_without_arrays(
            step, args, types, tuple(donate_argnums)
        )
    return Row(memory_report(examined, strategy._replicas), allocated)
