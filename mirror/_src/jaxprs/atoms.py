"""Values and constants: the operands of flattened and staged programs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias


def num_bytes(aval: Any) -> int:
    """Returns the size of an array of this shape and dtype."""
    return int(math.prod(aval.shape) * aval.dtype.itemsize)


class Value:
    """An input of a program or a result of one of its operations.

    Attributes:
        aval: Shape and dtype on one replica.
        mirrored: In a staged program, whether it is stored as one mirrored array instead of as one
            slice per replica.
    """

    __slots__ = ("aval", "mirrored")

    def __init__(self, aval: Any, *, mirrored: bool = False) -> None:
        self.aval = aval
        self.mirrored = mirrored

    @property
    def num_bytes(self) -> int:
        """Size on one replica."""
        return num_bytes(self.aval)


@dataclass(eq=False)
class Constant:
    """A number or array that is part of the program."""

    value: Any


Atom: TypeAlias = Value | Constant


def values_of(atoms: Iterable[Atom]) -> list[Value]:
    """Returns the atoms that are not constants."""
    return [atom for atom in atoms if isinstance(atom, Value)]
