"""`MemoryReport`: bytes per device of a step's state, batch and temporaries, and what to shrink."""

import enum
import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mirror._src.utils.errors import bytes_in_words
from mirror._src.utils.tables import Table

_MOST_NAMES = 3
UNKNOWN = "unknown"


class Kind(enum.StrEnum):
    """What memory on a device is used for, in the order of the tables."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer state"
    OTHER_STATE = "other state"
    ARGUMENTS = "arguments"
    BATCH = "batch"
    RESULTS = "results"
    TEMPORARIES = "temporaries"

    @property
    def key(self) -> str:
        """Name in JSON, `optimizer_state`."""
        return self.value.replace(" ", "_")


COUNTED = tuple(k for k in Kind if k not in (Kind.RESULTS, Kind.TEMPORARIES))
"""Kinds that are inputs of a step, so that their bytes are counted."""


@dataclass(frozen=True)
class MemoryGroup:
    """Arrays of one kind and one name.

    Attributes:
        kind: What they are used for.
        name: The user's name: `model (Param)`, `state.opt_state`, `batch['image']`.
        num_arrays: Number of arrays.
        num_bytes: Bytes of one copy of them, all replicas' rows included.
        device_bytes: Bytes on each device, in the order of the devices.
    """

    kind: Kind
    name: str
    num_arrays: int
    num_bytes: int
    device_bytes: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether each device holds a whole copy."""
        return min(self.device_bytes) >= self.num_bytes

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, for JSON."""
        return {
            "kind": self.kind.key,
            "name": self.name,
            "arrays": self.num_arrays,
            "bytes": self.num_bytes,
            "device_bytes": list(self.device_bytes),
        }


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """Bytes per device of a step; `print` it, or display it in a notebook.

    Attributes:
        step: The step's name.
        devices: Names of the devices, each once.
        num_replicas: Number of replicas on all devices.
        platform: The platform that XLA compiled the step for, such as `"cpu"`.
        is_estimate: Whether the state was counted from shapes, and is on no device.
        groups: The arrays that go into the step, grouped by kind and name.
        result_bytes: Bytes per device of results that do not overwrite a donated argument, by XLA's
            memory analysis of the compiled step; `None` if there is no such analysis.
        temporary_bytes: Bytes per device of what the step allocates while it runs, by the same
            analysis.
        unknown_because: Why there is no analysis.
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
        """Number of the device that holds the most, the first of several."""
        held = [sum(g.device_bytes[i] for g in self.groups) for i in range(len(self.devices))]
        return max(range(len(held)), key=held.__getitem__)

    @property
    def by_kind(self) -> dict[Kind, int | None]:
        """Bytes of each kind on the fullest device; `None` if unknown."""
        i = self.fullest
        found: dict[Kind, int | None] = {
            kind: sum(g.device_bytes[i] for g in self.groups if g.kind is kind) for kind in COUNTED
        }
        return {**found, Kind.RESULTS: self.result_bytes, Kind.TEMPORARIES: self.temporary_bytes}

    @property
    def peak_bytes(self) -> int:
        """Sum of all kinds on the fullest device, as far as they are known.

        It is an upper bound of what the step needs: results and temporaries may not all be alive
        at one time. Prefetched batches and other programs' arrays come on top.
        """
        return sum(count or 0 for count in self.by_kind.values())

    @property
    def largest(self) -> Kind:
        """The kind with the most bytes."""
        return max(self.by_kind, key=lambda kind: self.by_kind[kind] or 0)

    @property
    def advice(self) -> str:
        """What to change for less memory, in a few sentences."""
        kind = self.largest
        count = self.by_kind[kind] or 0
        share = f"{kind.capitalize()} take" + ("s" if kind in _SINGULAR else "")
        is_optimizer = kind is Kind.OPTIMIZER_STATE
        how = _shrink_optimizer(self, count) if is_optimizer else _ADVICE[kind]
        of = f"{bytes_in_words(count)} of {bytes_in_words(self.peak_bytes)}"
        return f"{share} the most, {of} per device. {how}"

    @property
    def heading(self) -> str:
        """The step, its devices and the peak."""
        count = len(self.devices)
        on = "1 device" if count == 1 else f"each of {count} devices"
        more = f", {self.num_replicas} replicas" if self.num_replicas != count else ""
        about = "an estimated " if self.is_estimate else ""
        peak = bytes_in_words(self.peak_bytes)
        least = "at least " if self.temporary_bytes is None else ""
        return f"{self.step} on {on}{more}: {about}{least}{peak} per device"

    @property
    def table(self) -> Table:
        """A row for each kind, then the peak estimate."""
        peak = self.peak_bytes
        rows = []
        for kind, count in self.by_kind.items():
            if count == 0 and kind in _RARE:
                continue
            share = f"{count / peak:.0%}" if count is not None and peak else ""
            words = bytes_in_words(count) if count is not None else UNKNOWN
            rows.append((kind.value, words, share, self._content(kind)))
        content = "" if self.temporary_bytes is not None else f"without the temporaries: {UNKNOWN}"
        rows.append(("peak estimate", bytes_in_words(peak), "", content))
        return Table(("memory per device", "bytes", "share", "content"), rows)

    def _content(self, kind: Kind) -> str:
        """The largest groups of a kind, by name; or what XLA counts in it."""
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
        """How the figures were found, and what comes on top of them."""
        how = (
            "Counted from shapes and dtypes"
            if self.is_estimate
            else "Read from the arrays on the devices"
        )
        notes = [f"{how}: {', '.join(COUNTED[:-1])} and {COUNTED[-1]}."]
        if self.temporary_bytes is None:
            notes.append(f"Results and temporaries are unknown: {self.unknown_because}.")
        else:
            notes.append(
                f"Results and temporaries: XLA's memory analysis of the step, compiled for "
                f"{self.platform}."
                + (" On another platform they differ." if self.is_estimate else "")
            )
        batch = self.by_kind[Kind.BATCH]
        if batch:
            notes.append(
                f"Each batch that distribute_dataset prefetches adds {bytes_in_words(batch)} per "
                "device; prefetch=2 is the default."
            )
        return notes

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        notes = "\n".join(self.notes)
        return "\n\n".join([self.heading, str(self.table), self.advice, notes])

    def _repr_html_(self) -> str:
        heading, advice = html.escape(self.heading), html.escape(self.advice)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<b>{heading}</b>{self.table._repr_html_()}<p>{advice}</p>{notes}"

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as numbers, text and lists, for JSON."""
        return {
            "step": self.step,
            "devices": list(self.devices),
            "replicas": self.num_replicas,
            "platform": self.platform,
            "is_estimate": self.is_estimate,
            "bytes": {kind.key: count for kind, count in self.by_kind.items()},
            "peak_bytes": self.peak_bytes,
            "largest": self.largest.key,
            "advice": self.advice,
            "groups": [group.to_dict() for group in self.groups],
            "unknown_because": self.unknown_because,
        }


def memory_table(reports: Sequence[MemoryReport]) -> Table:
    """Returns a table with a row for each number of devices and a column for each kind."""
    found = [report.by_kind for report in reports]
    kinds = [k for k in Kind if k not in _RARE or any(each[k] for each in found)]
    rows = []
    for report, each in zip(reports, found, strict=True):
        counts = [each[kind] for kind in kinds]
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


_ADVICE = {
    Kind.PARAMETERS: (
        "Every device holds a whole copy, so more devices do not help. Use a smaller dtype, such "
        "as param_dtype=jnp.bfloat16, or a smaller model. A model that is larger than a device "
        "needs jax.jit with shardings."
    ),
    Kind.OTHER_STATE: (
        "Every device holds a whole copy. Remove what the step does not need from its state."
    ),
    Kind.ARGUMENTS: (
        "Every device holds a whole copy. Pass data as batches of strategy.distribute_dataset, "
        "which splits them across the replicas."
    ),
    Kind.BATCH: "Use a smaller batch, a smaller dtype, or distribute_dataset(data, prefetch=0).",
    Kind.RESULTS: (
        "The new state is written beside the old one. Donate the old one, strategy.run(step, "
        "(state, batch), donate_argnums=0), and return less than the step computes."
    ),
    Kind.TEMPORARIES: (
        "They grow with the batch of a replica. Use a smaller batch, split it, "
        "Trainer(accumulate_steps=k), or recompute activations in the backward pass, nnx.remat "
        "or jax.checkpoint."
    ),
}


def _shrink_optimizer(report: MemoryReport, count: int) -> str:
    n = len(report.devices)
    whole = all(g.is_whole for g in report.groups if g.kind is Kind.OPTIMIZER_STATE)
    other = "an optimizer with less state, such as optax.adafactor or optax.sgd"
    if n == 1:
        return (
            f"Use {other}, or more devices with MirroredStrategy(shard_update=True), which shards "
            "it across them."
        )
    if not whole:
        return f"It is sharded across the {n} devices already. Use more devices, or {other}."
    return (
        "Every device holds a whole copy. MirroredStrategy(shard_update=True) shards it across "
        f"the {n} devices, about {bytes_in_words(count / n)} on each. Or use {other}."
    )
