"""`MemoryReport`: memory of a step's state, batch and temporaries, and advice to reduce it."""

import enum
import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mirror._src.base.errors import bytes_in_words, counted
from mirror._src.base.tables import Table
from mirror._src.base.terminal import wrap

_MOST_NAMES = 3
UNKNOWN = "unknown"


class Kind(enum.StrEnum):
    """Use of device memory, in the order of the tables."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer state"
    OTHER_STATE = "other state"
    ARGUMENTS = "arguments"
    BATCH = "batch"
    RESULTS = "results"
    TEMPORARIES = "temporaries"

    @property
    def key(self) -> str:
        """Name in JSON, such as `optimizer_state`."""
        return self.value.replace(" ", "_")


COUNTED = tuple(k for k in Kind if k not in (Kind.RESULTS, Kind.TEMPORARIES))
"""Kinds of inputs, whose bytes are counted rather than reported by XLA."""


@dataclass(frozen=True)
class MemoryGroup:
    """Arrays with the same kind and name.

    Attributes:
        kind: Use of the arrays.
        name: The user's name: `model (Param)`, `state.opt_state`, `batch['image']`.
        num_arrays: Number of arrays.
        num_bytes: Bytes of one full copy; for a batch, of all replicas' shards.
        device_bytes: Bytes on every device, in device order.
    """

    kind: Kind
    name: str
    num_arrays: int
    num_bytes: int
    device_bytes: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every device stores a full copy."""
        return min(self.device_bytes) >= self.num_bytes

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON values."""
        return {
            "kind": self.kind.key,
            "name": self.name,
            "arrays": self.num_arrays,
            "bytes": self.num_bytes,
            "device_bytes": list(self.device_bytes),
        }


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """Memory of a step in bytes per device; `print` it, or display it in a notebook.

    Attributes:
        step: Name of the step.
        devices: Names of the devices, without repetition.
        num_replicas: Total number of replicas.
        platform: Platform that XLA compiled the step for, such as `"cpu"`.
        is_estimate: Whether the inputs were counted from shapes, without arrays on the devices.
        groups: Input arrays of the step, grouped by kind and name.
        result_bytes: Bytes per device of results that do not overwrite a donated argument, from
            XLA's memory analysis of the compiled step. `None` if XLA provides no analysis.
        temporary_bytes: Bytes per device that the step allocates while it runs, from the same
            analysis.
        unknown_because: Reason why the analysis is missing, else empty.
    """

    step: str
    devices: tuple[str, ...]
    num_replicas: int
    platform: str
    is_estimate: bool
    groups: tuple[MemoryGroup, ...]
    result_bytes: int | None
    temporary_bytes: int | None
    unknown_because: str = ""

    @property
    def fullest(self) -> int:
        """Index of the device that stores the most bytes; the first of several."""
        totals = [sum(g.device_bytes[i] for g in self.groups) for i in range(len(self.devices))]
        return max(range(len(totals)), key=totals.__getitem__)

    @property
    def by_kind(self) -> dict[str, int | None]:
        """Bytes per kind on the fullest device; `None` if unknown."""
        i = self.fullest
        counts: dict[str, int | None] = {
            kind: sum(g.device_bytes[i] for g in self.groups if g.kind is kind) for kind in COUNTED
        }
        return {**counts, Kind.RESULTS: self.result_bytes, Kind.TEMPORARIES: self.temporary_bytes}

    @property
    def peak_bytes(self) -> int:
        """Sum of all known kinds on the fullest device.

        It is an upper bound for the step, because not all results and temporaries are alive at the
        same time. Prefetched batches and arrays of other programs are not included.
        """
        return sum(count or 0 for count in self.by_kind.values())

    @property
    def largest(self) -> Kind:
        """Kind with the most bytes."""
        return max(Kind, key=lambda kind: self.by_kind[kind] or 0)

    @property
    def advice(self) -> str:
        """Changes that reduce the memory, in a few sentences."""
        kind = self.largest
        count = self.by_kind[kind] or 0
        uses = f"{kind.capitalize()} use" + ("s" if kind in _SINGULAR else "")
        share = f"{bytes_in_words(count)} of {bytes_in_words(self.peak_bytes)} per device"
        fix = _advice_to_shard(self, kind, count) if kind in _SHARDED else _ADVICE[kind]
        return f"{uses} the most memory: {share}. {fix}"

    @property
    def heading(self) -> str:
        """Step, devices and peak in one line."""
        count = len(self.devices)
        replicas = f", {self.num_replicas} replicas" if self.num_replicas != count else ""
        peak = "an estimated " if self.is_estimate else ""
        peak += "at least " if self.temporary_bytes is None else ""
        peak += bytes_in_words(self.peak_bytes)
        return f"{self.step} on {counted(count, 'device')}{replicas}: {peak} per device"

    @property
    def table(self) -> Table:
        """Table with one row per kind, then the peak estimate."""
        peak = self.peak_bytes
        rows = []
        for kind in Kind:
            count = self.by_kind[kind]
            if count == 0 and kind in _RARE:
                continue
            share = f"{count / peak:.0%}" if count is not None and peak else ""
            words = bytes_in_words(count) if count is not None else UNKNOWN
            rows.append((kind.value, words, share, self._content(kind)))
        content = "" if self.temporary_bytes is not None else f"without temporaries ({UNKNOWN})"
        rows.append(("peak estimate", bytes_in_words(peak), "", content))
        return Table(("memory per device", "bytes", "share", "content"), rows)

    def _content(self, kind: Kind) -> str:
        """Names the largest groups of a kind, or describes what XLA includes in it."""
        if kind not in COUNTED:
            return self.unknown_because or _MEASURED[kind].format(platform=self.platform)
        i = self.fullest
        groups = [g for g in self.groups if g.kind is kind]
        groups.sort(key=lambda group: -group.device_bytes[i])
        shown = groups[:_MOST_NAMES]
        names = [g.name for g in shown]
        if len(groups) > 1:
            names = [f"{g.name} {bytes_in_words(g.device_bytes[i])}" for g in shown]
        rest = len(groups) - len(shown)
        return ", ".join([*names, *([f"{rest} more"] if rest else [])])

    @property
    def notes(self) -> list[str]:
        """Sources of the numbers, and memory that is not included."""
        source = "shapes and dtypes" if self.is_estimate else "the arrays on the devices"
        notes = [f"Counted from {source}: {', '.join(COUNTED[:-1])} and {COUNTED[-1]}."]
        if self.temporary_bytes is None:
            notes.append(f"Results and temporaries are unknown: {self.unknown_because}.")
        else:
            notes.append(
                "Results and temporaries come from XLA's memory analysis of the step, compiled "
                f"for {self.platform}."
                + (" They differ on other platforms." if self.is_estimate else "")
            )
        batch = self.by_kind[Kind.BATCH]
        if batch:
            notes.append(
                f"Each batch that distribute_dataset prefetches adds {bytes_in_words(batch)} per "
                "device; prefetch=2 is the default."
            )
        return notes

    def __repr__(self) -> str:
        notes = "\n".join(self.notes)
        return wrap("\n\n".join([self.heading, str(self.table), self.advice, notes]))

    def _repr_html_(self) -> str:
        heading, advice = html.escape(self.heading), html.escape(self.advice)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<b>{heading}</b>{self.table._repr_html_()}<p>{advice}</p>{notes}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return {
            "step": self.step,
            "devices": list(self.devices),
            "replicas": self.num_replicas,
            "platform": self.platform,
            "is_estimate": self.is_estimate,
            "bytes": {kind.key: self.by_kind[kind] for kind in Kind},
            "peak_bytes": self.peak_bytes,
            "largest": self.largest.key,
            "advice": self.advice,
            "groups": [group.to_dict() for group in self.groups],
            "unknown_because": self.unknown_because,
        }


def memory_table(reports: Sequence[MemoryReport]) -> Table:
    """Returns a table with one row per number of devices and one column per kind."""
    kinds = [k for k in Kind if k not in _RARE or any(report.by_kind[k] for report in reports)]
    rows = []
    for report in reports:
        counts = [report.by_kind[kind] for kind in kinds]
        cells = [UNKNOWN if count is None else bytes_in_words(count) for count in counts]
        devices = str(len(report.devices))
        if report.num_replicas != len(report.devices):
            devices += f" ({report.num_replicas} replicas)"
        rows.append((devices, *cells, bytes_in_words(report.peak_bytes)))
    return Table(("devices", *(kind.value for kind in kinds), "peak estimate"), rows)


_RARE = (Kind.OTHER_STATE, Kind.ARGUMENTS, Kind.RESULTS)
_SINGULAR = (Kind.OPTIMIZER_STATE, Kind.OTHER_STATE, Kind.BATCH)
_MEASURED = {
    Kind.RESULTS: "outputs that do not overwrite a donated argument (XLA, {platform})",
    Kind.TEMPORARIES: "activations, gradients, buffers of collectives (XLA, {platform})",
}
_SHARDED = {
    Kind.PARAMETERS: ("model", "a smaller dtype, such as param_dtype=jnp.bfloat16"),
    Kind.OPTIMIZER_STATE: (
        "optimizer",
        "an optimizer with less state, such as optax.adafactor or optax.sgd",
    ),
}
_ADVICE = {
    Kind.OTHER_STATE: (
        "Every device stores a full copy. Remove state that the step does not need."
    ),
    Kind.ARGUMENTS: (
        "Every device stores a full copy. Pass data as batches of strategy.distribute_dataset, "
        "which splits them across the replicas."
    ),
    Kind.BATCH: "Use a smaller batch, a smaller dtype, or distribute_dataset(data, prefetch=0).",
    Kind.RESULTS: (
        "The new state does not replace the old one. Donate the old state, strategy.run(step, "
        "(state, batch), donate_argnums=0), and return only the results that you need."
    ),
    Kind.TEMPORARIES: (
        "They grow with the per-replica batch. Use a smaller batch, accumulate gradients, "
        "Trainer(accumulate_steps=k), or recompute activations in the backward pass with "
        "nnx.remat or jax.checkpoint."
    ),
}


def _advice_to_shard(report: MemoryReport, kind: Kind, count: int) -> str:
    n, (shard, smaller) = len(report.devices), _SHARDED[kind]
    if n == 1:
        return f"Use {smaller}, or more devices with MirroredStrategy(shard={shard!r})."
    if not all(group.is_whole for group in report.groups if group.kind is kind):
        return f"It is already sharded across the {n} devices. Use more devices, or {smaller}."
    return (
        f"Every device stores a full copy. MirroredStrategy(shard={shard!r}) shards it across "
        f"the {n} devices, about {bytes_in_words(count / n)} on each. Or use {smaller}."
    )
