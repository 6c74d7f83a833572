"""Relates the values of a replica program to the values of one device with the whole batch.

Both programs are traces of one step, with the replicas' batch and with the whole batch. The pass
reads them together, operation by operation. That is how it knows what a constant such as the
number of rows is: its value in one program is half of its value in the other. Where the programs
differ, or an operation is not understood, the relation is unknown.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from mirror._src.jaxprs.collective_eqns import is_stateful
from mirror._src.jaxprs.equations import Interpreter, Scan, While, inner_programs, is_ref, jaxpr_of
from mirror._src.jaxprs.primitives import CALLBACK
from mirror._src.jaxprs.relation_rules import result
from mirror._src.jaxprs.relations import (
    SAME,
    Kind,
    Pair,
    Relation,
    Why,
    common,
    is_within_shapes,
    of_constants,
    other,
    rows,
    worst,
)

_Program = ClosedJaxpr | Jaxpr
_NO_LINE = "an unknown line"


def relate(
    program: _Program, whole: _Program, inputs: Sequence[Relation], num_replicas: int
) -> list[Relation]:
    """Returns the relations of the outputs of two traces of a step.

    Args:
        program: The program of a replica.
        whole: The program of one device, with the whole batch.
        inputs: The relations of the inputs.
        num_replicas: Number of replicas.
    """
    return _Pass(whole, num_replicas).call(program, inputs)


class _Pass(Interpreter[Relation]):
    """Data-flow pass over one program, next to the other.

    Attributes:
        whole: The program of one device.
        frames: For each program that is evaluated, the operation of one device for each operation.
        consts: The relations of constants, by their `id`.
        depth: Number of the loops over rows around the current operation.
    """

    def __init__(self, whole: _Program, num_replicas: int) -> None:
        super().__init__()
        self.whole = whole
        self.num_replicas = num_replicas
        self.frames: list[dict[int, JaxprEqn]] = []
        self.consts: dict[int, Relation] = {}
        self.depth = 0

    def constant(self, value: Any) -> Relation:
        return self.consts.get(id(value), SAME)

    def call(self, program: _Program, inputs: Sequence[Relation]) -> list[Relation]:
        whole = self.counterpart(program)
        jaxpr = jaxpr_of(program)
        if whole is None:
            return [self.unknown(self.within[-1])] * len(jaxpr.outvars)
        place = _mismatch(jaxpr, jaxpr_of(whole))
        if place is not None:
            eqns = [*jaxpr.eqns[place:], *self.within[-1:]]
            found = self.unknown(eqns[0]) if eqns else other(Why.UNKNOWN, "step", _NO_LINE)
            return [found] * len(jaxpr.outvars)
        if isinstance(program, ClosedJaxpr) and isinstance(whole, ClosedJaxpr):
            for a, b in zip(program.consts, whole.consts, strict=True):
                found = of_constants(a, b, self.num_replicas)
                if self.consts.setdefault(id(a), found) != found:
                    self.consts[id(a)] = other(Why.UNKNOWN, "constant", _NO_LINE)
        pairs = zip(jaxpr.eqns, jaxpr_of(whole).eqns, strict=True)
        self.frames.append({id(a): b for a, b in pairs})
        try:
            outputs = super().call(program, inputs)
        finally:
            self.frames.pop()
        return self.with_literals(jaxpr.outvars, jaxpr_of(whole).outvars, outputs)

    def counterpart(self, program: _Program) -> _Program | None:
        """Returns the program of one device for a program; `None` if that is not certain."""
        if not self.within:
            return self.whole
        eqn = self.within[-1]
        own = inner_programs(eqn.params.values())
        found = inner_programs(self.frames[-1][id(eqn)].params.values())
        places = [i for i, each in enumerate(own) if each is program]
        if not places or len(own) != len(found):
            return None
        first = found[places[0]]
        return first if all(found[i] is first for i in places) else None

    def unknown(self, eqn: JaxprEqn) -> Relation:
        """Returns the relation of a result of an operation that is not understood."""
        return self.pair(eqn, eqn).other(Why.UNKNOWN)

    def pair(self, eqn: JaxprEqn, whole: JaxprEqn) -> Pair:
        return Pair(eqn, whole, self.num_replicas, self.within)

    def with_literals(
        self, atoms: Sequence[Any], whole: Sequence[Any], relations: Sequence[Relation]
    ) -> list[Relation]:
        """Returns the relations, in which literals are compared with literals of one device."""
        return [
            of_constants(a.val, b.val, self.num_replicas) if isinstance(a, Literal) else relation
            for a, b, relation in zip(atoms, whole, relations, strict=True)
        ]

    def equation(self, eqn: JaxprEqn, operands: list[Relation]) -> Sequence[Relation]:
        whole = self.frames[-1][id(eqn)]
        operands = self.with_literals(eqn.invars, whole.invars, operands)
        operands = [self.located(x, eqn) for x in operands]
        results = super().equation(eqn, operands)
        outputs = zip(results, eqn.outvars, whole.outvars, strict=True)
        return [self.fitting(relation, eqn, a.aval, b.aval) for relation, a, b in outputs]

    def fitting(self, relation: Relation, eqn: JaxprEqn, aval: Any, whole: Any) -> Relation:
        """Returns a relation, unless the types of the values exclude it."""
        if is_within_shapes(relation, aval, whole, self.num_replicas):
            return relation
        # Along two axes there are pairs of rows.
        scaled = sum(a != b for a, b in zip(aval.shape, whole.shape, strict=False))
        return self.pair(eqn, eqn).other(Why.ROWS if scaled > 1 else Why.UNKNOWN)

    def located(self, relation: Relation, eqn: JaxprEqn) -> Relation:
        """Returns a relation whose cause has a line of the user's."""
        cause = relation.cause
        if cause is None or cause.line != _NO_LINE:
            return relation
        return relation._replace(cause=self.pair(eqn, eqn).cause(cause.why))

    def leaf(self, eqn: JaxprEqn, operands: list[Relation]) -> Sequence[Relation]:
        pair = self.pair(eqn, self.frames[-1][id(eqn)])
        is_impure = is_stateful(eqn) or any(map(is_ref, (*eqn.invars, *eqn.outvars)))
        if is_impure or eqn.primitive.name in CALLBACK:
            return [pair.other(Why.UNKNOWN)] * len(eqn.outvars)
        return result(pair, operands)

    def chosen(self, predicate: Relation, cases: Sequence[Relation]) -> Relation:
        found = common(cases, self.num_replicas)
        if predicate.is_equal and found is not None:
            return found
        (eqn,) = self.within[-1:]
        axes = {x.axis for x in (predicate, *cases) if x.kind is Kind.ROWS and x.axis < 0}
        rest = [x for x in (predicate, *cases) if x.kind is not Kind.ROWS]
        is_row = predicate.kind is Kind.ROWS and predicate.scale == 1 and len(axes) == 1
        if is_row and all(x.is_equal for x in rest) and all(x.scale == 1 for x in cases):
            return rows(axes.pop())
        if predicate.is_equal:
            return worst(cases) or self.unknown(eqn)
        if predicate.kind is Kind.PART:
            return self.pair(eqn, eqn).other(Why.PART)
        return worst([predicate, *cases]) or self.unknown(eqn)

    def scan(self, eqn: JaxprEqn, operands: list[Relation]) -> list[Relation]:
        scan, whole = Scan(eqn), Scan(self.frames[-1][id(eqn)])
        shape = scan.num_consts, scan.num_carry, scan.reverse
        if shape != (whole.num_consts, whole.num_carry, whole.reverse):
            return [self.unknown(eqn)] * len(eqn.outvars)
        consts, carry, scanned = scan.split(operands)
        is_over_rows = scan.length != whole.length
        if is_over_rows and whole.length != self.num_replicas * scan.length:
            return [self.unknown(eqn)] * len(eqn.outvars)
        self.depth += is_over_rows
        row = -self.depth

        def slice_of(relation: Relation) -> Relation:
            if relation.kind is Kind.SPREAD:
                return self.unknown(eqn)
            if relation.kind not in (Kind.ROWS, Kind.INDEX) or relation.axis < 0:
                return self.unknown(eqn) if is_over_rows and not relation.is_equal else relation
            if is_over_rows:
                is_row = relation.axis == 0 and relation.kind is Kind.ROWS
                return relation._replace(axis=row) if is_row else self.unknown(eqn)
            return relation._replace(axis=relation.axis - 1) if relation.axis else self.unknown(eqn)

        def stacked(relation: Relation) -> Relation:
            if relation.kind is Kind.SPREAD:
                return self.unknown(eqn)
            if is_over_rows:
                is_row = relation.kind is Kind.ROWS and relation.axis == row
                return (
                    relation._replace(axis=0)
                    if is_row
                    else worst([relation]) or (rows(0) if relation.is_equal else self.unknown(eqn))
                )
            is_moved = relation.kind in (Kind.ROWS, Kind.INDEX) and relation.axis >= 0
            return relation._replace(axis=relation.axis + 1) if is_moved else relation

        slices = list(map(slice_of, scanned))
        if is_over_rows:  # the loop of one device has more rounds
            carry = [self.unknown(eqn)] * len(carry)
        while True:
            outputs = self.call(scan.body, [*consts, *carry, *slices])
            joined = [self.chosen(SAME, pair) for pair in zip(carry, outputs, strict=False)]
            if joined == carry:
                break
            carry = joined
        self.depth -= is_over_rows
        return [*carry, *map(stacked, outputs[scan.num_carry :])]

    def while_loop(self, eqn: JaxprEqn, operands: list[Relation]) -> list[Relation]:
        if While(eqn).counts != While(self.frames[-1][id(eqn)]).counts:
            return [self.unknown(eqn)] * len(eqn.outvars)
        return super().while_loop(eqn, operands)


def _mismatch(jaxpr: Jaxpr, whole: Jaxpr) -> int | None:
    """Returns the index of the first operation that differs between two programs, if any does."""
    names: dict[Any, Any] = {}

    def is_same(own: Sequence[Any], others: Sequence[Any]) -> bool:
        return len(own) == len(others) and all(
            isinstance(b, Literal) if isinstance(a, Literal) else names[a] is b
            for a, b in zip(own, others, strict=True)
        )

    def has_added(own: Sequence[Any], others: Sequence[Any]) -> bool:
        names.update(zip(own, others, strict=False))
        return len(own) == len(others)

    if not (has_added(jaxpr.invars, whole.invars) and has_added(jaxpr.constvars, whole.constvars)):
        return 0
    for i, (a, b) in enumerate(zip(jaxpr.eqns, whole.eqns, strict=False)):
        is_equal = a.primitive is b.primitive and is_same(a.invars, b.invars)
        if not (is_equal and has_added(a.outvars, b.outvars)):
            return i
    is_whole = len(jaxpr.eqns) == len(whole.eqns) and is_same(jaxpr.outvars, whole.outvars)
    return None if is_whole else len(jaxpr.eqns)
