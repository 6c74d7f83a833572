"""Relations of the pieces of a batch: rows that a loop reads in another order on one device.

A step may reshape its rows to pieces of a batch, and add up what a loop computes of each. A piece
of a replica has other rows than the piece of one device, but all pieces together have the same
rows. A function of each row, or a sum over rows, has the same property, if the function is the same
for all pieces: values that differ between the rounds of the loop may only be added.
"""

from collections.abc import Callable
from fractions import Fraction

from mirror._src.jaxprs.axis_moves import MOVES, axis_after
from mirror._src.jaxprs.collective_eqns import is_collective
from mirror._src.jaxprs.primitives import ADDITION, ELEMENTWISE
from mirror._src.jaxprs.relations import (
    UNIFORM,
    Kind,
    Pair,
    Relation,
    Why,
    common,
    dtype_of,
    outermost,
    part,
    shape_of,
    worst,
)

_Rules = Callable[[Pair, list[Relation]], list[Relation]]
_KEPT = (Kind.ROWS, Kind.PART, Kind.INDEX, Kind.SPREAD)


def of_pieces(pair: Pair, operands: list[Relation], rules: _Rules) -> list[Relation]:
    """Returns the relations of the results of an operation whose operands may be in pieces.

    Args:
        pair: The operation.
        operands: Relations of its operands.
        rules: Returns the relations of the results if each round of a loop relates by itself.
    """
    in_pieces = [x for x in operands if x.is_in_pieces]
    alone = [x._replace(pieces=None) for x in operands]
    if worst(operands) is not None:
        return rules(pair, operands)
    if not in_pieces:
        return [_of_rounds(pair, x, operands) for x in rules(pair, alone)]
    unknown = [pair.other(Why.UNKNOWN)] * len(pair.eqn.outvars)
    if any(x.kind is Kind.TOTAL for x in operands):
        return [_added(pair, operands) or unknown[0]]
    (pieces, *others) = {x.pieces for x in in_pieces if x.pieces is not None}
    pairs = zip(operands, pair.eqn.invars, strict=True)
    is_known = all(_fits(pair, x, len(shape_of(atom)), pieces) for x, atom in pairs)
    if others or is_collective(pair.eqn) or not is_known:
        return unknown
    if pair.name == "reshape" and pieces >= 0:
        return [_reshaped(pair, in_pieces[0]) or unknown[0]]
    axis: int | None = pieces
    if pieces >= 0 and pair.name not in ELEMENTWISE:
        axis = axis_after(pair.eqn, pieces) if pair.name in (*MOVES, "reduce_sum") else None
    found = rules(pair, alone)
    if axis is None:  # all pieces are added up
        is_sum = pair.name == "reduce_sum" and found[0].kind is Kind.PART
        return found if is_sum else unknown
    return [_in_pieces(x, axis) or unknown[0] for x in found]


def total_of(carry: int, loop: int, *, is_over_rows: bool) -> Relation:
    """Returns the relation of a carry at the start of a round, if the loop adds to it only."""
    total = Relation(Kind.TOTAL, Fraction(0), columns=frozenset({carry}))
    return total._replace(axis=loop) if is_over_rows else total._replace(pieces=loop)


def after_loop(first: Relation, total: Relation, num_replicas: int) -> Relation | None:
    """Returns the relation of a carry after a loop that has added to it."""
    if total.scale == 0:
        return first
    pieces = total.pieces if total.axis < 0 else None
    return common([first, part(total.scale)._replace(pieces=pieces)], num_replicas)


def _added(pair: Pair, operands: list[Relation]) -> Relation | None:
    """Returns the relation of a total to which something is added."""
    totals = [x for x in operands if x.kind is Kind.TOTAL]
    if pair.name == "convert_element_type":
        is_equal = dtype_of(pair.eqn.invars[0]) == dtype_of(pair.eqn.outvars[0])
        return totals[0] if is_equal else None
    if pair.name not in ADDITION or len(totals) > 1:
        return None
    if pair.name == "sub" and operands[0].kind is not Kind.TOTAL:
        return None
    (total,), (x,) = totals, [x for x in operands if x.kind is not Kind.TOTAL]
    if x.kind is Kind.ZERO:
        return total
    is_over_rows = total.axis < 0
    scale, pieces = x.scale, total.pieces
    if is_over_rows and ((x.kind is Kind.ROWS and x.axis == total.axis) or x.kind is Kind.SAME):
        pieces = x.pieces if x.kind is Kind.ROWS else None
    elif not is_over_rows and x.kind is Kind.SAME:
        scale *= pair.num_replicas
    elif is_over_rows or x.kind is not Kind.PART or x.pieces not in (None, total.pieces):
        return None
    if total.scale and (total.scale, total.pieces) != (scale, pieces):
        return None
    return total._replace(scale=scale, pieces=pieces)


def _fits(pair: Pair, x: Relation, rank: int, pieces: int) -> bool:
    """Whether an operand may meet others that are in pieces."""
    if x.kind is Kind.ZERO or (x.is_in_pieces and x.pieces == pieces):
        return True
    if pieces >= 0:  # an array would differ between the pieces
        return x.kind is Kind.SAME and rank == 0 and x.pieces is None
    if pair.name in ADDITION and x.kind in (Kind.SAME, Kind.PART):
        return True
    return x.pieces == UNIFORM or (x.kind in (Kind.SAME, Kind.INDEX) and x.pieces is None)


def _in_pieces(found: Relation, pieces: int) -> Relation | None:
    if found.kind in _KEPT:
        return found._replace(pieces=pieces)
    return found if found.kind in (Kind.ZERO, Kind.OTHER) else None


def _of_rounds(pair: Pair, found: Relation, operands: list[Relation]) -> Relation:
    """Returns the relation of a result whose operands relate in each round of a loop."""
    is_collected = is_collective(pair.eqn)
    varying = [x.pieces for x in operands if x.is_varying]
    if found.kind is Kind.SAME and is_collected and pair.rounds and not operands[0].is_equal:
        return found._replace(pieces=pair.rounds)
    if found.kind is Kind.SAME:
        return found._replace(pieces=outermost(varying))
    if found.kind is not Kind.ROWS or varying or is_collected:
        return found
    along = [(x, a) for x, a in zip(operands, pair.eqn.invars, strict=True) if x.kind is Kind.ROWS]
    size = shape_of(pair.eqn.outvars[0])[found.axis] if found.axis >= 0 else None
    is_uniform = size is not None and all(
        x.pieces == UNIFORM and shape_of(atom)[x.axis] == size for x, atom in along
    )
    is_known = all(x.kind in (Kind.SAME, Kind.ZERO, Kind.ROWS) for x in operands) and operands
    return found._replace(pieces=UNIFORM) if is_uniform and is_known else found


def _reshaped(pair: Pair, x: Relation) -> Relation | None:
    """Returns the relation of rows in pieces that are reshaped."""
    before, after = shape_of(pair.eqn.invars[0]), shape_of(pair.eqn.outvars[0])
    axes, pieces = pair.scaled_axes(), x.pieces
    if x.kind is not Kind.ROWS or len(axes) != 1 or pieces is None or 0 in before:
        return None
    axis = axes[0]
    if axis == x.axis and before[: axis + 1] == after[: axis + 1]:
        return x
    is_joined = pieces + 1 == x.axis and before[:pieces] == after[:axis]
    is_whole = is_joined and after[axis] % (before[pieces] * before[x.axis]) == 0
    return x._replace(axis=axis, pieces=None) if is_whole else None
