"""`Explanation`: where a step's time goes, in words, as a table and as a picture."""

import html
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from mirror._src.explain.memory_report import MemoryReport
from mirror._src.utils.errors import bytes_in_words
from mirror._src.utils.modules import set_module
from mirror._src.utils.tables import Table, new_figure


class Seconds(NamedTuple):
    """The parts of a step's wall time, in seconds; they add up to it.

    Attributes:
        input: the next batch is waited for.
        transfer: it is on its way to the devices.
        dispatch: Python hands the step to the devices.
        compute: the devices compute.
        communication: the devices communicate.
    """

    input: float
    transfer: float
    dispatch: float
    compute: float
    communication: float


_MEANING = {
    "input": "next(data) is waited for",
    "transfer": "the batch goes to the devices",
    "dispatch": "Python hands the step to the devices",
    "compute": "the devices compute",
    "communication": "the devices communicate",
}


@set_module("mirror")
@dataclass(frozen=True, repr=False)
class Explanation:
    """Where the time of a step goes; `print` it, or let a notebook show it.

    Attributes:
        step: the step's name.
        devices: those of the replicas.
        on_host: whether they are host devices, which share the machine's cores.
        steps: how many were measured.
        wall_secs: the time of a step in a loop.
        secs: its parts, which add up to it; what they mean says `mirror._src.explain.timing`.
        num_arrays: how many arrays `run` hands the devices each step.
        num_collectives: how many collectives there are in a step; a `while`'s count once.
        collective_bytes: what each replica brings to them.
        speedup: how much faster a step is than on one replica with the whole batch, both without
            waiting for data; `None`: unknown.
        no_speedup_because: why it is.
        memory: bytes per device of parameters, optimizer state, batch and temporaries.
        device_memory: what the first device itself tells, `"current"`, `"peak"` and `"limit"` in
            bytes; empty on host devices.
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
        """What fraction of a step each part is."""
        return {part: secs / self.wall_secs for part, secs in self.secs._asdict().items()}

    @property
    def bound(self) -> str:
        """What takes the most: `"input"`, `"dispatch"`, `"communication"` or `"compute"`."""
        shares = self.shares
        shares["input"] += shares.pop("transfer")
        return max(shares, key=shares.__getitem__)

    @property
    def verdict(self) -> str:
        """What to change, in a sentence."""
        shares = self.shares
        collectives = (
            f"{self.num_collectives} collectives of {bytes_in_words(self.collective_bytes)}"
        )
        return {
            "input": (
                f"input-bound: {shares['input'] + shares['transfer']:.0%} of a step waits for data:"
                " prefetch more, move work into the loader's workers."
            ),
            "dispatch": (
                f"dispatch-bound: {shares['dispatch']:.0%} of a step is Python handing over "
                f"{self.num_arrays} arrays: several steps in one launch (steps_per_execution of "
                "the Trainer), fewer and larger arrays, or more work in a step."
            ),
            "communication": (
                f"communication-bound: {shares['communication']:.0%} of a step goes to "
                f"{collectives}: a larger batch for each replica, or gradients accumulated over "
                "several batches before they are all-reduced."
            ),
            "compute": f"compute-bound: good: the devices compute in {shares['compute']:.0%} of a "
            "step.",
        }[self.bound]

    @property
    def heading(self) -> str:
        """The step, its devices, its time."""
        count = len(self.devices)
        replicas = "1 replica" if count == 1 else f"{count} replicas"
        return f"{self.step} on {replicas}: {self.wall_secs * 1e3:.2f} ms a step"

    @property
    def table(self) -> Table:
        """A row for each part."""
        shares = self.shares
        return Table(
            ("part", "ms", "share", "what happens"),
            (
                (part, f"{secs * 1e3:.2f}", f"{shares[part]:.0%}", _MEANING[part])
                for part, secs in self.secs._asdict().items()
            ),
        )

    @property
    def facts(self) -> Table:
        """The figures beside the time."""
        rows = [("speed-up against one replica", self._speedup)]
        rows.append(("collectives a step", str(self.num_collectives)))
        rows.append(("each replica brings", bytes_in_words(self.collective_bytes)))
        rows.append(("arrays handed over", str(self.num_arrays)))
        for name, count in self.device_memory.items():
            rows.append((f"memory of the first device, {name}", bytes_in_words(count)))
        return Table(("figure", "value"), rows)

    @property
    def _speedup(self) -> str:
        if self.speedup is None:
            return f"unknown: {self.no_speedup_because}"
        shared = " (host devices share the cores)" if self.on_host else ""
        return f"{self.speedup:.2f} of {len(self.devices)}{shared}"

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        memory = f"{self.memory.table}\n\n{self.memory.advice}"
        return "\n\n".join([self.heading, self.verdict, str(self.table), str(self.facts), memory])

    def _repr_html_(self) -> str:
        heading, verdict = html.escape(self.heading), html.escape(self.verdict)
        tables = self.table._repr_html_() + self.facts._repr_html_()
        memory = f"{self.memory.table._repr_html_()}<p>{html.escape(self.memory.advice)}</p>"
        return f"<b>{heading}</b><p>{verdict}</p>{tables}{memory}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, text and dicts, for JSON."""
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
        """Draws the parts as one bar.

        Args:
            file: where to write it, too; its ending says the format.

        Returns:
            A `matplotlib.figure.Figure`, which a notebook shows; no window is opened.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        figure = new_figure(8, 2)
        axes, start = figure.subplots(), 0.0
        for part, secs in self.secs._asdict().items():
            label = f"{part} {self.shares[part]:.0%}"
            axes.barh([0], [secs * 1e3], left=start, label=label)
            start += secs * 1e3
        axes.set_xlabel("ms a step")
        axes.set_yticks([])
        axes.set_title(self.verdict.split(":")[0])
        figure.legend(loc="outside lower center", ncols=len(self.secs))
        if file is not None:
            figure.savefig(file, dpi=120)
        return figure
