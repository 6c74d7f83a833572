"""Bytes per device of a step: what goes in is counted, what XLA allocates is asked of XLA.

Arrays that are on devices are counted by their shards, so that whole copies, rows of a batch and
state that is sharded need no rules of their own. Where there are no arrays, shapes are counted by
the shardings that the step's inputs have.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.explain.collectives import num_bytes
from mirror._src.explain.memory_report import Kind, MemoryGroup, MemoryReport
from mirror._src.program.jaxprs import arrays_in
from mirror._src.run.call import Call
from mirror._src.run.drift import find_returned
from mirror._src.run.examined import ExaminedStep
from mirror._src.utils.naming import argument_names, keys
from mirror._src.variables.variable import Variable

_BY_NAME = {"params": Kind.PARAMETERS, "opt_state": Kind.OPTIMIZER_STATE}
_MOST_OF_AN_ARGUMENT = 8
_CAPTURED = "arrays from outside the step"


class _Place(NamedTuple):
    """An input of a program: its kind, its argument, and its part of the argument."""

    kind: Kind
    argument: str
    part: str


def memory_report(examined: ExaminedStep, replicas: ReplicaDevices) -> MemoryReport:
    """Returns the bytes per device of a call; see the module's docstring.

    Args:
        examined: The call. Its leaves are arrays on the devices, or all of them are types.
        replicas: The devices.
    """
    step = examined.traced.steps[0]
    is_estimate = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in examined.leaves)
    places = [*_state_places(examined.call), *_argument_places(examined)]
    rows = []
    for place, leaf, held in zip(places, examined.leaves, examined.kinds, strict=True):
        sharding = replicas.sharding(held)
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
        platform=replicas.distinct[0].platform,
        is_estimate=is_estimate,
        groups=tuple(_grouped(rows, len(replicas.distinct))),
        result_bytes=results,
        temporary_bytes=temporaries,
        unknown_because=unknown,
    )


def _bytes_of(leaf: Any, sharding: Any, replicas: ReplicaDevices) -> tuple[int, list[int]]:
    """The bytes of a value, and of what each device holds of it."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        shard = jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)
        return num_bytes(leaf), [num_bytes(shard)] * len(replicas.distinct)
    held = dict.fromkeys(replicas.distinct, 0)
    arrays: Sequence[Any] = leaf.arrays if isinstance(leaf, UnstackedArrays) else (leaf,)
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return sum(num_bytes(array) for array in arrays), [held[d] for d in replicas.distinct]


def _state_places(call: Call) -> Iterator[_Place]:
    """The place of each leaf of the nnx objects."""
    if call.structure is None or call.record is None:
        return
    names = call.object_names
    holders = {slot: call.record.holder(i) for i, slot in enumerate(call.structure.slots)}
    for slot in call.structure.leaf_slots:
        kind = slot.kind
        if issubclass(kind, nnx.OptState):
            found = Kind.OPTIMIZER_STATE
        elif issubclass(kind, nnx.Param) or (
            issubclass(kind, Variable) and getattr(holders[slot], "trainable", False)
        ):
            found = Kind.PARAMETERS
        else:
            found = Kind.OTHER_STATE
        of = "" if found is Kind.OPTIMIZER_STATE else f" ({kind.__name__})"
        yield _Place(found, f"{names[slot.path[0]]}{of}", "")


def _argument_places(examined: ExaminedStep) -> Iterator[_Place]:
    """The place of each leaf that is in no nnx object.

    What Optax keeps is optimizer state. Else the user's own names decide: `params` and `opt_state`,
    as attribute, key or argument. What else comes back in a result of the same structure is state.
    """
    call, step = examined.call, examined.traced.steps[0]
    avals = examined.traced.avals[: len(step.out_names)]
    returned = find_returned(call, step, avals)
    args, kwargs = call.tree
    names = argument_names(call.fn, len(args))
    paths, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
    optax_leaves = _in_optax(jax.tree.structure((args, kwargs)))
    for number, i in enumerate(call.layout.dynamic):
        path = paths[i][0]
        argument = names[path[1].idx] if path[0].idx == 0 else path[1].key
        part = keys(path[2:3])
        words = [argument, *(_word(key) for key in path[2:])]
        by_name = [_BY_NAME[word] for word in words if word in _BY_NAME]
        if number in call.layout.per_replica:
            kind = Kind.BATCH
        elif i in optax_leaves:
            kind = Kind.OPTIMIZER_STATE
        elif by_name:
            kind = by_name[0]
        else:
            kind = Kind.OTHER_STATE if i in returned else Kind.ARGUMENTS
        yield _Place(kind, argument, part)


def _word(key: Any) -> str:
    """A step of a path as a name."""
    return str(getattr(key, "name", getattr(key, "key", "")))


def _in_optax(form: Any, start: int = 0, inside: bool = False) -> set[int]:
    """Positions of the leaves inside the states of Optax's transformations."""
    data = form.node_data()
    if data is None:
        return {start} if inside else set()
    kind = data[0]
    module = getattr(kind, "__module__", "") or ""
    inside = inside or (
        isinstance(kind, type) and issubclass(kind, tuple) and module.split(".")[0] == "optax"
    )
    found: set[int] = set()
    for child in form.children():
        if child.num_leaves:
            found |= _in_optax(child, start, inside)
        start += child.num_leaves
    return found


def _captured(examined: ExaminedStep) -> list[jax.Array]:
    """The arrays that a step reads from outside its arguments, which its program is given."""
    if examined.lowered is None:
        return []
    arrays = (array for jaxpr in examined.traced.jaxprs for array in arrays_in(jaxpr))
    return list({id(array): array for array in arrays}.values())


def _measured(examined: ExaminedStep) -> tuple[int | None, int | None, str]:
    """Bytes of results and temporaries, or why they are unknown."""
    if examined.lowered is None:
        return None, None, "the step runs in stages, each a program of its own"
    found = examined.lowered.compile().memory_analysis()
    if found is None:
        return None, None, "XLA has no memory analysis on this platform"
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return max(results, 0), found.temp_size_in_bytes, ""


def _grouped(
    rows: Sequence[tuple[_Place, int, int, Sequence[int]]], num_devices: int
) -> Iterator[MemoryGroup]:
    """Groups by kind and name, an array that stands in two places counted once.

    An argument with many parts, such as a list of layers, is one group.
    """
    parts: dict[tuple[Kind, str], dict[str, None]] = {}
    for place, *_ in rows:
        parts.setdefault(place[:2], {})[place.part] = None
    seen: set[int] = set()
    found: dict[tuple[Kind, str], list[tuple[int, Sequence[int]]]] = {}
    for place, identity, count, held in rows:
        is_apart = len(parts[place[:2]]) <= _MOST_OF_AN_ARGUMENT
        name = place.argument + (place.part if is_apart else "")
        group = found.setdefault((place.kind, name), [])
        if identity not in seen:
            group.append((count, held))
        seen.add(identity)
    order = list(Kind)
    for (kind, name), values in sorted(found.items(), key=lambda item: order.index(item[0][0])):
        held = tuple(sum(each[i] for _, each in values) for i in range(num_devices))
        yield MemoryGroup(kind, name, len(values), sum(count for count, _ in values), held)
