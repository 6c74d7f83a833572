"""`Mark`: what the proof knows of one value, and how the marks of several values combine."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mark:
    """What the proof knows of a value.

    Attributes:
        origin: what made it per-replica, a user's line or an input's index; `None`: it is mirrored.
        source: the variable it is an unchanged copy of.
        behind: the collectives whose results a mirrored value was computed from, in words; noted
            only where somebody asks.
        assumed: lines of host callbacks that a mirrored value was computed by, which are declared
            to be pure.
        drawn: lines that drew the random numbers that a mirrored array was made of.
    """

    origin: int | str | None = None
    source: object = None
    behind: frozenset[str] = frozenset()
    assumed: frozenset[str] = frozenset()
    drawn: frozenset[str] = frozenset()

    @property
    def per_replica(self) -> bool:
        """Whether replicas may hold different values."""
        return self.origin is not None

    def join(self, other: "Mark") -> "Mark":
        """What is known of a value that may be either."""
        origin = other.origin if self.origin is None else self.origin
        source = self.source if self.source is other.source else None
        return Mark(
            origin,
            source,
            self.behind | other.behind,
            self.assumed | other.assumed,
            self.drawn | other.drawn,
        )

    def of(self, source: object) -> "Mark":
        """The same of a value that is a copy of this variable, or of none."""
        return Mark(self.origin, source, self.behind, self.assumed, self.drawn)


MIRRORED = Mark()


def computed(marks: Sequence[Mark]) -> Mark:
    """What is known of a value computed from values with these marks."""
    origins = [mark.origin for mark in marks if mark.per_replica]
    inputs = [origin for origin in origins if isinstance(origin, int)]  # says most to the user
    behind = [mark.behind for mark in marks if mark.behind]
    assumed = [mark.assumed for mark in marks if mark.assumed]
    origin = next(iter([*inputs, *origins]), None)
    return Mark(
        origin,
        None,
        frozenset().union(*behind) if behind else frozenset(),
        frozenset().union(*assumed) if assumed else frozenset(),
    )


def either(marks: Iterable[Mark]) -> Mark:
    """What is known of a value that is one of several."""
    return functools.reduce(Mark.join, marks)


def chosen(marks: Iterable[Mark], predicate: Mark) -> Mark:
    """What is known of a value that the predicate picks from several, unless all are one."""
    mark = either(marks)
    return mark if mark.source is not None else mark.join(predicate.of(None))


def joins(left: Sequence[Mark], right: Sequence[Mark]) -> list[Mark]:
    """The marks of two lists joined, one by one."""
    return [a.join(b) for a, b in zip(left, right, strict=True)]
