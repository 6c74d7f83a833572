"""`Structure`: nnx objects without their values; and copies of them, for the trace of a replica."""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.errors import describe, listing, no_values
from mirror._src.base.types import ARRAY_LIKE, Array, is_float0
from mirror._src.devices.transfer import UnstackedArrays
from mirror._src.engine.nnx.metrics import Rule, merge_rule
from mirror._src.engine.per_replica import held_by, is_per_replica
from mirror._src.engine.variable import is_on_read

Path = tuple[Any, ...]


def follow(objects: Any, path: Path) -> Any:
    """Returns the node, variable or array at a path."""
    node = objects
    for key in path:
        node = child(node, key)
    return node


def child(node: Any, key: Any) -> Any:
    """Returns an attribute or item of a node."""
    if isinstance(key, str) and not isinstance(node, dict | nnx.State) and hasattr(node, key):
        return getattr(node, key)
    return node[key]


def put(node: Any, key: Any, value: Any) -> None:
    """Sets an attribute or item of a node."""
    if isinstance(key, str) and isinstance(node, nnx.Pytree) and hasattr(node, key):
        setattr(node, key, value)
    else:
        node[key] = value


def holder_at(objects: Sequence[Any], path: Path) -> Any:
    """Returns the variable at a path, or the object or container that holds the array there."""
    node = follow(objects, path)
    return node if isinstance(node, nnx.Variable) else follow(objects, path[:-1])


def read_holder(holder: Any, key: Any) -> Any:
    """Returns the raw value of a variable, or the attribute or item of any other holder."""
    return holder.get_raw_value() if isinstance(holder, nnx.Variable) else child(holder, key)


def nodes(objects: Sequence[Any]) -> Iterator[tuple[Path, nnx.Pytree]]:
    """Yields the nnx objects that are not variables, each with its path."""
    for path, node in nnx.iter_graph(tuple(objects)):
        if isinstance(node, nnx.Pytree):
            yield path, node


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
        return ".".join([roots[self.path[0]], *map(str, self.path[1:])])


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
            options = holder.get_metadata() if isinstance(holder, nnx.Variable) else {}
            if options.get("ref") or options.get("hijax"):
                raise TypeError(
                    f"{slot.local_name} of a model is a Variable with ref=True or hijax=True, "
                    "whose value is stored in a mutable reference. Create it without these "
                    "options: `run` already updates variables in place."
                )
            require_arrays(slot, value)
        # The leaves of the state are in the order of the slots: both are sorted by path.
        # A replica has one array in place of a `PerReplica`.
        is_leaf = is_per_replica if any(slot.is_own for slot in self.slots) else None
        self.state_def: Any = jax.tree.structure(state, is_leaf=is_leaf)
        leaves = zip(self.slots, map(jax.tree.leaves, values), strict=True)
        self.leaf_slots = [slot for slot, held in leaves for _ in held]
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
    metrics = ((follow(objects, path), positions) for path, positions in by_path.items())
    return [MetricSlots(type(each), merge_rule(each), positions) for each, positions in metrics]


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


def require_arrays(slot: VariableSlot, value: Any) -> None:
    """Checks that the value of a slot consists of arrays and numbers.

    Raises:
        ValueError: If a leaf is neither.
    """
    for leaf in jax.tree.leaves(value, is_leaf=is_per_replica):
        if not isinstance(leaf, (*ARRAY_LIKE, UnstackedArrays)) or is_float0(leaf):
            fix = no_values(leaf) or "A variable must hold arrays and numbers only."
            raise ValueError(
                f"{slot.local_name} of a model holds {describe(leaf)}, which cannot be mirrored. "
                f"{fix}"
            )


_DYNAMIC = (nnx.Pytree, nnx.Variable, jax.Array, np.ndarray, dict, list, tuple)


class ReplicaCopies:
    """One replica's copies of the nnx objects while a step is traced.

    Args:
        structure: Structure of the objects.
        leaves: Leaves of the objects, as tracers.
        axis_name: Name of the replica axis.

    Attributes:
        objects: The copies.
        keys: For each PRNG key, by position among the leaves, the key and the replica's own key.
    """

    def __init__(self, structure: Structure, leaves: Sequence[Array], axis_name: str) -> None:
        self.structure = structure
        self.keys: dict[int, tuple[Array, Array]] = {}
        self._given = list(leaves)
        self._axis_name = axis_name
        replica_leaves = [
            self._fold(i, leaf) if slot.kind is nnx.RngKey else leaf
            for i, (slot, leaf) in enumerate(zip(structure.leaf_slots, leaves, strict=True))
        ]
        state = structure.state_def.unflatten(replica_leaves)
        self.objects = nnx.merge(with_copies(structure.graphdef), state)
        self._statics = [(path, node, _statics(node)) for path, node in nodes(self.objects)]

    def _fold(self, i: int, key: Array) -> Array:
        """Returns a key that differs between replicas; the stored key stays mirrored."""
        fold = jax.random.fold_in
        for _ in range(key.ndim):
            fold = jax.vmap(fold, (0, None))
        folded = fold(key, jax.lax.axis_index(self._axis_name))
        self.keys[i] = (key, folded)
        return folded

    def collect(self, step_name: str, roots: Sequence[str]) -> list[Array]:
        """Returns the leaves after the step.

        Args:
            step_name: Name of the step function.
            roots: The user's names for the objects.

        Raises:
            ValueError: If the step changed the structure of the objects.
        """
        try:
            after = Structure(self.objects)
        except TypeError:  # a traced value among the static attributes has no hash
            names = self._traced_attributes(roots)
            if not names:
                raise
            attribute = names[0].rpartition(".")[2]
            raise ValueError(
                f"{step_name} stored a traced value in {', '.join(names)}, which is not "
                "a variable, so it would not be updated after the step. Create one in __init__: "
                f"self.{attribute} = nnx.Variable(jnp.zeros(())), and assign to it in a step: "
                f"{names[0]}[...] = value."
            ) from None
        if after.unhashed != self.structure.unhashed:
            names = sorted({x.name for x in {*after.unhashed} ^ {*self.structure.unhashed}})
            raise ValueError(
                f"{step_name} changed {', '.join(names)} of a model, which is not a variable. A "
                "step is traced, so it would change once, not in every call. Store numbers that "
                "change in an nnx.Variable."
            )
        changes = [f"{slot.name(roots)} {how}" for slot, how in _changes(self.structure, after)]
        if changes:
            raise ValueError(
                f"{step_name} changed the structure of a model:\n{listing(changes)}\n"
                "Create all variables before `run`. Remove sown values inside the step with "
                "nnx.pop(model, nnx.Intermediate)."
            )
        held = [follow(self.objects, slot.path) for slot in self.structure.slots]
        values = [x.get_raw_value() if isinstance(x, nnx.Variable) else x for x in held]
        return [
            self._given[i] if i in self.keys and leaf is self.keys[i][1] else jnp.asarray(leaf)
            for i, leaf in enumerate(jax.tree.leaves(values))
        ]

    def _traced_attributes(self, roots: Sequence[str]) -> list[str]:
        """Returns the names of attributes that are traced arrays and not a part of the state."""
        known = {slot.path for slot in self.structure.slots}
        return [
            VariableSlot((*path, name), jax.Array, is_own=False).name(roots)
            for path, node in nodes(self.objects)
            for name, value in vars(node).items()
            if isinstance(value, jax.core.Tracer) and (*path, name) not in known
        ]

    def attribute_changes(self) -> list[tuple[Path, str, Any]]:
        """Returns the static attributes that the step set: path of the object, name and value.

        For example, `model.train()` sets such attributes.
        """
        return [
            (path, name, value)
            for path, node, before in self._statics
            for name, value in _statics(node).items()
            if name not in before or not is_equal(before[name], value)
        ]


def _statics(node: nnx.Pytree) -> dict[str, Any]:
    """Returns the attributes that hold neither arrays nor other nodes."""
    return {
        name: value
        for name, value in vars(node).items()
        if not name.startswith("_pytree__") and not isinstance(value, _DYNAMIC)
    }


def _changes(before: Structure, after: Structure) -> Iterator[tuple[VariableSlot, str]]:
    """Yields the slots in which two structures differ, with a description of the difference."""
    old = dict(zip(before.slots, before.treedef.children(), strict=True))
    new = dict(zip(after.slots, after.treedef.children(), strict=True))
    for slot in dict.fromkeys([*after.slots, *before.slots]):
        if slot not in old:
            yield slot, "(added)"
        elif slot not in new:
            yield slot, "(removed)"
        elif old[slot] != new[slot] and _numbered(old[slot]) != _numbered(new[slot]):
            yield slot, f"(changed from {old[slot]} to {new[slot]})"


def _numbered(treedef: Any) -> Any:
    """Returns the positions of the leaves in containers that all are dictionaries.

    `nnx.Optimizer.update` makes an `nnx.State` of a list, such as the moments of `optax.sm3` (Flax
    0.12). The list is kept, since its leaves are the same.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            return {key: plain(each) for key, each in value.items()}
        return value

    return plain(jax.tree.unflatten(treedef, range(treedef.num_leaves)))
