"""`Explanation`: the parts of a step's time, as text, tables and a figure."""

import html
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from mirror._src.base.errors import bytes_in_words, counted
from mirror._src.base.modules import set_module
from mirror._src.base.tables import Table, new_figure
from mirror._src.base.terminal import wrap
from mirror._src.inspection.memory_report import MemoryReport


class Seconds(NamedTuple):
    """Parts of a step's wall time, in seconds; see `Explanation`.

    Attributes:
        input: Waiting for the next batch.
        transfer: Transferring arrays from the host to the devices.
        dispatch: Launching the step from Python.
        compute: Computing on the devices.
        communication: Executing collectives.
    """

    input: float
    transfer: float
    dispatch: float
    compute: float
    communication: float


_MEANING = {
    "input": "waiting for next(data)",
    "transfer": "transferring the batch to the devices",
    "dispatch": "launching the step from Python",
    "compute": "computing on the devices",
    "communication": "executing collectives",
}


@set_module("mirror")
@dataclass(frozen=True, repr=False)
class Explanation:
    """Measured parts of a step's time; `print` it, or display it in a notebook.

    The wall time of a step is measured in a loop like the user's, `next(data)` and then `run`. In
    that loop, the host prepares one step while the devices execute another. The parts are therefore
    measured with steps that start on idle devices:

    - input: the duration of `next(data)`.
    - transfer: moving the batch and other host arrays to the devices.
    - dispatch: a step with the same number of arrays that computes nothing.
    - communication: the step's collectives alone, on buffers of the same size.
    - compute: the remaining time until the results are ready.

    Input, transfer and dispatch run on the host; compute and communication run on the devices. The
    slower side counts in full, and the faster side only for the time that it adds. The parts add up
    to the wall time, so the largest part is the one to improve.

    Attributes:
        step: Name of the step.
        devices: Devices of the replicas.
        on_host: Whether these are host devices, which share the cores of the machine.
        steps: Number of steps measured.
        wall_secs: Wall time per step, in a loop.
        secs: Parts of the wall time, in seconds.
        num_arrays: Number of arrays that `run` passes to the devices in every step.
        num_collectives: Number of collectives per step. A `while` loop counts as one iteration.
        collective_bytes: Bytes that each replica contributes to them.
        speedup: Time per step on one replica with the whole batch, divided by the time on all
            replicas, both without waiting for data. `None` if it is unknown.
        no_speedup_because: Reason why the speedup is unknown, else empty.
        memory: Bytes per device of parameters, optimizer state, batch and temporaries.
        device_memory: Memory statistics of the first device: `"current"`, `"peak"` and `"limit"` in
            bytes. Empty on host devices.
    """

    step: str
    devices: tuple[str, ...]
    on_host: bool
    steps: int
    wall_secs: float
    secs: Seconds
    num_arrays: int
    num_collectives: int
    collective_bytes: int
    speedup: float | None
    no_speedup_because: str
    memory: MemoryReport
    device_memory: dict[str, int]

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of the wall time that each part takes."""
        return {part: secs / self.wall_secs for part, secs in self.secs._asdict().items()}

    @property
    def bound(self) -> str:
        """Largest part: `"input"`, `"dispatch"`, `"communication"` or `"compute"`."""
        shares = self.shares
        shares["input"] += shares.pop("transfer")
        return max(shares, key=shares.__getitem__)

    @property
    def verdict(self) -> str:
        """Largest part of the step time, and how to reduce it."""
        shares = self.shares
        collectives = counted(self.num_collectives, "collective")
        return {
            "input": (
                f"input-bound: {shares['input'] + shares['transfer']:.0%} of the step time is "
                "spent waiting for data. Increase `prefetch`, or move preprocessing into loader "
                "workers."
            ),
            "dispatch": (
                f"dispatch-bound: {shares['dispatch']:.0%} of the step time is spent launching "
                f"the step from Python with {self.num_arrays} arrays. Run several steps per launch "
                "(Trainer(steps_per_execution=k)), use fewer and larger arrays, or do more work "
                "per step."
            ),
            "communication": (
                f"communication-bound: {shares['communication']:.0%} of the step time is spent in "
                f"{collectives} of {bytes_in_words(self.collective_bytes)}. Use a larger "
                "per-replica batch, or accumulate gradients over several batches "
                "(Trainer(accumulate_steps=k))."
            ),
            "compute": (
                f"compute-bound: the devices compute for {shares['compute']:.0%} of the step time. "
                "Nothing to improve here."
            ),
        }[self.bound]

    @property
    def heading(self) -> str:
        """Step, number of replicas and time per step in one line."""
        replicas = counted(len(self.devices), "replica")
        return f"{self.step} on {replicas}: {self.wall_secs * 1e3:.2f} ms per step"

    @property
    def table(self) -> Table:
        """Table with one row per part."""
        shares = self.shares
        return Table(
            ("part", "ms", "share", "activity"),
            (
                (part, f"{secs * 1e3:.2f}", f"{shares[part]:.0%}", _MEANING[part])
                for part, secs in self.secs._asdict().items()
            ),
        )

    @property
    def facts(self) -> Table:
        """Table of other measurements."""
        rows = [
            ("speedup over one replica", self._speedup),
            ("collectives per step", str(self.num_collectives)),
            ("collective bytes per replica", bytes_in_words(self.collective_bytes)),
            ("arrays per launch", str(self.num_arrays)),
        ]
        for name, count in self.device_memory.items():
            rows.append((f"memory of the first device, {name}", bytes_in_words(count)))
        return Table(("measurement", "value"), rows)

    @property
    def _speedup(self) -> str:
        if self.speedup is None:
            return f"unknown: {self.no_speedup_because}"
        note = " (host devices share the machine's cores)" if self.on_host else ""
        return f"{self.speedup:.2f}, ideal {len(self.devices)}{note}"

    def __repr__(self) -> str:
        memory = f"{self.memory.table}\n\n{self.memory.advice}"
        parts = [self.heading, self.verdict, str(self.table), str(self.facts), memory]
        return wrap("\n\n".join(parts))

    def _repr_html_(self) -> str:
        heading, verdict = html.escape(self.heading), html.escape(self.verdict)
        tables = self.table._repr_html_() + self.facts._repr_html_()
        memory = f"{self.memory.table._repr_html_()}<p>{html.escape(self.memory.advice)}</p>"
        return f"<b>{heading}</b><p>{verdict}</p>{tables}{memory}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as JSON values."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "memory": self.memory.to_dict(),
            "devices": list(self.devices),
            "secs": self.secs._asdict(),
            "shares": self.shares,
            "bound": self.bound,
            "verdict": self.verdict,
        }

    def plot(self, file: str | Path | None = None) -> Any:
        """Plots the parts as one stacked bar.

        Args:
            file: File to save the figure to. The extension selects the format.

        Returns:
            A `matplotlib.figure.Figure`. A notebook displays it; no window is opened.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        figure = new_figure(8, 2)
        axes, start = figure.subplots(), 0.0
        for part, secs in self.secs._asdict().items():
            label = f"{part} {self.shares[part]:.0%}"
            axes.barh([0], [secs * 1e3], left=start, label=label)
            start += secs * 1e3
        axes.set_xlabel("ms per step")
        axes.set_yticks([])
        axes.set_title(self.verdict.split(":")[0])
        figure.legend(loc="outside lower center", ncols=len(self.secs))
        if file is not None:
            figure.savefig(file, dpi=120)
        return figure
