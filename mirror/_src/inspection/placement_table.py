"""Tables of a strategy's devices, and of the arrays on each device."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mirror._src.base.errors import bytes_in_words, describe
from mirror._src.base.terminal import Table, folded_table
from mirror._src.base.types import PyTree
from mirror._src.devices import backend
from mirror._src.devices.memory import memory_info
from mirror._src.devices.op_log import unlogged
from mirror._src.devices.transfer import UnstackedArrays
from mirror._src.engine.nnx.structure import is_object
from mirror._src.engine.per_replica import held_by, is_per_replica
from mirror._src.inspection.measurement import is_whole

_FIRST, _LAST = 8, 4  # devices that the table of a large strategy shows


def device_table(devices: Iterable[jax.Device]) -> Table:
    """Returns a table of a strategy's devices, one row per replica, without the middle of many."""
    return folded_table(
        ("replica", "logical device", "physical device", "memory"),
        list(enumerate(devices)),
        lambda row: (
            str(row[0]),
            backend.logical_name(row[1]),
            physical_name(row[1]),
            memory_in_words(row[1]),
        ),
        _FIRST,
        _LAST,
    )


def visualize_placement(tree: PyTree) -> Table:
    """Returns a table of the leaves of a tree, with their shapes, sizes and devices.

    Args:
        tree: Pytree of arrays, `PerReplica`s, nnx objects and host values.

    Returns:
        A table to `print` or display in a notebook. The size includes all copies, as
        `2 x 24 bytes`. The last row has the total per device, in which an array that occurs twice
        in the tree counts once.

    >>> import jax.numpy as jnp
    >>> visualize_placement({"w": jnp.ones((4, 2))})
    leaf   shape         bytes     devices
    ['w']  float32[4,2]  32 bytes  /device:CPU:0
    total                32 bytes  /device:CPU:0 32 bytes
    """
    rows, totals = [], bytes_by_device(tree)
    for path, leaf in _leaves(tree):
        value = _array(leaf)
        shards = _shards(value)
        rows.append((path, _shape(leaf), _bytes(value, shards), _devices(value, shards)))
    sums = ", ".join(f"{name} {bytes_in_words(count)}" for name, count in totals.items())
    last = ("total", "", bytes_in_words(sum(totals.values())), sums)
    return Table(("leaf", "shape", "bytes", "devices"), [*rows, last])


def bytes_by_device(tree: PyTree) -> dict[str, int]:
    """Returns the bytes of a tree on each device; an array that occurs twice counts once."""
    totals, counted = dict[str, int](), set[int]()
    leaves = list(_leaves(tree))  # keeps the leaves alive, so that their ids are unique
    for _, leaf in leaves:
        for name, num_bytes in _shards(_array(leaf)) if id(leaf) not in counted else ():
            totals[name] = totals.get(name, 0) + num_bytes
        counted.add(id(leaf))
    return totals


def physical_name(device: jax.Device) -> str:
    """Returns the name of the physical device; all host devices of a CPU have the same one."""
    if device.process_index != jax.process_index():
        return f"of process {device.process_index}"
    physical = backend.physical_of(device)
    if physical is None:
        kind = backend.type_of(device)
        return f"/physical_device:{kind}:{device.local_hardware_id} ({device.device_kind})"
    if physical.device_type == "CPU":
        return physical.name
    return f"{physical.name} ({device.device_kind})"


def memory_in_words(device: jax.Device) -> str:
    """Returns the used and total memory of a device, as text."""
    if device.process_index != jax.process_index():
        return "unknown"
    info = memory_info(device.memory_stats())
    if info is None:
        return "host memory" if backend.type_of(device) == "CPU" else "unknown"
    return f"{info['current'] / 2**30:.1f} of {info['limit'] / 2**30:.1f} GiB"


def _leaves(tree: PyTree) -> Iterator[tuple[str, Any]]:
    """Yields all leaves with their paths, including those in nnx objects and their variables."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_whole):
        for inside, value in _inner_leaves(leaf):
            yield (jax.tree_util.keystr(path) + inside).lstrip(".") or "value", value


def _inner_leaves(leaf: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(leaf, nnx.Variable):
        for path, value in jax.tree_util.tree_leaves_with_path(leaf.get_value(), is_leaf=is_whole):
            yield jax.tree_util.keystr(path), value
    elif is_object(leaf):
        for path, node in nnx.to_flat_state(nnx.state(leaf)):
            for inside, value in _inner_leaves(node):
                yield "".join(f".{key}" for key in path) + inside, value
    else:
        yield "", leaf


def _array(leaf: Any) -> Any:
    """Returns the array that stores a leaf: of a PRNG key, its data."""
    value = held_by(leaf) if is_per_replica(leaf) else leaf
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        with unlogged():
            return jax.random.key_data(value)
    return value


def _shards(value: Any) -> list[tuple[str, int]]:
    """Returns the device and the bytes of every shard."""
    if isinstance(value, UnstackedArrays):
        return [shard for array in value.arrays for shard in _shards(array)]
    if not isinstance(value, jax.Array):
        return [("host", int(getattr(value, "nbytes", 0)))]
    if isinstance(value, jax.core.Tracer) or value.is_deleted():
        return []
    return [(backend.logical_name(s.device), s.data.nbytes) for s in value.addressable_shards]


def _shape(leaf: Any) -> str:
    if is_per_replica(leaf):
        types = [jax.ShapeDtypeStruct(shape, leaf.dtype) for shape in leaf.shapes]
        if len(set(types)) > 1:
            return ", ".join(map(describe, types))
        return f"{leaf.num_replicas} x {describe(types[0])}"
    return describe(leaf)


def _bytes(value: Any, shards: Sequence[tuple[str, int]]) -> str:
    """Returns the size of all shards, of which a traced or a deleted array has none, as text."""
    if len(shards) > 1 and isinstance(value, jax.Array) and value.is_fully_replicated:
        return f"{len(shards)} x {bytes_in_words(shards[0][1])}"
    return bytes_in_words(sum(count for _, count in shards))


def _devices(value: Any, shards: Sequence[tuple[str, int]]) -> str:
    if not shards:
        return "traced" if isinstance(value, jax.core.Tracer) else "deleted"
    return ", ".join(dict.fromkeys(name for name, _ in shards))
