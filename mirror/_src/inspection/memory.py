"""`MemoryReport`: measures the memory of a step in bytes per device, and advises how to reduce it.

Inputs are counted; results and temporaries come from XLA's memory analysis. Arrays on devices are
counted shard by shard, so that whole copies, per-replica batches and sharded state need no special
cases. Without arrays, shapes are counted with the shardings of the step's inputs.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import nnx

from mirror._src.base.errors import bytes_in_words, counted
from mirror._src.base.naming import argument_names, keys
from mirror._src.base.terminal import Report, Table
from mirror._src.base.types import num_bytes
from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import UnstackedArrays
from mirror._src.engine.arguments import Call
from mirror._src.engine.plan import find_returned
from mirror._src.engine.program import ExaminedStep
from mirror._src.engine.variable import Variable
from mirror._src.jaxprs.equations import arrays_in

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
class MemoryReport(Report):
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

    def _parts(self) -> list[Table | list[str] | str]:
        return [self.table, [self.advice], self.notes]

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


_BY_NAME = {"params": Kind.PARAMETERS, "opt_state": Kind.OPTIMIZER_STATE}
_MOST_PARTS = 8
_CAPTURED = "arrays captured by the step"


class _Place(NamedTuple):
    """Input of a program: its kind, its argument, and its position in the argument."""

    kind: Kind
    argument: str
    part: str


def memory_report(examined: ExaminedStep, replicas: ReplicaDevices) -> MemoryReport:
    """Returns the memory of a call, in bytes per device.

    Args:
        examined: The call. Its leaves are arrays on the devices, or all of them are
            `jax.ShapeDtypeStruct`s.
        replicas: Devices of the replicas.
    """
    step = examined.traced.function
    is_estimate = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in examined.leaves)
    places = [*_state_places(examined.call), *_argument_places(examined)]
    rows = []
    for place, leaf, kind in zip(places, examined.leaves, examined.kinds, strict=True):
        sharding = replicas.sharding(kind)
        rows.append((place, id(leaf), *_bytes_of(leaf, sharding, replicas)))
    for array in _captured(examined):
        place = _Place(Kind.ARGUMENTS, _CAPTURED, "")
        copies = [array.nbytes] * len(replicas.distinct)
        rows.append((place, id(array), array.nbytes, copies))
    results, temporaries, unknown = _measured(examined)
    return MemoryReport(
        step=step.name,
        devices=tuple(map(backend.logical_name, replicas.distinct)),
        num_replicas=len(replicas),
        platform=getattr(
            replicas.distinct[0], "device_kind" if replicas.only_compile else "platform"
        ),
        is_estimate=is_estimate,
        groups=tuple(_grouped(rows, len(replicas.distinct))),
        result_bytes=results,
        temporary_bytes=temporaries,
        unknown_because=unknown,
    )


def _bytes_of(leaf: Any, sharding: Any, replicas: ReplicaDevices) -> tuple[int, list[int]]:
    """Returns the bytes of a value, and the bytes that each device stores."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        shard = jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)
        return num_bytes(leaf), [num_bytes(shard)] * len(replicas.distinct)
    device_bytes = dict.fromkeys(replicas.distinct, 0)
    arrays: Sequence[Any] = leaf.arrays if isinstance(leaf, UnstackedArrays) else (leaf,)
    for array in arrays:
        for shard in array.addressable_shards:
            device_bytes[shard.device] = device_bytes.get(shard.device, 0) + shard.data.nbytes
        if not array.is_fully_addressable:  # the devices of other processes have equal shards
            shape = array.sharding.shard_shape(array.shape)
            for device in array.sharding.device_set - array.sharding.addressable_devices:
                count = num_bytes(jax.ShapeDtypeStruct(shape, array.dtype))
                device_bytes[device] = device_bytes.get(device, 0) + count
    return sum(map(num_bytes, arrays)), [device_bytes[d] for d in replicas.distinct]


def _state_places(call: Call) -> Iterator[_Place]:
    """Yields the place of every leaf of the nnx objects."""
    if call.structure is None or call.record is None:
        return
    names = call.object_names
    holders = {slot: call.record.holder(i) for i, slot in enumerate(call.structure.slots)}
    for slot in call.structure.leaf_slots:
        kind = slot.kind
        if issubclass(kind, nnx.OptState):
            use = Kind.OPTIMIZER_STATE
        elif issubclass(kind, nnx.Param) or (
            issubclass(kind, Variable) and getattr(holders[slot], "trainable", False)
        ):
            use = Kind.PARAMETERS
        else:
            use = Kind.OTHER_STATE
        type_name = "" if use is Kind.OPTIMIZER_STATE else f" ({kind.__name__})"
        yield _Place(use, f"{names[slot.path[0]]}{type_name}", "")


def _argument_places(examined: ExaminedStep) -> Iterator[_Place]:
    """Yields the place of every leaf outside nnx objects.

    Leaves of Optax states are optimizer state. Otherwise, the user's names decide: `params` and
    `opt_state`, as an attribute, key or argument. Remaining arguments are state if the step returns
    a result with the same structure.
    """
    call, step = examined.call, examined.traced.function
    avals = examined.traced.avals[: len(step.out_names)]
    returned = find_returned(call, step, avals)
    args, kwargs = call.tree
    names = argument_names(call.fn, len(args))
    paths, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
    is_in_optax = _are_in_optax((args, kwargs))
    for number, i in enumerate(call.layout.dynamic):
        path = paths[i][0]
        argument = names[path[1].idx] if path[0].idx == 0 else path[1].key
        part = keys(path[2:3])
        words = [argument, *(getattr(x, "name", getattr(x, "key", "")) for x in path[2:])]
        by_name = [_BY_NAME[word] for word in words if word in _BY_NAME]
        if number in call.layout.per_replica:
            kind = Kind.BATCH
        elif is_in_optax[i]:
            kind = Kind.OPTIMIZER_STATE
        elif by_name:
            kind = by_name[0]
        else:
            kind = Kind.OTHER_STATE if number in returned else Kind.ARGUMENTS
        yield _Place(kind, argument, part)


def _are_in_optax(tree: Any) -> list[bool]:
    """Returns for each leaf whether it is inside the state of an Optax transformation."""
    nodes = jax.tree.leaves(tree, is_leaf=_is_optax)
    return [_is_optax(node) for node in nodes for _ in jax.tree.leaves(node)]


def _is_optax(node: Any) -> bool:
    module = getattr(type(node), "__module__", "") or ""
    return isinstance(node, tuple) and module.split(".")[0] == "optax"


def _captured(examined: ExaminedStep) -> list[jax.Array]:
    """Returns the arrays that a step captures, which are constants of its program."""
    if examined.lowered is None:
        return []
    arrays = arrays_in(examined.traced.jaxpr)
    return list({id(array): array for array in arrays}.values())


def _measured(examined: ExaminedStep) -> tuple[int | None, int | None, str]:
    """Returns the bytes of results and temporaries, or the reason why they are unknown."""
    if examined.lowered is None:
        return None, None, "the step runs in stages, each a separate program"
    analysis = examined.lowered.compile().memory_analysis()
    if analysis is None:
        return None, None, "XLA does not provide a memory analysis on this platform"
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return max(results, 0), analysis.temp_size_in_bytes, ""


def _grouped(
    rows: Sequence[tuple[_Place, int, int, Sequence[int]]], num_devices: int
) -> Iterator[MemoryGroup]:
    """Groups the inputs by kind and name; an array with two places is counted once.

    An argument with many parts, such as a list of layers, becomes a single group.
    """
    parts: dict[tuple[Kind, str], dict[str, None]] = {}
    for place, *_ in rows:
        parts.setdefault(place[:2], {})[place.part] = None
    seen: set[int] = set()
    groups: dict[tuple[Kind, str], list[tuple[int, Sequence[int]]]] = {}
    for place, identity, count, device_bytes in rows:
        is_split = len(parts[place[:2]]) <= _MOST_PARTS
        name = place.argument + (place.part if is_split else "")
        group = groups.setdefault((place.kind, name), [])
        if identity not in seen:
            group.append((count, device_bytes))
        seen.add(identity)
    order = list(Kind)
    for (kind, name), arrays in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        totals = tuple(sum(stored[i] for _, stored in arrays) for i in range(num_devices))
        yield MemoryGroup(kind, name, len(arrays), sum(count for count, _ in arrays), totals)
