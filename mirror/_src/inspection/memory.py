"""Measures the memory of a step in bytes per device.

Inputs are counted; results and temporaries come from XLA's memory analysis. Arrays on devices are
counted shard by shard, so that whole copies, per-replica batches and sharded state need no special
cases. Without arrays, shapes are counted with the shardings of the step's inputs.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from mirror._src.base.dtypes import num_bytes
from mirror._src.base.naming import argument_names, keys
from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.engine.call import Call
from mirror._src.engine.donated_state import find_returned
from mirror._src.engine.examined import ExaminedStep
from mirror._src.engine.variable import Variable
from mirror._src.inspection.memory_report import Kind, MemoryGroup, MemoryReport
from mirror._src.jaxprs.equations import arrays_in

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
    optax_leaves = _find_optax_leaves((args, kwargs))
    for number, i in enumerate(call.layout.dynamic):
        path = paths[i][0]
        argument = names[path[1].idx] if path[0].idx == 0 else path[1].key
        part = keys(path[2:3])
        words = [argument, *(_key_name(key) for key in path[2:])]
        by_name = [_BY_NAME[word] for word in words if word in _BY_NAME]
        if number in call.layout.per_replica:
            kind = Kind.BATCH
        elif i in optax_leaves:
            kind = Kind.OPTIMIZER_STATE
        elif by_name:
            kind = by_name[0]
        else:
            kind = Kind.OTHER_STATE if number in returned else Kind.ARGUMENTS
        yield _Place(kind, argument, part)


def _key_name(key: Any) -> str:
    """Returns the name of one key of a pytree path."""
    return str(getattr(key, "name", getattr(key, "key", "")))


def _find_optax_leaves(tree: Any) -> set[int]:
    """Returns the positions of the leaves inside states of Optax transformations."""
    positions, start = set[int](), 0
    for node in jax.tree.leaves(tree, is_leaf=_is_optax):
        stop = start + len(jax.tree.leaves(node))
        if _is_optax(node):
            positions.update(range(start, stop))
        start = stop
    return positions


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
