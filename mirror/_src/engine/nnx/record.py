"""`Record`: the values of a set of nnx objects; and `ObjectTable`: the records of recent steps.

`nnx.split` of a large model costs more than the step does, so a set of objects is split once and
remembered. Each step only compares the objects' attributes with what was seen then; when one has
changed, they are split again.
"""

import functools
import itertools
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence, Set
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.devices.op_log import placement_log
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import UnstackedArrays, any_deleted, buffers_of, require_fits
from mirror._src.engine.nnx.structure import (
    Structure,
    holder_at,
    is_equal,
    nodes,
    put,
    read_holder,
    require_arrays,
)
from mirror._src.engine.per_replica import held_by, is_per_replica, per_replica
from mirror._src.engine.recent_arrays import WeakArrays
from mirror._src.engine.storage import read_value, write_value
from mirror._src.engine.variable import spread_over


class Leaves(list[Any]):
    """Leaves of objects, which can be referenced weakly."""

    __slots__ = ("__weakref__",)


class Record:
    """The structure of a set of nnx objects, and the holders of their values.

    Args:
        objects: The objects.
        known: Structures seen so far, by their keys; the new structure is added.

    Attributes:
        structure: Structure of the objects; the same object for all objects with an equal one.
        last: Leaves that the last step wrote; `None` before the first step.
        unchecked: Positions in `last` of the leaves that no launch returned, in a job of several
            processes.
        assigned: Addresses of each leaf that the user has assigned and that is used as it is, by
            position, until a launch replaces it: other arrays of the user may share its memory.
        unshared: Arrays, by id, that were found to share no memory with the objects.
    """

    def __init__(self, objects: Sequence[Any], known: MutableMapping[Hashable, Structure]) -> None:
        structure = Structure(objects)
        self.structure: Structure = known.setdefault(structure.key, structure)
        self.last: Leaves | None = None
        self.unchecked: Sequence[int] = ()
        self.assigned: Mapping[int, Set[int]] = {}
        self.unshared = WeakArrays()
        self._plain = self.structure.treedef == jax.tree.structure([0] * len(structure.slots))
        holders = [holder_at(objects, slot.path) for slot in structure.slots]
        self._variables = [h for h in holders if isinstance(h, nnx.Variable)]
        self._all_variables = len(self._variables) == len(holders)
        self._own = [i for i, slot in enumerate(structure.slots) if slot.is_own]
        self._holders = list(zip(holders, structure.slots, strict=True))
        graph = [node for _, node in nnx.iter_graph(tuple(objects))]
        self._nodes = [vars(node) for node in graph if isinstance(node, nnx.Pytree)]
        self._nodes += [node for node in graph if isinstance(node, dict)]
        self._seen = self._attributes()
        self._unhashed = structure.unhashed

    def _attributes(self) -> list[Any]:
        """Returns the names and values of all attributes; runs in C, for hundreds of nodes."""
        names = itertools.chain.from_iterable(self._nodes)
        return [*names, *itertools.chain.from_iterable(map(dict.values, self._nodes))]

    def read(self) -> list[Any] | None:
        """Returns the leaves, or `None` if an attribute or the structure of a value has changed.

        If they are the leaves that the last step wrote, returns the list `last` itself.
        """
        now = self._attributes()
        if len(now) != len(self._seen) or not all(map(operator.is_, now, self._seen)):
            return None
        if self._unhashed and not all(is_equal(x.value, x.copy) for x in self._unhashed):
            return None
        if self._all_variables:
            values = list(map(read_value, self._variables))
        else:
            values = [read_holder(holder, slot.path[-1]) for holder, slot in self._holders]
        for i in self._own:
            values[i] = held_by(values[i]) if is_per_replica(values[i]) else values[i]
        last = self.last
        if self._plain and last is not None and all(map(operator.is_, values, last)):
            return last
        leaves, treedef = jax.tree.flatten(values)
        if treedef != self.structure.treedef:
            return None
        return last if last is not None and all(map(operator.is_, leaves, last)) else leaves

    def holder(self, i: int) -> Any:
        """Returns the variable, object or container that holds the value of slot `i`."""
        return self._holders[i][0]

    def is_ready(self, leaves: list[Any]) -> bool:
        """Whether these are the leaves that the last step wrote, and none has been deleted."""
        if leaves is not self.last:
            return False
        if self._own:
            held = (x.arrays if isinstance(x, UnstackedArrays) else (x,) for x in leaves)
            leaves = list(itertools.chain.from_iterable(held))
        return not any_deleted(leaves)

    def write(
        self,
        leaves: Sequence[Any],
        unchecked: Sequence[int] = (),
        assigned: Mapping[int, Set[int]] | None = None,
    ) -> None:
        """Writes all leaves into the objects, and records them as ready for the next step."""
        if assigned is not None:
            self.assigned = assigned
        elif self.assigned and self.last is not None:
            before = self.last
            self.assigned = {i: b for i, b in self.assigned.items() if leaves[i] is before[i]}
        self.last = Leaves(leaves)
        self.unchecked = unchecked
        if self._own:
            own = set(self._own)
            leaves = [per_replica(leaf) if i in own else leaf for i, leaf in enumerate(leaves)]
        if self._all_variables and self._plain:
            for _ in map(write_value, self._variables, leaves):
                pass
            return
        values = self.structure.treedef.unflatten(leaves)
        for (holder, slot), value in zip(self._holders, values, strict=True):
            if isinstance(holder, nnx.Variable):
                write_value(holder, value)
            else:
                put(holder, slot.path[-1], value)
        self._seen = self._attributes()


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
        key, records = tuple(map(id, objects)), self._records
        _make_hyperparams_arrays(objects)
        record = Record(objects, self._structures)
        drop = lambda _: records.pop(key, None) and None  # or it keeps the arrays  # noqa: E731
        records[key] = ([_reference(obj, drop) for obj in objects], record)
        while len(self._records) > _MAX_RECORDS:
            self._records.popitem(last=False)
        return record

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
        last = enumerate(record.last or ())
        written = {id(leaf) for i, leaf in last if i not in record.assigned}
        mirrored = []
        for i, leaf in enumerate(leaves):
            if record.structure.is_own[i]:
                mirrored.append(spread_over(record.holder(i), self._replicas))
                continue
            # A buffer that two variables share would be donated twice, which crashes JAX 0.10.2.
            is_placed = isinstance(leaf, jax.Array) and self._replicas.is_placed(leaf)
            if not is_placed:
                its_name = lambda i=i: names()[i]  # noqa: E731
                require_fits(its_name, leaf)
            buffers = buffers_of(leaf) if is_placed else set()
            is_ready = is_placed and taken.isdisjoint(buffers)
            mirrored.append(leaf if is_ready else self._replicas.store(leaf))
            taken |= buffers if is_ready else buffers_of(mirrored[-1])
            if is_ready and id(leaf) not in written:
                assigned[i] = buffers
        if placement_log.on:
            for name, leaf in zip(names(), mirrored, strict=True):
                placement_log.mirrored(name, leaf, self._replicas.devices)
        unchecked: Sequence[int] = ()
        if self._replicas.spans_processes:
            pairs = itertools.zip_longest(mirrored, record.last or ())
            new = {i for i, (a, b) in enumerate(pairs) if a is not b}.union(record.unchecked)
            unchecked = [i for i in sorted(new) if not record.structure.is_own[i]]
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


def _make_hyperparams_arrays(objects: Sequence[Any]) -> None:
    """Makes an array of each number that the user has assigned to a hyperparameter of Optax."""
    optimizers = [node for _, node in nodes(objects) if isinstance(node, nnx.Optimizer)]
    for node in (node for each in optimizers for _, node in nnx.iter_graph(each.opt_state)):
        for name, value in node.items() if isinstance(node, dict) else ():
            if isinstance(value, int | float | np.number) and not isinstance(value, bool):
                node[name] = jnp.asarray(value)


def _reference(obj: Any, on_death: Callable[[Any], None]) -> Callable[[], Any]:
    """Returns a weak reference, or a strong one for variables, which do not support weak ones."""
    try:
        return weakref.ref(obj, on_death)
    except TypeError:
        return lambda: obj
