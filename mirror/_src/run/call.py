"""One call of `strategy.run`: its arguments told apart, its names, the key of its program."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from mirror._src.run.arguments import Layout, object_names
from mirror._src.run.nnx.record import Record
from mirror._src.run.nnx.structure import Structure, VariableSlot
from mirror._src.utils.naming import leaf_names, name_of
from mirror._src.utils.types import StepFunction
from mirror._src.variables.variable import Variable


class Call(NamedTuple):
    """One call of `run`, its arguments told apart."""

    fn: StepFunction
    tree: tuple[tuple[Any, ...], dict[str, Any]]
    layout: Layout
    leaves: list[Any]
    objects: list[Any]
    record: Record | None
    state: list[Any]
    donate_argnums: tuple[int, ...]
    captured: Sequence[Variable]

    @property
    def structure(self) -> Structure | None:
        """The structure of the nnx objects, if there are any."""
        return self.record.structure if self.record is not None else None

    @property
    def key(self) -> tuple[Any, ...]:
        """What the program of this call is found by."""
        layout = self.layout
        return (self.fn, layout, layout.key(self.leaves), self.structure, self.donate_argnums)

    @property
    def trace_key(self) -> tuple[Any, ...]:
        """What its trace is found by: the same whatever is donated."""
        return self.key[:-1]

    @property
    def object_names(self) -> list[str]:
        """The user's names for the nnx objects."""
        return object_names(self.fn, self.tree, self.objects, self.captured)

    @property
    def leaf_names(self) -> list[str]:
        """The user's names for the leaves that are arrays or numbers."""
        names = leaf_names(self.fn, self.tree)
        return [names[i] for i in self.layout.dynamic]

    @property
    def slots(self) -> list[tuple[VariableSlot, str]]:
        """The place of each leaf of the nnx objects, with the user's name for it."""
        found = self.structure
        if found is None:
            return []
        return list(zip(found.leaf_slots, found.names(self.object_names), strict=True))

    @property
    def input_names(self) -> list[str]:
        """The user's names of all inputs of the program: the objects' leaves, then the others."""
        return [*(name for _, name in self.slots), *self.leaf_names]

    def donated(self) -> list[int]:
        """Positions of the leaves whose buffers the user donates."""
        num_args = len(self.tree[0])
        for argnum in self.donate_argnums:
            if not (isinstance(argnum, int) and 0 <= argnum < num_args):
                raise ValueError(
                    f"donate_argnums={self.donate_argnums}: there is no argument {argnum}; "
                    f"{name_of(self.fn)} got {num_args}, numbered from 0."
                )
        paths = jax.tree_util.tree_flatten_with_path(self.tree)[0]
        donated = [
            i for i, (p, _) in enumerate(paths) if p[0].idx == 0 and p[1].idx in self.donate_argnums
        ]
        return [self.layout.dynamic.index(i) for i in donated if i in self.layout.dynamic]
