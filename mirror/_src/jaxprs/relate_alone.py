"""A guess, from the program of a replica alone, whether its results differ from one device's.

`relate` compares two programs, so the step has to be traced again, with the whole batch. This pass
reads the program that the proof reads, and guesses what depends on the number of rows: a new axis
with as many entries as there are rows, and a divisor that is the number of entries of a sum over
rows. `relate` decides where it finds a difference. Random numbers are left out.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from mirror._src.jaxprs.equations import Interpreter, Scan, jaxpr_of
from mirror._src.jaxprs.primitives import ELEMENTWISE, REDUCTION, SHAPING
from mirror._src.jaxprs.relate import Pass
from mirror._src.jaxprs.relations import (
    ALONG_AXIS,
    SAME,
    UNIFORM,
    ZERO,
    Kind,
    Relation,
    shape_of,
)

_Program = ClosedJaxpr | Jaxpr
_MOVING = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "squeeze"})
_SIMPLE = (ELEMENTWISE | REDUCTION | SHAPING | {"dot_general"}) - {"broadcast_in_dim"}
_COUNTING = frozenset({"convert_element_type", "max", "psum"})


def guess(
    program: _Program, inputs: Sequence[Relation], num_replicas: int, row_counts: set[int]
) -> list[Relation]:
    """Returns how the outputs of a step are likely to relate to the outputs of one device.

    Args:
        program: The program of a replica.
        inputs: The relations of the inputs.
        num_replicas: Number of replicas.
        row_counts: Numbers of rows of the inputs of a replica.
    """
    return _Alone(program, num_replicas, row_counts).call(program, inputs)


class _Alone(Pass):
    """The pass of `relate`, with guesses where it reads the program of one device.

    Attributes:
        counts: Numbers of entries of sums over rows.
        others: Numbers of entries of other sums.
        sizes: The number of entries of sums, and whether they are over rows.
        reduced: Operands and results of sums over replicas.
    """

    def __init__(self, program: _Program, num_replicas: int, row_counts: set[int]) -> None:
        super().__init__(program, num_replicas, has_own_samples=True)
        self.row_counts: set[int] = row_counts
        self.counts = set(row_counts)
        self.others: set[int] = set()
        self.sizes: dict[Var, tuple[int, bool]] = {}
        self.reduced: set[Var] = set()

    def twin(self, eqn: JaxprEqn) -> JaxprEqn:
        return eqn

    def call(self, program: _Program, inputs: Sequence[Relation]) -> list[Relation]:
        for eqn in jaxpr_of(program).eqns:
            if eqn.primitive.name == "psum":  # a mean divides after it, and its gradient before it
                self.reduced.update(a for a in (*eqn.invars, *eqn.outvars) if isinstance(a, Var))
        return Interpreter.call(self, program, inputs)

    def constant(self, value: Any) -> Relation:
        return ZERO if not np.shape(value) and not value else SAME

    def equation(self, eqn: JaxprEqn, operands: list[Relation]) -> Sequence[Relation]:
        if Literal in map(type, eqn.invars):
            operands = [self.guessed(eqn, i, x, operands) for i, x in enumerate(operands)]
        self.record(eqn, operands)
        name = eqn.primitive.name
        if name in ELEMENTWISE:
            operands = _resolved(eqn, operands)
        found = _of_rows(operands) if name in _SIMPLE else None
        if found is not None and (found is SAME or name in ELEMENTWISE):
            return [found] * len(eqn.outvars)
        results = Interpreter.equation(self, eqn, operands)
        return [SAME if x == SAME else x for x in results]

    def record(self, eqn: JaxprEqn, operands: list[Relation]) -> None:
        """Notes what later divisors may count."""
        name = eqn.primitive.name
        if name == "reduce_sum":
            x, axes = operands[0], eqn.params["axes"]
            size = int(np.prod([shape_of(eqn.invars[0])[axis] for axis in axes]))
            is_over_rows = x.kind is Kind.ROWS and x.axis in axes
            self.sizes[eqn.outvars[0]] = size, is_over_rows
            (self.counts if is_over_rows else self.others).add(size)
        elif name == "reduce_window_sum":
            size = int(np.prod(eqn.params["window_dimensions"]))
            self.sizes[eqn.outvars[0]] = size, False
            self.others.add(size)
        elif name in _MOVING and isinstance(eqn.invars[0], Var):
            if (found := self.sizes.get(eqn.invars[0])) is not None:
                self.sizes[eqn.outvars[0]] = found
            if eqn.invars[0] in self.reduced:
                self.reduced.add(eqn.outvars[0])

    def guessed(self, eqn: JaxprEqn, i: int, x: Relation, operands: list[Relation]) -> Relation:
        """Returns the relation of a literal operand, which may be a number of rows."""
        atom, name = eqn.invars[i], eqn.primitive.name
        if not isinstance(atom, Literal) or np.shape(atom.val):
            return x
        value = np.asarray(atom.val).item()
        if not isinstance(value, int | float):
            return x
        if name == "div" and i == 1:
            first = eqn.invars[0] if isinstance(eqn.invars[0], Var) else None
            found = self.sizes.get(first) if first is not None else None
            if found is not None and found[0] == value:
                return SAME.by(Fraction(1, self.num_replicas)) if found[1] else x
            is_reduced = first in self.reduced or eqn.outvars[0] in self.reduced
            if is_reduced and value == self.num_replicas:
                return SAME.by(Fraction(self.num_replicas))
            # A sum over features of a row has a gradient per row.
            return self.count(value, x, is_sure=operands[0].kind is not Kind.ROWS)
        if name in _COUNTING or (name == "sub" and i == 0):
            return self.count(value, x)
        return x

    def count(self, value: float, x: Relation, *, is_sure: bool = False) -> Relation:
        """Returns the relation of a number, which is larger on one device if it counts rows."""
        is_count = value in self.counts and (is_sure or value not in self.others)
        return SAME.by(Fraction(1, self.num_replicas)) if is_count else x

    def located(self, relation: Relation, _eqn: JaxprEqn) -> Relation:
        return relation

    def fitting(self, relation: Relation, *_: Any) -> Relation:
        return relation

    def is_over_rows(self, scan: Scan, _whole: Scan, scanned: Sequence[Relation]) -> bool:
        along = any(x.kind is Kind.ROWS and x.axis == 0 and x.pieces is None for x in scanned)
        return along and scan.length in self.row_counts


def _of_rows(operands: Sequence[Relation]) -> Relation | None:
    """Returns the relation of a function of what all replicas have and of each row.

    It is `None` for any other operands. Most operations have such operands, and need no rule.
    """
    found = SAME
    for x in operands:
        if x is SAME or x is found:
            continue
        if x.kind is not Kind.ROWS or x.pieces is not None or x.columns or x.scale != 1:
            return None
        if found is not SAME and x != found:
            return None
        found = x
    return found


def _resolved(eqn: JaxprEqn, operands: list[Relation]) -> list[Relation]:
    """Returns the operands; an array of one number has no rows if it meets an array without rows.

    As many features as rows look the same.
    """
    if not any(x.kind is Kind.ROWS and x.pieces == UNIFORM for x in operands):
        return operands
    pairs = zip(operands, eqn.invars, strict=True)
    others = {x.kind for x, atom in pairs if shape_of(atom) and x.pieces != UNIFORM} - {Kind.ZERO}
    if not others or not others.isdisjoint(ALONG_AXIS):
        return operands
    return [SAME.by(x.scale) if x.pieces == UNIFORM else x for x in operands]
