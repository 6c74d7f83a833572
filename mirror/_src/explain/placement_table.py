"""Tables of the devices of a strategy, and of what lies on which device."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mirror._src.devices import backend
from mirror._src.devices.memory import memory_info
from mirror._src.devices.op_log import unlogged
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.run.nnx.structure import is_object
from mirror._src.utils.errors import bytes_in_words, describe
from mirror._src.utils.tables import Table
from mirror._src.utils.types import PyTree
from mirror._src.values.per_replica import held_by, is_per_replica


def device_table(devices: Iterable[jax.Device]) -> Table:
    """The devices of a strategy: replica, logical device, physical device, memory."""
    return Table(
        ("replica", "logical device", "physical device", "memory"),
        (
            (str(i), backend.logical_name(d), physical_name(d), memory_in_words(d))
            for i, d in enumerate(devices)
        ),
    )


def visualize_placement(tree: PyTree) -> Table:
    """What lies where: a row for each leaf with its shape, its bytes and its devices.

    Args:
        tree: arrays, `PerReplica`s, nnx objects, host values, in any nest.

    Returns:
        A table to `print`; a notebook shows it. Bytes are those of all copies, with their number
        where there are several. A last row sums up for each device; there an array that stands in
        the tree twice counts once.

    >>> import jax.numpy as jnp
    >>> visualize_placement({"w": jnp.ones((4, 2))})
    leaf   shape         bytes     devices
    ['w']  float32[4,2]  32 bytes  /device:CPU:0
    total                32 bytes  /device:CPU:0 32 bytes
    """
    rows, held, counted = [], dict[str, int](), set[int]()
    leaves = list(_leaves(tree))
    for path, leaf in leaves:
        value = _array(leaf)
        parts = _parts(value)
        for name, num_bytes in parts if id(leaf) not in counted else ():
            held[name] = held.get(name, 0) + num_bytes
        counted.add(id(leaf))
        size = _bytes(parts, _is_copied(value))
        rows.append((path, _shape(leaf), size, _where(value, parts)))
    sums = ", ".join(f"{name} {bytes_in_words(count)}" for name, count in held.items())
    last = ("total", "", bytes_in_words(sum(held.values())), sums)
    return Table(("leaf", "shape", "bytes", "devices"), [*rows, last])


def physical_name(device: jax.Device) -> str:
    """One CPU is one physical device, however many host devices it is split into."""
    physical = backend.physical_of(device)
    if physical is None:
        kind = backend.type_of(device)
        return f"/physical_device:{kind}:{device.local_hardware_id} ({device.device_kind})"
    if physical.device_type == "CPU":
        return physical.name
    return f"{physical.name} ({device.device_kind})"


def memory_in_words(device: jax.Device) -> str:
    """How much of its memory is taken."""
    info = memory_info(device.memory_stats())
    if info is None:
        return "host memory" if backend.type_of(device) == "CPU" else "unknown"
    return f"{info['current'] / 2**30:.1f} of {info['limit'] / 2**30:.1f} GiB"


def _leaves(tree: PyTree) -> Iterator[tuple[str, Any]]:
    """The leaves with their paths; nnx objects are opened, and what their variables hold."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_whole):
        for inside, value in _opened(leaf):
            yield (jax.tree_util.keystr(path) + inside).lstrip(".") or "value", value


def _opened(leaf: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(leaf, nnx.Variable):
        for path, value in jax.tree_util.tree_leaves_with_path(leaf.get_value(), is_leaf=_is_whole):
            yield jax.tree_util.keystr(path), value
    elif is_object(leaf):
        for parts, held in nnx.to_flat_state(nnx.state(leaf)):
            for inside, value in _opened(held):
                yield "".join(f".{part}" for part in parts) + inside, value
    else:
        yield "", leaf


def _is_whole(value: object) -> bool:
    return is_per_replica(value) or is_object(value)


def _array(leaf: Any) -> Any:
    """The array that a leaf is, or is made of."""
    value = held_by(leaf) if is_per_replica(leaf) else leaf
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        with unlogged():
            return jax.random.key_data(value)
    return value


def _parts(value: Any) -> list[tuple[str, int]]:
    """Where its bytes are: device and bytes, for each shard."""
    if isinstance(value, UnstackedArrays):
        return [part for array in value.arrays for part in _parts(array)]
    if not isinstance(value, jax.Array):
        return [("host", int(getattr(value, "nbytes", 0)))]
    if isinstance(value, jax.core.Tracer) or value.is_deleted():
        return []
    return [(backend.logical_name(s.device), s.data.nbytes) for s in value.addressable_shards]


def _shape(leaf: Any) -> str:
    if is_per_replica(leaf):
        rows = [jax.ShapeDtypeStruct(shape, leaf.dtype) for shape in leaf.shapes]
        if len(set(rows)) > 1:
            return ", ".join(map(describe, rows))
        return f"{leaf.num_replicas} x {describe(rows[0])}"
    return describe(leaf)


def _bytes(parts: Sequence[tuple[str, int]], copies: bool) -> str:
    """The bytes of all shards, of which whole copies are counted."""
    if copies and len(parts) > 1:
        return f"{len(parts)} x {bytes_in_words(parts[0][1])}"
    return bytes_in_words(sum(count for _, count in parts))


def _is_copied(value: Any) -> bool:
    traced = isinstance(value, jax.core.Tracer)
    return isinstance(value, jax.Array) and not traced and value.is_fully_replicated


def _where(value: Any, parts: Sequence[tuple[str, int]]) -> str:
    if not parts:
        return "traced" if isinstance(value, jax.core.Tracer) else "deleted"
    return ", ".join(dict.fromkeys(name for name, _ in parts))
