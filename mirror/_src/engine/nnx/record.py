"""`Record`: reads and writes the values of a set of nnx objects, and detects changes to them."""

import itertools
import operator
from collections.abc import Hashable, Iterable, Mapping, MutableMapping, Sequence, Set
from typing import Any

import jax
from flax import nnx

from mirror._src.devices.transfer import any_deleted
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.engine.nnx.paths import Path, follow, holder_at, nodes, put, read_holder
from mirror._src.engine.nnx.structure import Structure, is_equal
from mirror._src.engine.per_replica import held_by, is_per_replica, per_replica
from mirror._src.engine.raw_value import read_value, write_value


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
    """

    def __init__(self, objects: Sequence[Any], known: MutableMapping[Hashable, Structure]) -> None:
        structure = Structure(objects)
        self.structure: Structure = known.setdefault(structure.key, structure)
        self.last: Leaves | None = None
        self.unchecked: Sequence[int] = ()
        self.assigned: Mapping[int, Set[int]] = {}
        self._plain = self.structure.treedef == jax.tree.structure([0] * len(structure.slots))
        holders = [holder_at(objects, slot.path) for slot in structure.slots]
        self._variables = [h for h in holders if isinstance(h, nnx.Variable)]
        self._all_variables = len(self._variables) == len(holders)
        self._own = [i for i, slot in enumerate(structure.slots) if slot.is_own]
        self._holders = list(zip(holders, structure.slots, strict=True))
        self._nodes = [vars(node) for _, node in nodes(objects)]
        self._nodes += [d for _, d in nnx.iter_graph(tuple(objects)) if isinstance(d, dict)]
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

    def unwritten(self, leaves: Sequence[Any]) -> list[int]:
        """Returns the positions of the leaves that differ from what the last step wrote."""
        if self.last is None:
            return list(range(len(leaves)))
        pairs = enumerate(zip(leaves, self.last, strict=True))
        return [i for i, (a, b) in pairs if a is not b or i in self.unchecked]

    def holder(self, i: int) -> Any:
        """Returns the variable, object or container that holds the value of slot `i`."""
        return self._holders[i][0]

    def assigned_to(self, positions: Iterable[int]) -> Set[int]:
        """Returns the addresses of the leaves at some positions that the user has assigned."""
        return frozenset[int]().union(*(self.assigned[i] for i in positions if i in self.assigned))

    def is_ready(self, leaves: list[Any]) -> bool:
        """Whether these are the leaves that the last step wrote, and none has been deleted."""
        if leaves is not self.last:
            return False
        if self._own:
            leaves = list(itertools.chain.from_iterable(map(_arrays, leaves)))
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

    def set_attributes(
        self, objects: Sequence[Any], changes: Iterable[tuple[Path, str, Any]]
    ) -> None:
        """Sets static attributes, given as path of the object, name and value."""
        for path, name, value in changes:
            setattr(follow(objects, path), name, value)


def _arrays(leaf: Any) -> Sequence[Any]:
    return leaf.arrays if isinstance(leaf, UnstackedArrays) else (leaf,)
