"""Flax NNX objects on their way through `run`: taken apart once, rebuilt inside, written back.

`nnx.split` of a large model costs more than the step does, so a set of objects is split once and
remembered. Each step only compares the objects' attributes with what was seen then; when one has
changed, they are split again.
"""

import functools
import itertools
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._errors import describe, listing
from mirror._types import Array
from mirror.devices.log import placement_log
from mirror.devices.replicas import ReplicaDevices, any_deleted, buffers_of
from mirror.nnx_metrics import Rule, merge_rule
from mirror.parts import Parts
from mirror.program.axis import axis_name
from mirror.values import held_by, is_float0, is_per_replica, per_replica
from mirror.variables import is_own, spread_over

_MOST_RECORDS = 32
_DYNAMIC = (nnx.Pytree, nnx.Variable, jax.Array, np.ndarray, dict, list, tuple)

Path = tuple[Any, ...]


def is_object(value: object) -> bool:
    """Whether the value is an nnx object that `run` passes by reference."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _variable_setter() -> Callable[[nnx.Variable, Any], None]:
    """Writes a variable's raw value.

    `Variable.set_raw_value` checks the trace level twice and takes 2 us, which for 600 variables is
    the larger part of a step's overhead. `run` is outside every trace (`jax.set_mesh` refuses it
    elsewhere), so the slot is written itself: a private name (flax 0.12.8 to 0.12.12), used where
    it is there; `test_objects.py` tells when it has gone.
    """
    slot = vars(nnx.Variable).get("_raw_value")
    return nnx.Variable.set_raw_value if slot is None else slot.__set__


_set_value = _variable_setter()
_get_value: Any = getattr(
    vars(nnx.Variable).get("_raw_value"), "__get__", nnx.Variable.get_raw_value
)


class Slot(NamedTuple):
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
        self.slots = tuple(Slot(path, _kind(value), is_own(value)) for path, value in flat)
        values = [v.get_raw_value() if isinstance(v, nnx.Variable) else v for _, v in flat]
        values = [
            held_by(value) if slot.is_own and is_per_replica(value) else value
            for slot, value in zip(self.slots, values, strict=True)
        ]
        self.treedef: Any = jax.tree.structure(values)
        for slot, (_, holder), value in zip(self.slots, flat, values, strict=True):
            _require_supported(slot, holder)
            _require_arrays(slot, value)
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

    def rebuild(self, leaves: Sequence[Array]) -> "Clones":
        """New objects of this structure with these values, for one replica to work on."""
        return Clones(self, leaves)


class Clones:
    """The objects as one replica has them while a step is traced."""

    def __init__(self, structure: Structure, leaves: Sequence[Array]) -> None:
        self.structure = structure
        self.keys: dict[int, tuple[Array, Array]] = {}
        self._given = list(leaves)
        inside = [
            self._fold(i, leaf) if slot.kind is nnx.RngKey else leaf
            for i, (slot, leaf) in enumerate(zip(structure.leaf_slots, leaves, strict=True))
        ]
        state = structure.state_def.unflatten(inside)
        self.objects = nnx.merge(structure.graphdef, state)
        self._nodes = dict(_nodes(self.objects))
        self._statics = {path: _statics(node) for path, node in self._nodes.items()}

    def _fold(self, i: int, key: Array) -> Array:
        """Gives each replica a key of its own; the stored one stays mirrored."""
        fold = jax.random.fold_in
        for _ in range(key.ndim):
            fold = jax.vmap(fold, (0, None))
        folded = fold(key, jax.lax.axis_index(axis_name()))
        self.keys[i] = (key, folded)
        return folded

    def collect(self, step_name: str, roots: Sequence[str]) -> list[Array]:
        """The leaves as the step left them.

        Raises:
            ValueError: the step added or removed something that holds arrays.
        """
        after = Structure(self.objects)
        changes = [f"{slot.name(roots)} {how}" for slot, how in _changes(self.structure, after)]
        if changes:
            raise ValueError(
                f"{step_name} changed the structure of a model:\n{listing(changes)}\n"
                "All replicas keep the structure they start with: create variables before `run`; "
                "take out what was sown inside the step, `nnx.pop(model, nnx.Intermediate)`."
            )
        values = [_read(self.objects, slot.path) for slot in self.structure.slots]
        return [
            self._given[i] if i in self.keys and leaf is self.keys[i][1] else jnp.asarray(leaf)
            for i, leaf in enumerate(jax.tree.leaves(values))
        ]

    def attribute_changes(self) -> list[tuple[Path, str, Any]]:
        """Static attributes that the step set, as `model.train()` does: path, name, value."""
        changes = []
        for path, node in self._nodes.items():
            before = self._statics[path]
            for name, value in _statics(node).items():
                if name not in before or not _same(before[name], value):
                    changes.append((path, name, value))
        return changes


class Record:
    """A set of objects as last seen: where their values are, and what would show a change."""

    def __init__(self, objects: Sequence[Any], known: dict[Structure, Structure]) -> None:
        structure = Structure(objects)
        self.structure: Structure = known.setdefault(structure, structure)
        self.last: list[Array] | None = None
        self._plain = self.structure.treedef == jax.tree.structure([0] * len(structure.slots))
        holders = [_holder(objects, slot.path) for slot in structure.slots]
        self._variables = [h for h in holders if isinstance(h, nnx.Variable)]
        self._all_variables = len(self._variables) == len(holders)
        self._own = [i for i, slot in enumerate(structure.slots) if slot.is_own]
        self._places = list(zip(holders, structure.slots, strict=True))
        self._nodes = [vars(node) for _, node in _nodes(objects)]
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
            values = list(map(_get_value, self._variables))
        else:
            values = [_read_holder(holder, slot) for holder, slot in self._places]
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
            for _ in map(_set_value, self._variables, leaves):
                pass
            return
        values = self.structure.treedef.unflatten(leaves)
        for (holder, slot), value in zip(self._places, values, strict=True):
            if isinstance(holder, nnx.Variable):
                _set_value(holder, value)
            else:
                _put(holder, slot.path[-1], value)
        self._seen = self._attributes()

    def set_attributes(
        self, objects: Sequence[Any], changes: Iterable[tuple[Path, str, Any]]
    ) -> None:
        """Sets static attributes as the step did."""
        for path, name, value in changes:
            setattr(_follow(objects, path), name, value)


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
            _require_arrays(record.structure.leaf_slots[i], leaf)
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


def _metrics(objects: Sequence[Any], slots: Sequence[Slot]) -> list[MetricSlots]:
    """The metrics that hold metric states, in the order of their first leaves."""
    found: dict[Path, dict[str, int]] = {}
    for i, slot in enumerate(slots):
        if issubclass(slot.kind, nnx.metrics.MetricState):
            found.setdefault(slot.path[:-1], {})[str(slot.path[-1])] = i
    holders = {path: _follow(objects, path) for path in found}
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


def _arrays(leaf: Any) -> Sequence[Any]:
    return leaf.arrays if isinstance(leaf, Parts) else (leaf,)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return bool(a == b)
    except Exception:
        return False


def _reference(obj: Any, gone: Callable[[Any], None]) -> Callable[[], Any]:
    """A weak reference where the type allows one; variables have none."""
    try:
        return weakref.ref(obj, gone)
    except TypeError:
        return lambda: obj


def _follow(objects: Any, path: Path) -> Any:
    node = objects
    for key in path:
        node = _child(node, key)
    return node


def _child(node: Any, key: Any) -> Any:
    if isinstance(key, str) and not isinstance(node, dict | nnx.State) and hasattr(node, key):
        return getattr(node, key)
    return node[key]


def _put(node: Any, key: Any, value: Any) -> None:
    if isinstance(key, str) and isinstance(node, nnx.Pytree) and hasattr(node, key):
        setattr(node, key, value)
    else:
        node[key] = value


def _holder(objects: Sequence[Any], path: Path) -> Any:
    """The variable at the path, or what has the array at the path as an attribute or an item."""
    found = _follow(objects, path)
    return found if isinstance(found, nnx.Variable) else _follow(objects, path[:-1])


def _read_holder(holder: Any, slot: Slot) -> Any:
    return (
        holder.get_raw_value()
        if isinstance(holder, nnx.Variable)
        else _child(holder, slot.path[-1])
    )


def _read(objects: Sequence[Any], path: Path) -> Any:
    found = _follow(objects, path)
    return found.get_raw_value() if isinstance(found, nnx.Variable) else found


def _nodes(objects: Sequence[Any]) -> Iterator[tuple[Path, nnx.Pytree]]:
    for path, node in nnx.iter_graph(tuple(objects)):
        if isinstance(node, nnx.Pytree):
            yield path, node


def _statics(node: nnx.Pytree) -> dict[str, Any]:
    """The attributes that hold no arrays and no further nodes."""
    return {
        name: value
        for name, value in vars(node).items()
        if not name.startswith("_pytree__") and not isinstance(value, _DYNAMIC)
    }


def _changes(before: Structure, after: Structure) -> Iterator[tuple[Slot, str]]:
    """The places in which two structures differ, and how."""
    old = dict(zip(before.slots, before.treedef.children(), strict=True))
    new = dict(zip(after.slots, after.treedef.children(), strict=True))
    for slot in dict.fromkeys([*after.slots, *before.slots]):
        if slot not in old:
            yield slot, "(added)"
        elif slot not in new:
            yield slot, "(removed)"
        elif old[slot] != new[slot]:
            yield slot, f"(holds {new[slot]}, was {old[slot]})"


def _require_arrays(slot: Slot, value: Any) -> None:
    for leaf in jax.tree.leaves(value, is_leaf=is_per_replica):
        number = jax.Array | np.ndarray | np.generic | int | float | complex
        if not isinstance(leaf, number | Parts) or is_float0(leaf):
            raise ValueError(
                f"{slot.place} of a model holds {describe(leaf)}, which is no array: it cannot be "
                "mirrored."
            )


def _require_supported(slot: Slot, holder: Any) -> None:
    if isinstance(holder, nnx.Variable) and (
        holder.get_metadata("ref", False) or holder.get_metadata("hijax", False)
    ):
        raise TypeError(
            f"{slot.place} of a model is a Variable with ref=True or hijax=True, whose value "
            "lives in a mutable reference. Create it without: `run` passes variables by "
            "reference itself."
        )
