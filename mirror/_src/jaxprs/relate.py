"""Relates the values of a replica program to the values of one device with the whole batch.

Both programs are traces of one step, with the replicas' batch and with the whole batch. The pass
reads them together, operation by operation. That is how it knows what a constant such as the
number of rows is: its value in one program is half of its value in the other. Where the programs
differ, or an operation is not understood, the relation is unknown.

`guess` reads the program of a replica alone, which the proof reads, so that no step is traced again
with the whole batch. It guesses what depends on the number of rows: a new axis with as many entries
as there are rows, and a divisor that is the number of entries of a sum over rows. `relate` decides
where it finds a difference. Random numbers are left out.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from mirror._src.jaxprs.collective_eqns import is_stateful, name_of
from mirror._src.jaxprs.equations import (
    NO_LINE,
    Interpreter,
    Scan,
    While,
    inner_programs,
    is_ref,
    jaxpr_of,
)
from mirror._src.jaxprs.primitives import CALLBACK, ELEMENTWISE, REDUCTION, SHAPING, shape_of
from mirror._src.jaxprs.relation_rules import results
from mirror._src.jaxprs.relations import (
    ALONG_AXIS,
    SAME,
    UNIFORM,
    ZERO,
    Kind,
    Pair,
    Relation,
    Why,
    after_loop,
    alike,
    common,
    is_within_shapes,
    of_constants,
    of_pieces,
    other,
    outermost,
    pieces_of,
    rows,
    total_of,
    worst,
)

_Program = ClosedJaxpr | Jaxpr


def relate(
    program: _Program,
    whole: _Program,
    inputs: Sequence[Relation],
    num_replicas: int,
    *,
    has_own_samples: bool = False,
) -> list[Relation]:
    """Returns the relations of the outputs of two traces of a step.

    Args:
        program: The program of a replica.
        whole: The program of one device, with the whole batch.
        inputs: The relations of the inputs.
        num_replicas: Number of replicas.
        has_own_samples: As for `Pair`.
    """
    return Pass(whole, num_replicas, has_own_samples=has_own_samples).call(program, inputs)


@dataclass(eq=False)
class Pass(Interpreter[Relation]):
    """Data-flow pass over one program, next to the other.

    Attributes:
        whole: The program of one device.
        has_own_samples: As for `Pair`.
        row_counts: As for `Pair`.
        frames: For each program that is evaluated, the operation of one device for each operation.
        consts: The relations of constants, by their `id`.
        depth: Number of the loops over rows or pieces around the current operation.
        loops: The loops over pieces among them, as negative axes.
    """

    whole: _Program
    num_replicas: int
    _: KW_ONLY
    has_own_samples: bool = False
    row_counts: Collection[int] | None = None
    frames: list[dict[int, JaxprEqn]] = field(default_factory=list, init=False)
    consts: dict[int, Relation] = field(default_factory=dict, init=False)
    depth: int = field(default=0, init=False)
    loops: list[int] = field(default_factory=list, init=False)

    def twin(self, eqn: JaxprEqn) -> JaxprEqn:
        """Returns the operation of one device for an operation."""
        return self.frames[-1][id(eqn)]

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
            found = self.unknown(eqns[0]) if eqns else other(Why.UNKNOWN, "step", NO_LINE)
            return [found] * len(jaxpr.outvars)
        if isinstance(program, ClosedJaxpr) and isinstance(whole, ClosedJaxpr):
            for a, b in zip(program.consts, whole.consts, strict=True):
                found = of_constants(a, b, self.num_replicas)
                if self.consts.setdefault(id(a), found) != found:
                    self.consts[id(a)] = other(Why.UNKNOWN, "constant", NO_LINE)
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
        found = inner_programs(self.twin(eqn).params.values())
        places = [i for i, each in enumerate(own) if each is program]
        if not places or len(own) != len(found):
            return None
        first = found[places[0]]
        return first if all(found[i] is first for i in places) else None

    def unknown(self, eqn: JaxprEqn) -> Relation:
        """Returns the relation of a result of an operation that is not understood."""
        return self.pair(eqn, eqn).other(Why.UNKNOWN)

    def pair(self, eqn: JaxprEqn, whole: JaxprEqn) -> Pair:
        rounds = self.loops[0] if self.loops else 0
        assumed = self.row_counts, self.has_own_samples
        return Pair(eqn, whole, self.num_replicas, self.within, rounds, *assumed)

    def with_literals(
        self, atoms: Sequence[Any], whole: Sequence[Any], relations: Sequence[Relation]
    ) -> list[Relation]:
        """Returns the relations, in which literals are compared with literals of one device."""
        return [
            of_constants(a.val, b.val, self.num_replicas) if isinstance(a, Literal) else relation
            for a, b, relation in zip(atoms, whole, relations, strict=True)
        ]

    def equation(self, eqn: JaxprEqn, operands: list[Relation]) -> Sequence[Relation]:
        whole = self.twin(eqn)
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
        if cause is None or cause.line != NO_LINE:
            return relation
        return relation._replace(cause=self.pair(eqn, eqn).cause(cause.why))

    def leaf(self, eqn: JaxprEqn, operands: list[Relation]) -> Sequence[Relation]:
        pair = self.pair(eqn, self.twin(eqn))
        atoms = () if pair.name in _SIMPLE else (*eqn.invars, *eqn.outvars)
        if is_stateful(eqn) or any(map(is_ref, atoms)) or pair.name in CALLBACK:
            return [pair.other(Why.UNKNOWN)] * len(eqn.outvars)
        return of_pieces(pair, operands, results)

    def chosen(self, predicate: Relation, cases: Sequence[Relation]) -> Relation:
        found = common(cases, self.num_replicas) or alike(cases)
        (eqn,) = self.within[-1:]
        if predicate.is_varying and any(x.is_in_pieces for x in cases):
            return worst(cases) or self.unknown(eqn)
        if predicate.is_equal and found is not None:
            pieces = outermost([predicate.pieces, found.pieces])
            return found._replace(pieces=pieces) if found.kind is Kind.SAME else found
        axes = {x.axis for x in (predicate, *cases) if x.kind is Kind.ROWS and x.axis < 0}
        rest = [x for x in (predicate, *cases) if x.kind is not Kind.ROWS]
        all_pieces = {x.pieces for x in (predicate, *cases)}
        is_row = predicate.kind is Kind.ROWS and predicate.scale == 1 and len(axes) == 1
        is_row = is_row and all_pieces == {None}
        if is_row and all(x.is_equal for x in rest) and all(x.scale == 1 for x in cases):
            return rows(axes.pop())
        if predicate.is_equal:
            return worst(cases) or self.unknown(eqn)
        return worst([predicate, *cases]) or self.unknown(eqn)

    def scan(self, eqn: JaxprEqn, operands: list[Relation]) -> list[Relation]:
        scan, whole = Scan(eqn), Scan(self.twin(eqn))
        shape = scan.num_consts, scan.num_carry, scan.reverse
        consts, first, scanned = scan.split(operands)
        is_over_rows = self.is_over_rows(scan, whole, scanned)
        is_alike = shape == (whole.num_consts, whole.num_carry, whole.reverse)
        if is_over_rows is None or not is_alike:
            return [self.unknown(eqn)] * len(eqn.outvars)
        is_over_pieces = any(x.is_in_pieces and x.pieces == 0 for x in scanned)
        is_deeper = is_over_rows or is_over_pieces
        self.depth += is_deeper
        self.loops += [-self.depth] * is_over_pieces
        loop = _Loop(-self.depth if is_deeper else 0, is_over_rows, is_over_pieces)
        own = scan.body.jaxpr.invars[scan.num_consts :]
        kept = {i for i in range(len(first)) if scan.body.jaxpr.outvars[i] is own[i]}
        totals = set(range(len(first))) - kept if is_deeper else set()
        unknown = self.unknown(eqn)
        slices = [loop.slice_of(x) or unknown for x in scanned]

        def before(i: int, x: Relation) -> Relation:
            if i in totals:
                return total_of(i, loop.row, is_over_rows=is_over_rows)
            return x if i in kept else loop.varying(x) or unknown

        def after(i: int, x: Relation, y: Relation) -> Relation:
            return x if i in totals else loop.carried(self.chosen(SAME, (x, y))) or unknown

        carry: list[Relation] = []
        while True:
            carry = carry or list(itertools.starmap(before, enumerate(first)))
            outputs = self.call(scan.body, [*consts, *carry, *slices])
            if others := {i for i in totals if not outputs[i].is_total(i)}:
                totals -= others
                carry = []
                continue
            joined = [after(i, *pair) for i, pair in enumerate(zip(carry, outputs, strict=False))]
            if joined == carry:
                break
            carry = joined
        self.depth -= is_deeper
        del self.loops[len(self.loops) - is_over_pieces :]
        for i in totals:
            carry[i] = after_loop(first[i], outputs[i], self.num_replicas) or unknown
        stacked = [loop.stacked(x) or unknown for x in outputs[scan.num_carry :]]
        return [*map(loop.ended, carry), *stacked]

    def is_over_rows(self, scan: Scan, whole: Scan, _scanned: Sequence[Relation]) -> bool | None:
        """Whether a loop has a round for each row; `None` if it is not known."""
        if scan.length == whole.length:
            return False
        return True if whole.length == self.num_replicas * scan.length else None

    def while_loop(self, eqn: JaxprEqn, operands: list[Relation]) -> list[Relation]:
        if While(eqn).counts != While(self.twin(eqn)).counts:
            return [self.unknown(eqn)] * len(eqn.outvars)
        return super().while_loop(eqn, operands)


class _Loop(NamedTuple):
    """A loop of a `scan`.

    Attributes:
        row: The axis of one row or piece in its body; 0 for any other loop.
        is_over_rows: Whether the loop of one device has a round for each of its rows.
        is_over_pieces: Whether the rounds of replicas and of one device are of pieces of the batch.
    """

    row: int
    is_over_rows: bool
    is_over_pieces: bool

    def slice_of(self, x: Relation) -> Relation | None:
        """Returns the relation of what a round reads of an array; `None` if it is not known."""
        if x.kind in (Kind.SPREAD, Kind.ADDED):
            return None
        if self.is_over_rows:
            if x.kind is Kind.ROWS and x.axis == 0 and (x.pieces is None or x.pieces < 0):
                return x._replace(axis=self.row)
            return x if x.is_equal and x.kind is Kind.ZERO else None
        if x.is_in_pieces and x.pieces is not None and x.pieces >= 0:
            x = x._replace(pieces=x.pieces - 1 if x.pieces else self.row)
        if x.kind in (Kind.ROWS, Kind.INDEX) and x.axis >= 0:
            return x._replace(axis=x.axis - 1) if x.axis else None
        return self.varying(x)

    def stacked(self, x: Relation) -> Relation | None:
        """Returns the relation of the array of what all rounds return."""
        if x.kind in (Kind.SPREAD, Kind.ADDED, Kind.TOTAL):
            return None
        if self.is_over_rows:
            if x.kind is Kind.ROWS and x.axis == self.row:
                return x._replace(axis=0)
            is_known = x.kind in (Kind.OTHER, Kind.ZERO)
            return x if is_known else rows(0) if x.is_equal and not x.is_varying else None
        if x.is_in_pieces and x.pieces is not None and (x.pieces >= 0 or x.pieces == self.row):
            x = x._replace(pieces=x.pieces + 1 if x.pieces >= 0 else 0)
        if x.kind in (Kind.ROWS, Kind.INDEX) and x.axis >= 0:
            return x._replace(axis=x.axis + 1)
        return self.ended(x)

    def varying(self, x: Relation) -> Relation | None:
        """Returns the relation of a value that differs between rounds."""
        if self.is_over_rows:  # of which one device has more
            return None
        is_new = self.is_over_pieces and x.kind is Kind.SAME and x.pieces is None
        return x._replace(pieces=self.row) if is_new else x

    def carried(self, x: Relation) -> Relation | None:
        """Returns the relation of a carry: what a round makes of a piece is read in the next."""
        return None if x.is_in_pieces and x.pieces == self.row else x

    def ended(self, x: Relation) -> Relation:
        """Returns the relation of a value after the loop."""
        return x._replace(pieces=None) if x.is_varying and x.pieces == self.row else x


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


_MOVING = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "squeeze"})
_SIMPLE = (ELEMENTWISE | REDUCTION | SHAPING | {"dot_general"}) - {"broadcast_in_dim"}
_GUESSED = frozenset({"convert_element_type", "div", "max", "psum", "sub"})


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
            if name_of(eqn) == "psum":  # a mean divides after it, and its gradient before it
                self.reduced.update(a for a in (*eqn.invars, *eqn.outvars) if isinstance(a, Var))
        return Interpreter.call(self, program, inputs)

    def constant(self, value: Any) -> Relation:
        return ZERO if not np.shape(value) and not value else SAME

    def equation(self, eqn: JaxprEqn, operands: list[Relation]) -> Sequence[Relation]:
        name = name_of(eqn)
        if name in _GUESSED and Literal in map(type, eqn.invars):
            operands = [self.guessed(eqn, i, x, operands) for i, x in enumerate(operands)]
        if name == "reduce_sum" or name in _MOVING:
            self.record(eqn, operands)
        if name in ELEMENTWISE and UNIFORM in map(pieces_of, operands):
            operands = _resolved(eqn, operands)
        found = _of_rows(operands) if name in _SIMPLE else None
        if found is not None and (found is SAME or name in ELEMENTWISE):
            return [found] * len(eqn.outvars)
        results = Interpreter.equation(self, eqn, operands)
        return [SAME if x == SAME else x for x in results] if SAME in results else results

    def record(self, eqn: JaxprEqn, operands: list[Relation]) -> None:
        """Notes what later divisors may count."""
        name = name_of(eqn)
        if name == "reduce_sum":
            x, axes = operands[0], eqn.params["axes"]
            size = int(np.prod([shape_of(eqn.invars[0])[axis] for axis in axes]))
            is_over_rows = x.kind in ALONG_AXIS and x.axis in axes
            self.sizes[eqn.outvars[0]] = size, is_over_rows
            (self.counts if is_over_rows else self.others).add(size)
        elif isinstance(eqn.invars[0], Var):
            if (found := self.sizes.get(eqn.invars[0])) is not None:
                self.sizes[eqn.outvars[0]] = found
            if eqn.invars[0] in self.reduced:
                self.reduced.add(eqn.outvars[0])

    def guessed(self, eqn: JaxprEqn, i: int, x: Relation, operands: list[Relation]) -> Relation:
        """Returns the relation of a literal operand, which may be a number of rows."""
        atom, name = eqn.invars[i], name_of(eqn)
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
        if name != "div" and (name != "sub" or i == 0):
            return self.count(value, x)
        return x

    def count(self, value: float, x: Relation, *, is_sure: bool = False) -> Relation:
        """Returns the relation of a number, which is larger on one device if it counts rows."""
        is_count = value in self.counts and (is_sure or value not in self.others)
        return SAME.by(Fraction(1, self.num_replicas)) if is_count else x

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
