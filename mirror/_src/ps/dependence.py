"""Which leaves each result of a traced function depends on, and whether row by row."""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.jaxprs.equations import Interpreter
from mirror._src.jaxprs.primitives import ELEMENTWISE, PASSING, REDUCTION


class Depends(NamedTuple):
    """The leaves that a value depends on, as sets of bits: bit `i` is leaf `i`.

    Attributes:
        rows: Leaves of which row `r` of the value depends on row `r` alone.
        mixed: Leaves it depends on in any other manner.
    """

    rows: int = 0
    mixed: int = 0

    def __or__(self, other: "Depends") -> "Depends":
        mixed = self.mixed | other.mixed
        return Depends((self.rows | other.rows) & ~mixed, mixed)

    def without_rows(self) -> "Depends":
        """Returns the same leaves, all of them mixed."""
        return Depends(0, self.rows | self.mixed)


def union(values: Sequence[Depends]) -> Depends:
    """Returns what all values together depend on."""
    return functools.reduce(operator.or_, values, Depends())


def follow(program: ClosedJaxpr | Jaxpr, arguments: Sequence[Depends]) -> list[Depends]:
    """Returns what the results of a program depend on, given what its arguments depend on.

    An operation that is not known to keep rows apart mixes them. So a leaf may be said to be mixed
    that is not, but never the other way round.
    """
    return _Pass().call(program, arguments)


class _Pass(Interpreter[Depends]):
    """Data-flow pass over one program."""

    def constant(self, _: Any) -> Depends:
        return Depends()

    def leaf(self, eqn: JaxprEqn, operands: list[Depends]) -> Sequence[Depends]:
        if eqn.primitive.name in PASSING:
            return operands
        depends = union(operands)
        return [depends if keeps_rows(eqn) else depends.without_rows()] * len(eqn.outvars)

    def chosen(self, predicate: Depends, cases: Sequence[Depends]) -> Depends:
        return union([predicate.without_rows(), *cases])

    def slice_of(self, array: Depends) -> Depends:
        return array.without_rows()


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether an element of the result is made of the same element of each operand."""
    shapes = {shape for atom in eqn.invars if (shape := _shape(atom))}
    return eqn.primitive.name in ELEMENTWISE and shapes <= {_shape(eqn.outvars[0])}


def keeps_rows(eqn: JaxprEqn) -> bool:
    """Whether row `r` of the result is made of row `r` of each operand."""
    if is_elementwise(eqn):
        return True
    name = eqn.primitive.name
    if not eqn.invars or not (source := _shape(eqn.invars[0])):
        return False
    result, params = _shape(eqn.outvars[0]), eqn.params
    if not result or result[0] != source[0]:
        return False
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][0] == 0
    if name == "reshape":
        return params.get("dimensions") is None
    if name == "squeeze":
        return 0 not in params["dimensions"]
    if name == "transpose":
        return params["permutation"][0] == 0
    return name in REDUCTION and 0 not in params["axes"]


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))
