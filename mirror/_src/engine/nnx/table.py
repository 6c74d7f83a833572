"""`ObjectTable`: cache of the nnx objects that a strategy has recently run steps on.

`nnx.split` of a large model costs more than the step does, so a set of objects is split once and
remembered. Each step only compares the objects' attributes with what was seen then; when one has
changed, they are split again.
"""

import functools
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any
from weakref import WeakValueDictionary

import jax

from mirror._src.devices.narrowing import require_fits
from mirror._src.devices.op_log import placement_log
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import buffers_of
from mirror._src.engine.nnx.record import Record
from mirror._src.engine.nnx.structure import Structure, require_arrays
from mirror._src.engine.on_read import spread_over

_MAX_RECORDS = 32
_NO_RECORD: tuple[list[Any], Record | None] = ([], None)


class ObjectTable:
    """The records of the sets of objects that a strategy has recently run steps on.

    Args:
        replicas: Devices of the replicas.
    """

    def __init__(self, replicas: ReplicaDevices) -> None:
        self._replicas = replicas
        self._records: OrderedDict[tuple[int, ...], tuple[list[Any], Record]] = OrderedDict()
        self._structures: WeakValueDictionary[Hashable, Structure] = WeakValueDictionary()

    def record(
        self, objects: Sequence[Any], roots: Callable[[], Sequence[str]]
    ) -> tuple[Record, list[Any]]:
        """Returns the record of these objects, and their leaves on the replicas' devices.

        Leaves on other devices are copied and written back: a model may be created anywhere.

        Args:
            objects: The nnx objects of one call.
            roots: Returns the user's names for the objects.

        Raises:
            ValueError: If a leaf is not an array, or has been deleted.
            RuntimeError: If a leaf is a tracer.
        """
        references, record = self._records.get(tuple(map(id, objects)), _NO_RECORD)
        leaves = None
        if record is not None and all(map(operator.is_, map(operator.call, references), objects)):
            leaves = record.read()
        if record is None or leaves is None:
            record = self._create(objects)
            leaves = record.read() or []
        if not record.is_ready(leaves):
            leaves = self._mirror(record, leaves, roots)
        return record, leaves

    def _create(self, objects: Sequence[Any]) -> Record:
        key = tuple(map(id, objects))
        record = Record(objects, self._structures)
        drop = self._make_drop(key)
        self._records[key] = ([_reference(obj, drop) for obj in objects], record)
        while len(self._records) > _MAX_RECORDS:
            self._records.popitem(last=False)
        return record

    def _make_drop(self, key: tuple[int, ...]) -> Callable[[Any], None]:
        """Returns a callback that drops a record, which would keep the arrays of dead objects."""
        records = self._records
        return lambda _: records.pop(key, None) and None

    def _mirror(
        self, record: Record, leaves: list[Any], roots: Callable[[], Sequence[str]]
    ) -> list[Any]:
        names = functools.cache(lambda: record.structure.names(roots()))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, jax.core.Tracer):
                raise RuntimeError(
                    f"strategy.run was called inside jax.jit, grad or vmap: {names()[i]} is a "
                    "tracer. Call it from regular Python code: strategy.run compiles the step "
                    "itself."
                )
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError(
                    f"{names()[i]} holds a deleted array. Its buffer was donated to an earlier "
                    "`run`, through another model that shares it or through donate_argnums. If two "
                    "models start from the same array, give each a copy: jnp.copy(x)."
                )
            require_arrays(record.structure.leaf_slots[i], leaf)
        taken: set[int] = set()
        assigned: dict[int, Set[int]] = {}
        written = set(map(id, record.last or ()))
        mirrored = []
        for i, leaf in enumerate(leaves):
            if record.structure.is_own[i]:
                mirrored.append(spread_over(record.holder(i), self._replicas))
                continue
            # A buffer that two variables share would be donated twice, which crashes JAX 0.10.2.
            is_placed = isinstance(leaf, jax.Array) and self._replicas.is_placed(leaf)
            if not is_placed:
                require_fits(functools.partial(_name_of, names, i), leaf)
            is_ready = is_placed and taken.isdisjoint(buffers_of(leaf))
            mirrored.append(leaf if is_ready else self._replicas.store(leaf))
            taken |= buffers_of(mirrored[-1])
            if is_ready and (id(leaf) not in written or i in record.assigned):
                assigned[i] = buffers_of(leaf)
        if placement_log.on:
            for name, leaf in zip(names(), mirrored, strict=True):
                placement_log.mirrored(name, leaf, self._replicas.devices)
        unchecked: Sequence[int] = ()
        if self._replicas.spans_processes:
            new, is_own = record.unwritten(mirrored), record.structure.is_own
            unchecked = [i for i in new if not is_own[i]]
        record.write(mirrored, unchecked, assigned)
        return mirrored

    def unchecked(self, record: Record) -> Sequence[int]:
        """Returns the positions of the leaves of a record that no launch returned."""
        if not record.unchecked or record.last is None:
            return ()
        return self.exclude_checked(record.last, record.unchecked)

    def exclude_checked(self, leaves: list[Any], positions: Sequence[int]) -> Sequence[int]:
        """Returns the positions without the leaves that steps wrote into other objects."""
        for _, record in self._records.values():
            if record.last is None or not positions:
                continue
            unchecked = set(record.unchecked)
            ids = {id(leaf) for i, leaf in enumerate(record.last) if i not in unchecked}
            positions = [i for i in positions if id(leaves[i]) not in ids]
        return positions


def _reference(obj: Any, on_death: Callable[[Any], None]) -> Callable[[], Any]:
    """Returns a weak reference, or a strong one for variables, which do not support weak ones."""
    try:
        return weakref.ref(obj, on_death)
    except TypeError:
        return lambda: obj


def _name_of(names: Callable[[], Sequence[str]], i: int) -> str:
    return names()[i]
