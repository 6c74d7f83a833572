"""`ObjectTable`: cache of the nnx objects that a strategy has recently run steps on.

`nnx.split` of a large model costs more than the step does, so a set of objects is split once and
remembered. Each step only compares the objects' attributes with what was seen then; when one has
changed, they are split again.
"""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mirror._src.devices.op_log import placement_log
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import buffers_of
from mirror._src.run.nnx.record import Record
from mirror._src.run.nnx.structure import Structure, require_arrays
from mirror._src.utils.types import Array
from mirror._src.variables.on_read import spread_over

_MOST_RECORDS = 32


class ObjectTable:
    """The records of the objects that a strategy has met lately.

    Args:
        replicas: Devices of the replicas.
        holds_slices: Whether leaves may stay sharded over the devices.
    """

    def __init__(self, replicas: ReplicaDevices, *, holds_slices: bool = False) -> None:
        self._replicas = replicas
        self._holds_slices = holds_slices
        self._records: OrderedDict[tuple[int, ...], tuple[list[Any], Record]] = OrderedDict()
        self._structures: dict[Structure, Structure] = {}

    def record(
        self, objects: Sequence[Any], roots: Callable[[], Sequence[str]]
    ) -> tuple[Record, list[Any]]:
        """The record of these objects, and their leaves on the replicas' devices.

        What is not there yet is copied there and written back: a model may be created anywhere.

        Args:
            objects: the nnx objects of one call.
            roots: what the user calls them.

        Raises:
            ValueError: a leaf is no array, or has been deleted.
            RuntimeError: a leaf is being traced.
        """
        record = self._known(objects) or self._remember(objects)
        leaves = record.read()
        if leaves is None:  # a variable holds another structure than it did
            record = self._remember(objects)
            leaves = record.read() or []
        if not record.is_ready(leaves):
            leaves = self._mirror(record, leaves, roots)
        return record, leaves

    def last(self, objects: Sequence[Any]) -> Record | None:
        """The record of objects that hold what the last step left in them; `None` of others."""
        record = self._known(objects)
        leaves = record.read() if record is not None else None
        return record if record and leaves is not None and record.is_ready(leaves) else None

    def _known(self, objects: Sequence[Any]) -> Record | None:
        """The record of these very objects, if no attribute of theirs has changed."""
        alive, record = self._records.get(tuple(map(id, objects)), ([], None))
        if record is None or not all(a() is b for a, b in zip(alive, objects, strict=True)):
            return None
        return record if record.unchanged() else None

    def _remember(self, objects: Sequence[Any]) -> Record:
        key = tuple(map(id, objects))
        record = Record(objects, self._structures)
        self._records[key] = ([_reference(obj, self._forget(key)) for obj in objects], record)
        while len(self._records) > _MOST_RECORDS:
            self._records.popitem(last=False)
        return record

    def _forget(self, key: tuple[int, ...]) -> Callable[[Any], None]:
        """Drops a record when one of its objects is gone, or it would keep the arrays alive."""
        records = self._records
        return lambda _: records.pop(key, None) and None

    def _is_there(self, leaf: Array) -> bool:
        if self._replicas.is_mirrored(leaf):
            return True
        return self._holds_slices and self._replicas.is_sharded(leaf)

    def _mirror(
        self, record: Record, leaves: list[Any], roots: Callable[[], Sequence[str]]
    ) -> list[Any]:
        names = functools.cache(lambda: record.structure.names(roots()))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, jax.core.Tracer):
                raise RuntimeError(
                    f"strategy.run was called inside jax.jit, grad or vmap: {names()[i]} is a "
                    "tracer. Call it outside; it compiles by itself."
                )
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError(
                    f"{names()[i]} holds an array that has been deleted: a `run` gave up the "
                    "buffer under another name, another model that shared it or donate_argnums. "
                    "Copy arrays that two models are to hold: jnp.copy(x)."
                )
            require_arrays(record.structure.leaf_slots[i], leaf)
        taken: set[int] = set()
        mirrored = []
        for i, leaf in enumerate(leaves):
            if record.structure.is_own[i]:
                mirrored.append(spread_over(record.holder(i), self._replicas))
                continue
            own = isinstance(leaf, jax.Array) and self._is_there(leaf)
            # One buffer in two variables would be donated twice, which crashes JAX 0.10.2.
            fresh = own and taken.isdisjoint(buffers_of(leaf))
            mirrored.append(leaf if fresh else self._replicas.mirror(leaf))
            taken |= buffers_of(mirrored[-1])
        if placement_log.on:
            for name, leaf in zip(names(), mirrored, strict=True):
                placement_log.mirrored(name, leaf, self._replicas.devices)
        record.write(mirrored)
        return mirrored


def _reference(obj: Any, gone: Callable[[Any], None]) -> Callable[[], Any]:
    """A weak reference where the type allows one; variables have none."""
    try:
        return weakref.ref(obj, gone)
    except TypeError:
        return lambda: obj
