"""Finds by data flow whether the results of a program look across the rows of the batch.

For every value, the pass knows along which axes the rows lie, which number its entries
of padding are, and at which lines a row has come to depend on other rows. An operation that the
pass does not know is noted as unknown, and is neither evidence for nor against.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.jaxprs.collective_eqns import ALL_REDUCES, axes_of, is_collective, spans_whole_axis
from mirror._src.jaxprs.equations import (
    Interpreter,
    Scan,
    While,
    equations,
    is_within_file,
    line_within,
)
from mirror._src.jaxprs.primitives import dtype_of
from mirror._src.jaxprs.row_facts import (
    ANY_COLUMN,
    NO_FILLS,
    NO_LINES,
    NO_POSITIONS,
    NO_ROWS,
    REPLICA,
    Excludes,
    Place,
    RowAxis,
    Rows,
    Value,
    constant_of,
    is_nan,
    is_plain,
    join,
    known,
    neutral,
    unknown,
)
from mirror._src.jaxprs.row_rules import CONSTANT_RULES, FILLED_RESULT, RULES, gathered, moved

_NO_PLACE = Place("")
_NORMALIZATION = ("flax/nnx/nn/normalization.py", "flax/linen/normalization.py")


def find_rows(
    program: ClosedJaxpr | Jaxpr, inputs: Sequence[Rows], num_replicas: int
) -> list[Rows]:
    """Returns the facts about the outputs of a program.

    Args:
        program: The program of one replica.
        inputs: For each input, `row` for data and the mask, and `Rows()` for anything else.
        num_replicas: Number of replicas.
    """
    found = _Pass(num_replicas).call(program, inputs)
    return [
        x._replace(padded=x.padded | x.diluted | (x.mixed if _is_sent(x) else NO_LINES))
        for x in found
    ]


def _is_sent(rows: Rows) -> bool:
    """Whether entry i depends on row i of another replica, which may be padding."""
    return any(isinstance(x.origin, tuple) and not known(rows.value(x)) for x in rows.axes)


@dataclass(eq=False)
class _Pass(Interpreter[Rows]):
    """Data-flow pass over one program."""

    num_replicas: int
    depth: int = field(default=0, init=False)

    def constant(self, value: Any) -> Rows:
        return NO_ROWS._replace(constant=constant_of(value))

    def leaf(self, eqn: JaxprEqn, operands: list[Rows]) -> Sequence[Rows]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if name == "iota":
            axis = eqn.params["dimension"]
            along = RowAxis(axis, eqn.params["shape"][axis])
            return [NO_ROWS._replace(positions=frozenset({(along, ANY_COLUMN)}))]
        if name == "axis_index":
            return [NO_ROWS._replace(constant=REPLICA)]
        rule = RULES.get(name)
        if all(map(is_plain, operands)):
            is_known = rule in CONSTANT_RULES and bool(operands)
            constant = rule(eqn, operands, _NO_PLACE).constant if rule and is_known else None
            if name == "psum" and spans_whole_axis(eqn) and isinstance(operands[0].constant, float):
                constant = self.num_replicas * operands[0].constant  # as of numbers of rows
            return [NO_ROWS._replace(constant=constant)] * count
        line = self.place(eqn)
        if is_collective(eqn):
            return [self.collective(eqn, operand, line) for operand in operands]
        if rule is None:
            return [unknown(operands, line)] * count
        result = rule(eqn, operands, line).noted(operands, line)
        kept = FILLED_RESULT.get(name)
        return [
            result if kept in (None, i) else result._replace(fills=NO_FILLS) for i in range(count)
        ]

    def chosen(self, predicate: Rows, cases: Sequence[Rows]) -> Rows:
        value = join(cases)
        predicate = predicate._replace(is_mask=False, positions=NO_POSITIONS)
        return join([predicate, value])._replace(fills=value.fills)

    def place(self, eqn: JaxprEqn) -> Place:
        """Returns the place of an operation in the user's code.

        JAX traces its own functions once, for the first caller, so that the operations inside have
        the lines of another call.
        """
        within = list(self.within)
        for i, call in enumerate(within):
            # Such as `_mean`.
            if call.primitive.name == "jit" and hasattr(jax.numpy, call.params["name"].lstrip("_")):
                eqn, within = call, within[:i]
                break
        in_layer = not is_collective(eqn) and is_within_file(eqn, _NORMALIZATION)
        return Place(line_within(eqn, within), is_statistics=in_layer)

    def collective(self, eqn: JaxprEqn, operand: Rows, line: Place) -> Rows:
        """Returns the result of a collective; over one replica, it is its operand."""
        name = eqn.primitive.name
        excludes: Excludes = known
        if name in ALL_REDUCES:
            positions = [axis for axis in axes_of(eqn) if isinstance(axis, int)]
            excludes = neutral(name, dtype_of(eqn.invars[0]))
            operand = moved(eqn, operand.without(positions, line, excludes))
        if not (is_nan(operand.constant) and name in ALL_REDUCES):
            operand = operand._replace(constant=None)
        if name == "all_gather" and self.num_replicas == 1:
            return gathered(eqn, operand)
        if self.num_replicas == 1 or not (operand.axes or operand.mixed):
            return operand
        # An average of means over unequal numbers of examples is not the mean.
        lines = frozenset({line._replace(is_mean_of_means=True)}) if operand.means else NO_LINES
        # Statistics of all replicas are no longer a matter of one replica.
        padded = lines | {place._replace(is_statistics=False) for place in operand.padded}
        groups = eqn.params.get("axis_index_groups")
        num = len(groups[0]) if groups else self.num_replicas
        count = frozenset(num * each for each in operand.num_summed)
        # Some replica has examples, but perhaps none in a group.
        is_mask = operand.is_mask and (bool(groups) or name == "all_gather")
        result = operand._replace(padded=padded, means=NO_LINES, is_mask=is_mask, num_summed=count)
        if name == "all_gather":
            return gathered(eqn, result)
        if name == "ppermute":
            pairs = eqn.params["perm"]
            result = result._replace(num_summed=operand.num_summed, mixed=result.mixed | {line})
            return result.moved(lambda row: (row.permuted(pairs),))
        if operand.axes:  # rows of another replica are padding
            result = result._replace(unknown=result.unknown | {line})
        return result.without([row.axis for row in operand.axes], line, excludes)

    def scan(self, eqn: JaxprEqn, operands: list[Rows]) -> list[Rows]:
        scan, line = Scan(eqn), self.place(eqn)
        consts, carry, scanned = scan.split(operands)
        self.depth += 1
        index = -self.depth
        before: list[Value] = [("carry", self.depth, i) for i in range(scan.num_carry)]
        for i in scan.counters:
            if carry[i].constant == 0 and not scan.reverse:
                before[i] = ("round", self.depth, scan.length)

        def outside(value: Rows) -> Rows:
            value = value.filled(lambda axis: _if_not(value.value(axis), before))
            return value._replace(constant=_if_not(value.constant, before))

        def sliced(row: RowAxis) -> tuple[RowAxis]:
            return (row.at(row.axis - (row.axis > 0) if row.axis else index),)

        inside = [x.moved(sliced) for x in scanned]
        # A ring has a round for each replica, and each round has the rows of another one.
        is_ring = 0 < scan.length <= self.num_replicas and any(
            eqn.primitive.name == "ppermute" for eqn in equations(scan.body.jaxpr)
        )
        rounds: list[list[Rows]] = []
        is_last = False
        while not is_last:
            carried = [x._replace(constant=c) for x, c in zip(carry, before, strict=True)]
            outputs = self.call(scan.body, [*consts, *carried, *inside])
            pairs = zip(outputs, before, strict=False)
            # A step over a row of padding may leave the carry as it is.
            after = [outside(x.without([index], line, functools.partial(eq, c))) for x, c in pairs]
            joined = after if is_ring else list(map(join, zip(carry, after, strict=True)))
            rounds = [*rounds, outputs] if is_ring else [outputs]
            is_last = len(rounds) == scan.length if is_ring else joined == carry
            carry = joined
        results = [join(each) for each in zip(*rounds, strict=True)]
        for i, x in enumerate(results[: scan.num_carry]):
            if any(row.axis == index for row in x.axes):  # it is likely to be their sum
                carry[i] = carry[i]._replace(num_summed=frozenset({scan.length}))
        self.depth -= 1

        def stacked(row: RowAxis) -> tuple[RowAxis]:
            return (row.at(0 if row.axis == index else row.axis + (row.axis >= 0)),)

        return [*carry, *(outside(x).moved(stacked) for x in results[scan.num_carry :])]

    def while_loop(self, eqn: JaxprEqn, operands: list[Rows]) -> list[Rows]:
        loop, line = While(eqn), self.place(eqn)
        test_consts, consts, carry = loop.split(operands)
        while True:
            outputs = self.call(loop.body, [*consts, *carry])
            joined = [join([a, b]) for a, b in zip(carry, outputs, strict=True)]
            if joined == carry:
                break
            carry = joined
        (test,) = self.call(loop.test, [*test_consts, *carry])
        # A loop under `jax.vmap` runs until all rows are done, and keeps the rows that are.
        lines = frozenset({line}) if test.mixed or test.axes else NO_LINES
        last = loop.test.jaxpr.eqns[-1:]
        if not (last and last[0].primitive.name == "reduce_or"):
            carry = [
                x._replace(mixed=x.mixed | test.mixed, padded=x.padded | test.padded) for x in carry
            ]
        return [x._replace(unknown=x.unknown | test.unknown | lines) for x in carry]


def _if_not(value: Value, unknown: Sequence[Value]) -> Value:
    return None if value in unknown else value
