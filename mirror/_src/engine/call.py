"""`Call`: one call of `strategy.run`, with its arguments classified."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from mirror._src.base.errors import counted
from mirror._src.base.naming import leaf_names, name_of
from mirror._src.base.types import StepFunction
from mirror._src.engine.arguments import Layout, object_names
from mirror._src.engine.nnx.record import Record
from mirror._src.engine.nnx.structure import Structure, VariableSlot
from mirror._src.engine.variable import Variable

_get_shape = operator.attrgetter("shape")


class Call(NamedTuple):
    """One call of `run`, with its arguments classified.

    Attributes:
        fn: The step function.
        tree: Positional and keyword arguments, with placeholders for the nnx objects.
        layout: Classification of the leaves.
        leaves: Leaves of the arguments, static ones included.
        objects: The nnx objects, captured variables last.
        record: Record of the objects; `None` without objects.
        state: Leaves of the objects.
        donate_argnums: Positions of donated arguments.
        captured: Variables that the step uses without receiving them as arguments.
    """

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
        """The structure of the nnx objects; `None` without objects."""
        return self.record.structure if self.record is not None else None

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of this call's program in the cache of its function."""
        layout, leaves, record = self.layout, self.leaves, self.record
        return (
            layout,
            layout.static_key(leaves) if layout.static else (),
            tuple(map(_get_shape, map(leaves.__getitem__, layout.rows))),
            record.structure if record is not None else None,
            self.donate_argnums,
        )

    @property
    def trace_key(self) -> tuple[Any, ...]:
        """The key of this call's trace, which does not depend on what is donated."""
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
        """The slot of each leaf of the nnx objects, with the user's name for it."""
        structure = self.structure
        if structure is None:
            return []
        return list(zip(structure.leaf_slots, structure.names(self.object_names), strict=True))

    @property
    def input_names(self) -> list[str]:
        """The user's names for all inputs of the program: leaves of objects, then other leaves."""
        return [*(name for _, name in self.slots), *self.leaf_names]

    def donated(self) -> list[int]:
        """Returns the positions of the leaves that the user donates.

        Raises:
            ValueError: If `donate_argnums` contains anything but indices of arguments.
        """
        num_args = len(self.tree[0])
        for argnum in self.donate_argnums:
            if not (isinstance(argnum, int) and 0 <= argnum < num_args):
                valid = {0: "", 1: " (valid index: 0)"}.get(
                    num_args, f" (valid indices: 0 to {num_args - 1})"
                )
                raise ValueError(
                    f"donate_argnums={self.donate_argnums} is out of range: {name_of(self.fn)} was "
                    f"called with {counted(num_args, 'positional argument')}{valid}."
                )
        paths = jax.tree_util.tree_flatten_with_path(self.tree)[0]
        donated = [
            i for i, (p, _) in enumerate(paths) if p[0].idx == 0 and p[1].idx in self.donate_argnums
        ]
        return [self.layout.dynamic.index(i) for i in donated if i in self.layout.dynamic]
