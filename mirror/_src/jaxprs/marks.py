"""`Mark`: what the proof knows about one value, and how the marks of several values combine.

`ensure_mirrored` requires that values inside a step are marked as mirrored.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mirror._src.base.types import PyTree


class Mark(NamedTuple):
    """Facts about a value that the proof has established.

    Attributes:
        origin: What made the value per-replica: a user's line, or the index of an input. `None` if
            the value is mirrored.
        source: The variable that the value is an unchanged copy of.
        reduced_by: Descriptions of the collectives that a mirrored value was computed from.
            Recorded for reports only.
        assumed: Lines of host callbacks that a mirrored value was computed by and that are declared
            to be pure.
        samples: Lines that sampled the random numbers a mirrored array was computed from.
        is_summed: Whether a per-replica value was summed over the rows, such as a gradient.
    """

    origin: int | str | None = None
    source: object = None
    reduced_by: frozenset[str] = frozenset()
    assumed: frozenset[str] = frozenset()
    samples: frozenset[str] = frozenset()
    is_summed: bool = False

    @property
    def per_replica(self) -> bool:
        """Whether replicas may hold different values."""
        return self.origin is not None

    def join(self, other: "Mark") -> "Mark":
        """Returns the mark of a value that is either this one or the other."""
        own = [mark.is_summed for mark in (self, other) if mark.per_replica]
        return Mark(
            other.origin if self.origin is None else self.origin,
            self.source if self.source is other.source else None,
            self.reduced_by | other.reduced_by,
            self.assumed | other.assumed,
            self.samples | other.samples,
            bool(own) and all(own),
        )

    def of(self, source: object) -> "Mark":
        """Returns this mark for a copy of the variable `source`, or of no variable."""
        return Mark(self.origin, source, *self[2:])


MIRRORED = Mark()


def computed(marks: Sequence[Mark]) -> Mark:
    """Returns the mark of a value computed from values with these marks."""
    origin, reduced_by, assumed = MIRRORED.origin, MIRRORED.reduced_by, MIRRORED.assumed
    for mark in marks:
        # In messages, the name of an input helps more than a line.
        if origin is None or (isinstance(origin, str) and isinstance(mark.origin, int)):
            origin = mark.origin
        reduced_by, assumed = reduced_by | mark.reduced_by, assumed | mark.assumed
    return Mark(origin, None, reduced_by, assumed)


def either(marks: Iterable[Mark]) -> Mark:
    """Returns the mark of a value that is one of several."""
    return functools.reduce(Mark.join, marks)


def chosen(marks: Iterable[Mark], predicate: Mark) -> Mark:
    """Returns the mark of a value that the predicate selects, unless all candidates are equal."""
    mark = either(marks)
    return mark if mark.source is not None else mark.join(predicate.of(None))


# A separate primitive keeps its names through every transformation, takes no part in derivatives,
# and prevents dead code elimination from removing single leaves.
ensured_p = Primitive("ensure_mirrored")
ensured_p.multiple_results = True
ensured_p.def_impl(lambda *values, **_: list(values))
ensured_p.def_abstract_eval(lambda *avals, **_: list(avals))
mlir.register_lowering(ensured_p, lambda _, *values, **__: list(values))
ad.primitive_jvps[ensured_p] = lambda primals, tangents, names: (
    ensured_p.bind(*primals, names=names),
    list(tangents),
)
batching.primitive_batchers[ensured_p] = lambda values, axes, names: (
    ensured_p.bind(*values, names=names),
    list(axes),
)


def ensure_mirrored(tree: PyTree) -> PyTree:
    """Returns its argument, and makes `run` reject the step if one of its leaves is per-replica.

    Use it for state that is an argument and a result of the step: wrap the values that must be the
    same on all replicas. Outside `run` it has no effect.

    Args:
        tree: Pytree of arrays.

    Returns:
        The same tree.

    Raises:
        ReplicaDivergenceError: From `run`, if a leaf is not proved to be mirrored. The message
            names the leaves.

    >>> def step(weights, grads):
    ...     grads = mirror.all_reduce("mean", grads)
    ...     return mirror.ensure_mirrored({"w": weights["w"] - 0.1 * grads["w"]})
    """
    leaves, treedef = jax.tree.flatten(tree)
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = tuple(jax.tree_util.keystr(path) or "the value" for path, _ in paths)
    return jax.tree.unflatten(treedef, ensured_p.bind(*leaves, names=names) if leaves else leaves)
