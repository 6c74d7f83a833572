"""`ReplicaCopies`: one replica's copies of the nnx objects while a step is traced."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.errors import listing
from mirror._src.base.types import Array
from mirror._src.engine.nnx.paths import Path, nodes, read_at
from mirror._src.engine.nnx.structure import Structure, VariableSlot, is_equal, with_copies

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
        self._nodes = dict(nodes(self.objects))
        self._statics = {path: _statics(node) for path, node in self._nodes.items()}

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
        values = [read_at(self.objects, slot.path) for slot in self.structure.slots]
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
        changes = []
        for path, node in self._nodes.items():
            before = self._statics[path]
            for name, value in _statics(node).items():
                if name not in before or not is_equal(before[name], value):
                    changes.append((path, name, value))
        return changes


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
