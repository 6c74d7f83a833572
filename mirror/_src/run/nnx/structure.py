"""`Structure`: what nnx objects look like without their values, and where they hold arrays."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.run.nnx.metrics import Rule, merge_rule
from mirror._src.run.nnx.paths import Path, follow
from mirror._src.utils.errors import describe
from mirror._src.values.per_replica import held_by, is_float0, is_per_replica
from mirror._src.variables.on_read import is_own


def is_object(value: object) -> bool:
    """Whether the value is an nnx object that `run` passes by reference."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


class VariableSlot(NamedTuple):
    """One place in the objects that holds arrays: a variable, or an array as an attribute.

    Attributes:
        path: where it is.
        kind: the type of the variable, or of the array.
        is_own: whether each replica has a value of its own there.
    """

    path: Path
    kind: type
    is_own: bool

    @property
    def place(self) -> str:
        """`first.kernel`: the path within its object."""
        return ".".join(map(str, self.path[1:])) or "A value"

    def name(self, roots: Sequence[str]) -> str:
        """`model.first.kernel`, where the roots are what the user calls the objects."""
        return roots[self.path[0]] + "".join(f".{key}" for key in self.path[1:])


class MetricSlots(NamedTuple):
    """An nnx metric among the objects.

    Attributes:
        kind: Its class.
        rule: Merges its states over the replicas; `None` where that is not known.
        places: For each of its states, by attribute name, the position of its leaf.
    """

    kind: type
    rule: Rule | None
    places: dict[str, int]


class Structure:
    """What objects look like without their values: equal for equal models, and hashable.

    Attributes:
        graphdef: flax's description of the objects.
        state_def: the state without its arrays, to rebuild the objects from.
        slots: the places that hold arrays, in the order of the leaves.
        treedef: how the leaves lie in the slots (one for each, unless a variable holds a tree).
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self.graphdef: Any
        self.graphdef, state = nnx.split(tuple(objects))
        flat: list[tuple[Any, Any]] = list(nnx.to_flat_state(state))
        self.slots = tuple(VariableSlot(path, _kind(value), is_own(value)) for path, value in flat)
        values = [v.get_raw_value() if isinstance(v, nnx.Variable) else v for _, v in flat]
        values = [
            held_by(value) if slot.is_own and is_per_replica(value) else value
            for slot, value in zip(self.slots, values, strict=True)
        ]
        self.treedef: Any = jax.tree.structure(values)
        for slot, (_, holder), value in zip(self.slots, flat, values, strict=True):
            _require_supported(slot, holder)
            require_arrays(slot, value)
        # The leaves of the state come in the order of its flat form: both are sorted by path.
        self.state_def: Any = jax.tree.structure(jax.tree.map(_one, state, is_leaf=is_per_replica))
        self.leaf_slots = [
            slot
            for slot, value in zip(self.slots, values, strict=True)
            for _ in jax.tree.leaves(value)
        ]
        self.is_own = [slot.is_own for slot in self.leaf_slots]
        self.metrics = _metrics(objects, self.leaf_slots)
        self._key = (self.graphdef, self.treedef, tuple(s.path for s in self.slots))
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._key == other._key

    def names(self, roots: Sequence[str]) -> list[str]:
        """The user's name of each leaf."""
        return [slot.name(roots) for slot in self.leaf_slots]


def _metrics(objects: Sequence[Any], slots: Sequence[VariableSlot]) -> list[MetricSlots]:
    """The metrics that hold metric states, in the order of their first leaves."""
    found: dict[Path, dict[str, int]] = {}
    for i, slot in enumerate(slots):
        if issubclass(slot.kind, nnx.metrics.MetricState):
            found.setdefault(slot.path[:-1], {})[str(slot.path[-1])] = i
    holders = {path: follow(objects, path) for path in found}
    return [
        MetricSlots(type(holders[path]), merge_rule(holders[path]), places)
        for path, places in found.items()
    ]


def _kind(holder: Any) -> type:
    """The type of a variable; arrays that stand in none are one kind, traced or not."""
    return type(holder) if isinstance(holder, nnx.Variable) else jax.Array


def _one(leaf: Any) -> Any:
    """A leaf in the place of a `PerReplica`: a replica has one array there."""
    return 0 if is_per_replica(leaf) else leaf


def require_arrays(slot: VariableSlot, value: Any) -> None:
    """Checks that the value of a slot consists of arrays and numbers.

    Raises:
        ValueError: If a leaf is neither.
    """
    for leaf in jax.tree.leaves(value, is_leaf=is_per_replica):
        number = jax.Array | np.ndarray | np.generic | int | float | complex
        if not isinstance(leaf, number | UnstackedArrays) or is_float0(leaf):
            raise ValueError(
                f"{slot.place} of a model holds {describe(leaf)}, which is no array: it cannot be "
                "mirrored."
            )


def _require_supported(slot: VariableSlot, holder: Any) -> None:
    if isinstance(holder, nnx.Variable) and (
        holder.get_metadata("ref", False) or holder.get_metadata("hijax", False)
    ):
        raise TypeError(
            f"{slot.place} of a model is a Variable with ref=True or hijax=True, whose value "
            "lives in a mutable reference. Create it without: `run` passes variables by "
            "reference itself."
        )
