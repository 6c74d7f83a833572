"""`Record`: a set of nnx objects as last seen; reads their values and writes them back."""

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import nnx

from mirror._src.devices.transfer import any_deleted
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.run.nnx.paths import Path, follow, holder_at, nodes, put, read_holder
from mirror._src.run.nnx.structure import Structure
from mirror._src.utils.types import Array
from mirror._src.values.per_replica import held_by, is_per_replica, per_replica
from mirror._src.variables.raw_value import read_value, write_value


class Record:
    """A set of objects as last seen: where their values are, and what would show a change."""

    def __init__(self, objects: Sequence[Any], known: dict[Structure, Structure]) -> None:
        structure = Structure(objects)
        self.structure: Structure = known.setdefault(structure, structure)
        self.last: list[Array] | None = None
        self._plain = self.structure.treedef == jax.tree.structure([0] * len(structure.slots))
        holders = [holder_at(objects, slot.path) for slot in structure.slots]
        self._variables = [h for h in holders if isinstance(h, nnx.Variable)]
        self._all_variables = len(self._variables) == len(holders)
        self._own = [i for i, slot in enumerate(structure.slots) if slot.is_own]
        self._places = list(zip(holders, structure.slots, strict=True))
        self._nodes = [vars(node) for _, node in nodes(objects)]
        self._nodes += [d for _, d in nnx.iter_graph(tuple(objects)) if isinstance(d, dict)]
        self._seen = self._attributes()

    def unchanged(self) -> bool:
        """Whether every attribute of every node is the object it was."""
        now = self._attributes()
        return len(now) == len(self._seen) and all(map(operator.is_, now, self._seen))

    def _attributes(self) -> list[Any]:
        """The names and values of all nodes' attributes; hundreds of nodes, so all in C."""
        names = itertools.chain.from_iterable(self._nodes)
        return [*names, *itertools.chain.from_iterable(map(dict.values, self._nodes))]

    def read(self) -> list[Any] | None:
        """The leaves, as they are; `None` if a variable holds another structure than it did.

        Where they are those that the last step left, it is that very list.
        """
        if self._all_variables:
            values = list(map(read_value, self._variables))
        else:
            values = [read_holder(holder, slot.path[-1]) for holder, slot in self._places]
        for i in self._own:
            values[i] = held_by(values[i]) if is_per_replica(values[i]) else values[i]
        if self._plain and self._are_last(values):
            return self.last
        leaves, treedef = jax.tree.flatten(values)
        if treedef != self.structure.treedef:
            return None
        return self.last if self._are_last(leaves) else leaves

    def _are_last(self, leaves: list[Any]) -> bool:
        return self.last is not None and all(map(operator.is_, leaves, self.last))

    def holder(self, i: int) -> Any:
        """The variable of a slot."""
        return self._places[i][0]

    def is_ready(self, leaves: list[Any]) -> bool:
        """Whether these are the leaves that the last step left, and none has been deleted."""
        if leaves is not self.last:
            return False
        if self._own:
            leaves = list(itertools.chain.from_iterable(map(_arrays, leaves)))
        return not any_deleted(leaves)

    def write(self, leaves: Sequence[Any]) -> None:
        """Writes all leaves back, and remembers them as ready for the next step."""
        self.last = list(leaves)
        if self._own:
            own = set(self._own)
            leaves = [per_replica(leaf) if i in own else leaf for i, leaf in enumerate(leaves)]
        if self._all_variables and self._plain:
            for _ in map(write_value, self._variables, leaves):
                pass
            return
        values = self.structure.treedef.unflatten(leaves)
        for (holder, slot), value in zip(self._places, values, strict=True):
            if isinstance(holder, nnx.Variable):
                write_value(holder, value)
            else:
                put(holder, slot.path[-1], value)
        self._seen = self._attributes()

    def set_attributes(
        self, objects: Sequence[Any], changes: Iterable[tuple[Path, str, Any]]
    ) -> None:
        """Sets static attributes as the step did."""
        for path, name, value in changes:
            setattr(follow(objects, path), name, value)


def _arrays(leaf: Any) -> Sequence[Any]:
    return leaf.arrays if isinstance(leaf, UnstackedArrays) else (leaf,)
