"""`Structure`: the structure of nnx objects, without their values."""

import contextlib
import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from mirror._src.base.dtypes import is_float0
from mirror._src.base.errors import describe
from mirror._src.base.types import ARRAY_LIKE
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.engine.nnx.metrics import Rule, merge_rule
from mirror._src.engine.nnx.paths import Path, follow
from mirror._src.engine.on_read import is_on_read
from mirror._src.engine.per_replica import held_by, is_per_replica

OBJECTS = (nnx.Pytree, nnx.Variable)


def is_object(value: object) -> bool:
    """Whether the value is an nnx object that `run` passes by reference."""
    return isinstance(value, OBJECTS)


class VariableSlot(NamedTuple):
    """Holder of arrays in the objects: a variable, or an attribute that is an array.

    Attributes:
        path: Its path. The first key is the index of the object.
        kind: Type of the variable; `jax.Array` for an attribute.
        is_own: Whether the value is per-replica.
    """

    path: Path
    kind: type
    is_own: bool

    @property
    def local_name(self) -> str:
        """The path within the object, such as `first.kernel`."""
        return ".".join(map(str, self.path[1:])) or "A value"

    def name(self, roots: Sequence[str]) -> str:
        """Returns the full name, such as `model.first.kernel`.

        Args:
            roots: The user's names for the objects.
        """
        return roots[self.path[0]] + "".join(f".{key}" for key in self.path[1:])


class MetricSlots(NamedTuple):
    """An nnx metric among the objects.

    Attributes:
        kind: Class of the metric.
        rule: Rule that merges its states over the replicas; `None` if the class has no rule.
        positions: Position of the leaf of each state, by attribute name.
    """

    kind: type
    rule: Rule | None
    positions: dict[str, int]


class Snapshot(NamedTuple):
    """A static attribute that has no hash, such as a list, and a copy: it may change in place."""

    name: str
    value: Any
    copy: Any

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and is_equal(self.copy, other.copy)


class Structure:
    """The structure of nnx objects without their values.

    Attributes:
        key: Equal for equal structures.
        graphdef: Flax's graph definition of the objects; see `with_snapshots`.
        unhashed: The static attributes that have no hash.
        state_def: Structure of the state, to rebuild the objects from leaves.
        slots: The holders of arrays, in the order of the leaves.
        treedef: Structure of the values of all slots. A slot has one leaf, unless it is a variable
            that holds a pytree.
        leaf_slots: The slot of each leaf.
        is_own: For each leaf, whether it is per-replica.
        has_own: Whether any leaf is per-replica.
        metrics: The nnx metrics among the objects.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        graphdef, state = nnx.split(tuple(objects))
        self.graphdef, self.unhashed = with_snapshots(graphdef)
        flat: list[tuple[Any, Any]] = list(nnx.to_flat_state(state))
        self.slots = tuple(
            VariableSlot(path, _kind(value), is_on_read(value)) for path, value in flat
        )
        values = [v.get_raw_value() if isinstance(v, nnx.Variable) else v for _, v in flat]
        values = [
            held_by(value) if slot.is_own and is_per_replica(value) else value
            for slot, value in zip(self.slots, values, strict=True)
        ]
        self.treedef: Any = jax.tree.structure(values)
        for slot, (_, holder), value in zip(self.slots, flat, values, strict=True):
            _require_supported(slot, holder)
            require_arrays(slot, value)
        # The leaves of the state are in the order of the slots: both are sorted by path.
        self.state_def: Any = jax.tree.structure(
            jax.tree.map(_as_one_array, state, is_leaf=is_per_replica)
        )
        self.leaf_slots = [
            slot
            for slot, value in zip(self.slots, values, strict=True)
            for _ in jax.tree.leaves(value)
        ]
        self.is_own = [slot.is_own for slot in self.leaf_slots]
        self.has_own = any(self.is_own)
        self.metrics = _metrics(objects, self.leaf_slots)
        self.key = (self.graphdef, self.treedef, tuple(s.path for s in self.slots))

    def names(self, roots: Sequence[str]) -> list[str]:
        """Returns the user's name for each leaf.

        Args:
            roots: The user's names for the objects.
        """
        return [slot.name(roots) for slot in self.leaf_slots]


def _metrics(objects: Sequence[Any], slots: Sequence[VariableSlot]) -> list[MetricSlots]:
    """Returns the metrics that hold metric states, in the order of their first leaves."""
    by_path: dict[Path, dict[str, int]] = {}
    for i, slot in enumerate(slots):
        if issubclass(slot.kind, nnx.metrics.MetricState):
            by_path.setdefault(slot.path[:-1], {})[str(slot.path[-1])] = i
    metrics = {path: follow(objects, path) for path in by_path}
    return [
        MetricSlots(type(metrics[path]), merge_rule(metrics[path]), positions)
        for path, positions in by_path.items()
    ]


def _copied(value: Any) -> Any:
    """Returns a copy with the same objects inside, except for those without a hash."""
    try:
        hash(value)
    except TypeError:
        if isinstance(value, list | tuple | dict):
            return jax.tree.map(_copied, value, is_leaf=lambda x: x is not value)
        new = copy.copy(value)
        if not isinstance(value, set):
            vars(new).update({name: _copied(x) for name, x in vars(value).items()})
        return new
    return value


def with_snapshots(graphdef: Any) -> tuple[Any, list[Snapshot]]:
    """Returns a graph definition that has a hash, and its snapshots.

    Raises:
        TypeError: If a static attribute is traced, or has no hash and cannot be compared.
    """
    attributes, snapshots = list(graphdef.attributes), list[Snapshot]()
    for i, (name, static) in enumerate(attributes):
        try:
            hash(static)
        except TypeError:
            if isinstance(static.value, jax.core.Tracer):
                raise
            snapshots.append(_snapshot(name, static.value))
            attributes[i] = name, type(static)(snapshots[-1])
    return dataclasses.replace(graphdef, attributes=attributes), snapshots


def with_copies(graphdef: Any) -> Any:
    """Returns a graph definition with new copies of attributes in place of the snapshots."""
    attributes = [
        (name, type(x)(_copied(static.copy)) if isinstance(static, Snapshot) else x)
        for name, x in graphdef.attributes
        for static in [getattr(x, "value", None)]
    ]
    return dataclasses.replace(graphdef, attributes=attributes)


def _snapshot(name: Any, value: Any) -> Snapshot:
    with contextlib.suppress(Exception):
        snapshot = Snapshot(str(name), value, _copied(value))
        if is_equal(value, snapshot.copy):
            return snapshot
    raise TypeError(
        f"{name} of a model is {describe(value)}, which has no hash and does not equal a copy, so "
        "mirror could not notice that it changes. Make it hashable, such as a tuple or a "
        "dataclass with frozen=True."
    )


def is_equal(a: Any, b: Any) -> bool:
    """Whether two static values are the same or equal; False if they cannot be compared."""
    try:
        return a is b or bool(a == b)
    except Exception:
        return False


def _kind(holder: Any) -> type:
    """Returns the type of a variable, or `jax.Array` for any array, whether traced or not."""
    return type(holder) if isinstance(holder, nnx.Variable) else jax.Array


def _as_one_array(leaf: Any) -> Any:
    """Replaces a `PerReplica` by a single leaf, because a replica has one array in its place."""
    return 0 if is_per_replica(leaf) else leaf


def require_arrays(slot: VariableSlot, value: Any) -> None:
    """Checks that the value of a slot consists of arrays and numbers.

    Raises:
        ValueError: If a leaf is neither.
    """
    for leaf in jax.tree.leaves(value, is_leaf=is_per_replica):
        if not isinstance(leaf, (*ARRAY_LIKE, UnstackedArrays)) or is_float0(leaf):
            raise ValueError(
                f"{slot.local_name} of a model holds {describe(leaf)}, which cannot be mirrored. A "
                "variable must hold arrays and numbers only."
            )


def _require_supported(slot: VariableSlot, holder: Any) -> None:
    if isinstance(holder, nnx.Variable) and (
        holder.get_metadata("ref", False) or holder.get_metadata("hijax", False)
    ):
        raise TypeError(
            f"{slot.local_name} of a model is a Variable with ref=True or hijax=True, whose value "
            "is stored in a mutable reference. Create it without these options: `run` already "
            "updates variables in place."
        )
