"""`mirror bench`: measures how a training step scales from one device to n."""

import argparse
import functools
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax

from mirror._src.base import interrupts
from mirror._src.base.errors import counted
from mirror._src.base.terminal import Report, Table, new_figure
from mirror._src.devices import backend
from mirror._src.engine.arguments import hoist_nested
from mirror._src.engine.per_replica import is_per_replica
from mirror._src.inspection.explanation import Explanation
from mirror._src.inspection.measurement import endless, in_turns, quartiles, variables_of, wait
from mirror._src.inspection.memory import memory_table
from mirror._src.strategy.mirrored import MirroredStrategy
from mirror._src.strategy.strategy import Strategy
from mirror._src.tools.common import (
    HOST_COUNTS,
    NUM_HOST_DEVICES,
    force_host_devices,
    print_report,
    report_step_failure,
    require_writable,
    too_few_devices,
)
from mirror._src.tools.options import USAGE_ERROR, OptionError, report_error
from mirror._src.tools.workload import MakeWorkload, Workload, WorkloadError, workload_of

_ROUNDS = 10
_WARM_UP_STEPS = 3
_MOST_EXPLAINED_STEPS = 10


@dataclass(frozen=True)
class Row:
    """Measurements of a step on one number of devices.

    Attributes:
        devices: Names of the devices.
        num_examples: Size of the global batch; `None` if no batch is split across the replicas.
        secs: Seconds per step in every round.
        explanation: The report of `strategy.explain`.
    """

    devices: tuple[str, ...]
    num_examples: int | None
    secs: tuple[float, ...]
    explanation: Explanation

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


@dataclass(frozen=True, repr=False)
class Scaling(Report):
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
            f"{row.explanation.bound}-bound",
        )

    @property
    def notes(self) -> list[str]:
        """Sentences that explain the figures."""
        last = self.rows[-1]
        notes = [f"On {len(last.devices)} devices: {last.explanation.verdict}"]
        if self.on_host and len(last.devices) > 1:
            notes.append(
                f"Host devices share the {os.cpu_count()} cores of this machine, so adding devices "
                "does not speed up the step."
            )
        return notes

    def _parts(self) -> list[Table | list[str] | str]:
        memory = memory_table([row.explanation.memory for row in self.rows])
        return [self.table, self.notes, f"bytes per device:\n{memory}"]

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
            "bound": row.explanation.bound,
            "verdict": row.explanation.verdict,
            "memory": row.explanation.memory.to_dict(),
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


@final
class Candidate:
    """A workload on the devices of one strategy.

    Attributes:
        strategy: Runs the step.
        sizes: Batch size of each replica; `()` if no batch is split across the replicas.
    """

    def __init__(self, strategy: Strategy, workload: Workload) -> None:
        self.strategy = strategy
        self._workload = workload
        self._batches = endless(workload.data)
        self._variables = variables_of(hoist_nested(workload.args, {}).objects)
        self.sizes: tuple[int, ...] = ()

    def warm_up(self) -> None:
        """Compiles the step.

        Raises:
            WorkloadError: If the step has no result whose computation could be awaited.
        """
        args = self._arguments()
        self.sizes = _sizes(args)
        results = self.strategy.run(self._workload.step, args)
        if not jax.tree.leaves(results) and not self._variables:
            raise WorkloadError(
                "The step returns nothing and changes none of its arguments, so its end cannot be "
                "detected. Return its loss."
            )
        self.time_steps(_WARM_UP_STEPS)

    def time_steps(self, steps: int) -> float:
        """Returns the seconds per step of some steps, waiting for the results of the last one."""
        start, results = time.perf_counter(), None
        for _ in range(steps):
            interrupts.check()
            results = self.strategy.run(self._workload.step, self._arguments())
        wait((results, [variable.get_raw_value() for variable in self._variables]))
        return (time.perf_counter() - start) / steps

    def row(self, secs: Sequence[float]) -> Row:
        """Returns the times together with what `strategy.explain` reports about the step."""
        step, args, data = self._workload
        steps = min(_MOST_EXPLAINED_STEPS, max(len(secs), 2))
        explanation = self.strategy.explain(step, args, data=data, steps=steps)
        names = tuple(map(backend.logical_name, self.strategy.devices))
        return Row(names, sum(self.sizes) or None, tuple(secs), explanation)

    def _arguments(self) -> tuple[Any, ...]:
        return (*self._workload.args, *next(self._batches))


def measure(name: str, candidates: Sequence[Candidate], steps: int, weak: bool) -> Scaling:
    """Measures how a step scales.

    Args:
        name: Name of the step.
        candidates: The step on an increasing number of devices, warmed up.
        steps: Least number of steps to measure on each; they are spread over ten rounds.
        weak: Whether the batch is the same per replica, rather than in total.

    Raises:
        WorkloadError: If the batches differ.
    """
    _require_same_batch(candidates, weak)
    per_turn = math.ceil(steps / _ROUNDS)
    rounds = math.ceil(steps / per_turn)
    gc.collect()
    secs = in_turns([functools.partial(c.time_steps, per_turn) for c in candidates], rounds)
    rows = []
    for candidate, candidate_secs in zip(candidates, secs, strict=True):
        interrupts.check()
        rows.append(candidate.row(candidate_secs))
    on_host = backend.type_of(candidates[0].strategy.devices[0]) == "CPU"
    return Scaling(name, weak, rounds * per_turn, on_host, tuple(rows))


def _sizes(args: Any) -> tuple[int, ...]:
    """Returns the batch size of each replica: the length of the first per-replica array."""
    for leaf in jax.tree.leaves(args, is_leaf=is_per_replica):
        if is_per_replica(leaf) and leaf.shapes[0]:
            return tuple(shape[0] for shape in leaf.shapes)
    return ()


def _require_same_batch(candidates: Sequence[Candidate], weak: bool) -> None:
    """Checks that all times are for the same work.

    Raises:
        WorkloadError: If the batches differ.
    """
    total = max if weak else sum
    sizes = {len(c.strategy.devices): total(c.sizes or (0,)) for c in candidates}
    if weak and not all(sizes.values()):
        raise WorkloadError(
            "--weak requires a batch that is split across the replicas. Return (step, args, data) "
            "with a list of batches."
        )
    if len(set(sizes.values())) == 1:
        return
    by_count = ", ".join(f"{size} on {n}" for n, size in sizes.items())
    if weak:
        raise WorkloadError(
            f"The times are not comparable: the batch per replica varies ({by_count} devices). "
            "Return (step, args, data), whose batches are repeated for every replica, or scale the "
            "batch with strategy.num_replicas_in_sync."
        )
    raise WorkloadError(
        f"The times are not comparable: the global batch grows with the devices ({by_count} "
        "devices). Return the same batch for every strategy, or pass --weak."
    )


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        if parsed.plot is not None:
            require_writable(parsed.plot)
        devices, counts = _devices(parsed.devices)
        make = workload_of(parsed.step, parsed.batch_size, parsed.weak)
        scaling = _measure(parsed, make, devices, counts)
    except (OptionError, WorkloadError) as error:
        return report_error("bench", str(error), USAGE_ERROR)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "matplotlib":
            return report_error("bench", str(error), USAGE_ERROR)
        return report_step_failure("bench", parsed.step, error)
    print_report(scaling, as_json=parsed.json)
    if parsed.plot is not None:
        scaling.plot(parsed.plot)
        print(f"picture: {parsed.plot}", file=sys.stderr)
    return 0


def _measure(
    parsed: argparse.Namespace,
    make: MakeWorkload,
    devices: tuple[jax.Device, ...],
    counts: tuple[int, ...],
) -> Scaling:
    candidates = []
    for count in counts:
        interrupts.check()
        on = counted(count, "device")
        print(f"compiling {parsed.step} for {on}", file=sys.stderr, flush=True)
        strategy = MirroredStrategy(devices[:count])
        candidates.append(Candidate(strategy, make(strategy)))
        candidates[-1].warm_up()
    print("measuring and explaining the step", file=sys.stderr, flush=True)
    return measure(parsed.step, candidates, parsed.steps, parsed.weak)


def _devices(wanted: tuple[int, ...] | None) -> tuple[tuple[jax.Device, ...], tuple[int, ...]]:
    """Returns the available devices, and the numbers of devices to measure on.

    Raises:
        OptionError: If there are not enough devices.
    """
    most = max(wanted or HOST_COUNTS)
    fixed_by = force_host_devices(most)
    devices = backend.default_devices()
    if wanted is None:
        powers = (2**k for k in range(len(devices).bit_length()))
        counts = tuple(sorted({*powers, len(devices)}))
        on_host = backend.type_of(devices[0]) == "CPU"
        return devices, tuple(n for n in counts if n <= NUM_HOST_DEVICES) if on_host else counts
    if most > len(devices):
        raise too_few_devices("bench", ",".join(map(str, wanted)), devices, fixed_by)
    return devices, wanted
