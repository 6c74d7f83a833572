"""`Relation`: how the values of the replicas relate to the value of one device.

A step may reshape its rows to pieces of a batch, and add up what a loop computes of each. A piece
of a replica has other rows than the piece of one device, but all pieces together have the same
rows. A function of each row, or a sum over rows, has the same property, if the function is the same
for all pieces: values that differ between the rounds of the loop may only be added.
"""

import enum
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from mirror._src.jaxprs.collective_eqns import is_collective, name_of
from mirror._src.jaxprs.equations import line_within
from mirror._src.jaxprs.primitives import (
    ADDITION,
    ELEMENTWISE,
    MOVES,
    axis_after,
    dtype_of,
    shape_of,
)

UNIFORM = -1_000_000
_CREATING = frozenset({"broadcast_in_dim", "iota", "random_bits", "random_split"})
_LARGEST_DENOMINATOR = 10_000
_SMALL = 8  # product of a numerator and a denominator, for which 16 bits suffice


class Kind(enum.Enum):
    """Facts about the replicas' values v and the value w of one device."""

    __hash__ = object.__hash__  # of `enum` is slower

    ZERO = "zero"  # v and w are 0, of any shapes
    SAME = "same"  # every v is scale * w
    ROWS = "rows"  # the concatenation of all v along `axis` is scale * w
    PART = "part"  # the sum of all v is scale * w
    SPREAD = "spread"  # all rows along `axis` are one PART, and the sum is ROWS
    ADDED = "added"  # the sums of v over the rows along `axis` are a PART of the sum of w
    MOST = "most"  # the largest v is scale * w, and scale > 0
    LEAST = "least"  # the smallest v is scale * w, and scale > 0
    INDEX = "index"  # as ROWS, if replica r adds r * scale to the `columns` of the last axis
    NUMBER = "number"  # v is r * scale on replica r, and w is 0
    TOTAL = "total"  # v is a carry of a loop that adds parts of this scale, and nothing else
    OTHER = "other"  # not known to relate; see `cause`


ALONG_AXIS = (Kind.ROWS, Kind.INDEX, Kind.SPREAD, Kind.ADDED)
_NEVER_ZERO = (Kind.INDEX, Kind.NUMBER, Kind.TOTAL)  # which zeros do not have
EXTREMES = {"max": Kind.MOST, "min": Kind.LEAST}


class Why(enum.IntEnum):
    """Reasons for a value that does not relate; of several, the largest counts."""

    CONSTANT = 0  # a number for each pair of rows, which may not change the value
    SAMPLES = 1  # random numbers that depend on the number of replicas
    SCALE = 2  # values of different scales meet
    PART = 3  # a function of this replica's part of the batch that is not linear
    PAIRS = 4  # a linear function of products of pairs of rows of the same replica
    ROWS = 5  # a row of the batch meets other rows of the same replica
    EXTREME = 6  # an extreme that is reduced in another way
    UNKNOWN = 7  # not understood
    FACTOR = 8  # a function of rows and a factor, such as x / (norm(x) + 1e-8)


_UNDECIDED = (Why.CONSTANT, Why.UNKNOWN, Why.FACTOR)


class Cause(NamedTuple):
    """An operation after which values do not relate, or differ by a factor."""

    why: Why
    op: str
    line: str


class Relation(NamedTuple):
    """Facts about a value; which fields count depends on the kind.

    Attributes:
        kind: What is known.
        scale: A factor.
        axis: The axis of the rows. Negative for one row, inside a loop over the rows.
        pieces: The axis of the pieces of a batch, of which not each, but all together relate to the
            pieces of one device. Negative for a piece, inside a loop over the pieces: a value that
            is `SAME` differs between its rounds. `UNIFORM` if all rows are equal in all rounds.
        columns: Columns of indices that count the rows of one replica; the position of a `TOTAL`.
        cause: Where the factor, or the other relation, comes from.
    """

    kind: Kind
    scale: Fraction = Fraction(1)
    axis: int = 0
    pieces: int | None = None
    columns: frozenset[int] = frozenset()
    cause: Cause | None = None

    @property
    def is_equal(self) -> bool:
        """Whether the replicas have the value of one device."""
        return self.kind is Kind.ZERO or (self.kind is Kind.SAME and self.scale == 1)

    @property
    def is_in_pieces(self) -> bool:
        """Whether only all pieces together relate to one device."""
        is_varying = self.kind in (Kind.SAME, Kind.ZERO)
        return self.kind is Kind.TOTAL or not (is_varying or self.pieces in (None, UNIFORM))

    def is_total(self, carry: int) -> bool:
        """Whether it is a total that started as the carry at a position."""
        return self.kind is Kind.TOTAL and carry in self.columns

    @property
    def is_varying(self) -> bool:
        """Whether replicas have a value of one device that differs between rounds of a loop."""
        return self.kind is Kind.SAME and self.pieces is not None

    @property
    def is_different(self) -> bool:
        """Whether the replicas have another value than one device, unless terms cancel."""
        if self.kind is Kind.OTHER:
            return self.cause is None or self.cause.why not in _UNDECIDED
        return self.kind is Kind.ADDED or (self.kind is Kind.SAME and self.scale != 1)

    def by(self, factor: Fraction, cause: Cause | None = None) -> "Relation":
        """Returns the relation of a multiple; `cause` is blamed for a new factor."""
        scale = self.scale * factor
        if self.kind is not Kind.SAME:
            return self._replace(scale=scale)
        known = None if scale == 1 else self.cause or (cause if self.scale == 1 else None)
        return self._replace(scale=scale, cause=known)


ZERO = Relation(Kind.ZERO)
SAME = Relation(Kind.SAME)
kind_of: Callable[[Relation], Kind] = operator.attrgetter("kind")
pieces_of: Callable[[Relation], int | None] = operator.attrgetter("pieces")


def rows(axis: int, scale: Fraction = Fraction(1)) -> Relation:
    """Returns the relation of an array whose rows lie along an axis."""
    return Relation(Kind.ROWS, scale, axis)


def part(scale: Fraction = Fraction(1)) -> Relation:
    """Returns the relation of a part of a sum."""
    return Relation(Kind.PART, scale)


def other(why: Why, op: str, line: str) -> Relation:
    """Returns the relation of a value that does not relate."""
    return Relation(Kind.OTHER, cause=Cause(why, op, line))


def worst(relations: Iterable[Relation]) -> Relation | None:
    """Returns the first of the most serious relations that are `OTHER`, if any is."""
    others = [x for x in relations if x.kind is Kind.OTHER]
    return max(others, key=lambda x: x.cause.why if x.cause else 0) if others else None


def outermost(pieces: Iterable[int | None]) -> int | None:
    """Returns the outermost of loops over pieces, by their negative axes."""
    return max((each for each in pieces if each is not None), default=None)


def common(relations: Sequence[Relation], num_replicas: int) -> Relation | None:
    """Returns the relation that holds for all of several values, and for their sum, if any."""
    values = [x for x in relations if x.kind is not Kind.ZERO]
    if not values:
        return ZERO
    if len(values) < len(relations) and any(x.kind in _NEVER_ZERO for x in values):
        return None
    kinds = {x.kind for x in values}
    if Kind.PART in kinds:
        # What all replicas have is a part of n times its value.
        values = [
            part(num_replicas * x.scale) if x.kind is Kind.SAME else x._replace(cause=None)
            for x in values
        ]
    if kinds <= {Kind.PART, Kind.SAME}:  # what holds for each piece holds for all together
        pieces = {x.pieces for x in values if x.pieces is not None}
        if len(pieces) == 1 or kinds == {Kind.SAME}:
            values = [x._replace(pieces=outermost(pieces)) for x in values]
    first = values[0]
    if any(x._replace(cause=first.cause) != first for x in values):
        return None
    return first


def alike(xs: Sequence[Relation]) -> Relation | None:
    """Returns the relation of rows, or of what all have, of one scale; `None` if it is another."""
    values = [x for x in xs if x.kind is not Kind.ZERO]
    if not values or any(x.kind not in (Kind.SAME, Kind.ROWS) for x in values):
        return None
    if len({x.scale for x in values}) > 1:
        return None
    along = [x for x in values if x.kind is Kind.ROWS]
    if not along:
        return values[0]._replace(pieces=outermost(x.pieces for x in values))
    axes, pieces = {x.axis for x in along}, {x.pieces for x in along}
    pieces = pieces - {UNIFORM} or pieces
    if len(axes) > 1 or len(pieces) > 1:
        return None
    return along[0]._replace(pieces=pieces.pop(), cause=None)


def of_each_row(xs: Sequence[Relation]) -> Relation | None:
    """Returns the relation of a function of each row, and of what all replicas have."""
    found = alike(xs)
    return found if found is not None and found.scale == 1 else None


def moved(x: Relation, to: Callable[[int], int | None]) -> Relation | None:
    """Returns the relation of an array whose axes are moved, `None` if its rows are mixed.

    Args:
        x: The relation before.
        to: Returns the new position of an axis; `None` if it is mixed with others.
    """
    if x.kind not in ALONG_AXIS or x.axis < 0:
        return x
    axis = to(x.axis)
    return None if x.columns or axis is None else x._replace(axis=axis)


class Pair(NamedTuple):
    """An operation of the replica program, with the same operation of the program of one device.

    Attributes:
        eqn: The operation of the replicas.
        whole: The operation of one device.
        num_replicas: Number of replicas.
        within: The operations around `eqn`.
        rounds: The outermost loop over pieces around `eqn`, as a negative axis; 0 without one.
        row_counts: Sizes of axes that are assumed to be of rows. Then there is no program of one
            device, and `whole` is `eqn`. `None` if there is one.
        has_own_samples: Whether random numbers of replicas count as the ones of one device.
    """

    eqn: JaxprEqn
    whole: JaxprEqn
    num_replicas: int
    within: Sequence[JaxprEqn]
    rounds: int = 0
    row_counts: Collection[int] | None = None
    has_own_samples: bool = False

    @property
    def name(self) -> str:
        """The name of the operation."""
        return name_of(self.eqn)

    def cause(self, why: Why) -> Cause:
        """Returns the operation as a cause, without its line if its relation is assumed."""
        is_assumed = self.row_counts is not None
        return Cause(why, self.name, "" if is_assumed else line_within(self.eqn, self.within))

    def other(self, why: Why) -> Relation:
        """Returns the relation of a result that the operation makes unrelated."""
        return Relation(Kind.OTHER, cause=self.cause(why))

    def has_equal_params(self, *but: str) -> bool:
        """Whether all parameters but these are equal."""
        if self.whole is self.eqn:
            return True
        a, b = self.eqn.params, self.whole.params
        return a.keys() == b.keys() and all(k in but or _are_equal(a[k], b[k]) for k in a)

    def is_full(self, axis: int, sizes: str, operand: int = 0) -> bool:
        """Whether a parameter with sizes takes a whole axis of an operand."""
        return all(
            eqn.params[sizes][axis] == shape_of(eqn.invars[operand])[axis]
            for eqn in (self.eqn, self.whole)
        )

    def scaled_axes(self) -> list[int]:
        """Returns the axes along which the result of one device is longer."""
        if self.row_counts is not None:
            return self._assumed_axes(self.row_counts)
        small, large = shape_of(self.eqn.outvars[0]), shape_of(self.whole.outvars[0])
        return [i for i, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]

    def _assumed_axes(self, row_counts: Collection[int]) -> list[int]:
        """Returns the first new axis that has as many entries as there are rows, if any."""
        if self.name not in _CREATING:
            return []
        old = self.eqn.params.get("broadcast_dimensions", ())
        shape = shape_of(self.eqn.outvars[0])
        return [i for i, size in enumerate(shape) if i not in old and size in row_counts][:1]


Rule = Callable[[Pair, list[Relation]], Relation | None]


def guarded(rule: Rule, *but: str) -> Rule:
    """Returns a rule that does not know operations that differ in any but these parameters."""
    return lambda pair, xs: rule(pair, xs) if pair.has_equal_params(*but) else None


def is_within_shapes(relation: Relation, aval: Any, whole: Any, num_replicas: int) -> bool:
    """Whether a relation fits the types of the replicas' value and of one device's."""
    if relation.kind in (Kind.OTHER, Kind.ZERO):
        return True
    if not hasattr(aval, "shape") or aval.dtype != whole.dtype:
        return False
    expected = list(aval.shape)
    if relation.kind in ALONG_AXIS and relation.axis >= 0:
        if relation.axis >= len(expected):
            return False
        expected[relation.axis] *= num_replicas
    return tuple(expected) == tuple(whole.shape)


def of_constants(value: Any, whole: Any, num_replicas: int) -> Relation:
    """Returns the relation of two constants at the same place of the programs."""
    unknown = other(Why.UNKNOWN, "constant", "an unknown line")
    if isinstance(value, jax.Ref):
        return unknown
    if value is whole:
        dtype: Any = getattr(value, "dtype", None)
        is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        return SAME if is_key or np.ndim(value) or value else ZERO
    try:
        a, b = np.asarray(value), np.asarray(whole)
    except TypeError:  # PRNG keys
        return unknown
    if a.dtype != b.dtype or a.dtype == object:
        return unknown
    if a.shape == b.shape:
        if a.tobytes() == b.tobytes():
            return SAME if a.any() else ZERO
        return unknown if a.ndim else _of_numbers(a, b) or unknown
    axes = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=False)) if m != n]
    if a.ndim != b.ndim or len(axes) != 1 or b.shape[axes[0]] != num_replicas * a.shape[axes[0]]:
        return unknown
    blocks = np.split(b, num_replicas, axes[0])
    return rows(axes[0]) if all(np.array_equal(block, a) for block in blocks) else unknown


def _of_numbers(a: np.ndarray, b: np.ndarray) -> Relation | None:
    """Returns the relation of two numbers, whose ratio is the ratio of natural numbers."""
    if not jnp.issubdtype(a.dtype, jnp.number) or np.iscomplexobj(a) or not (a and b):
        return None
    ratio = float(a) / float(b)
    if not np.isfinite(ratio) or ratio < 0:
        return None
    if jnp.issubdtype(a.dtype, jnp.integer):
        return SAME._replace(scale=Fraction(int(a), int(b)))
    factor = Fraction(ratio).limit_denominator(_LARGEST_DENOMINATOR)
    rounding = 4 * float(jnp.finfo(a.dtype).eps)
    are_counts = float(a).is_integer() and float(b).is_integer()
    # Of an irrational number, such as a root, some fraction with large terms is close.
    is_small = factor.numerator * factor.denominator <= max(_SMALL, 0.01 / rounding)
    is_close = abs(ratio - factor) <= rounding * abs(ratio)
    return SAME._replace(scale=factor) if is_close and (are_counts or is_small) else None


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except (TypeError, ValueError):
        return False


_Rules = Callable[[Pair, list[Relation]], list[Relation]]
_KEPT = (Kind.ROWS, Kind.PART, Kind.INDEX, Kind.SPREAD)


def of_pieces(pair: Pair, operands: list[Relation], rules: _Rules) -> list[Relation]:
    """Returns the relations of the results of an operation whose operands may be in pieces.

    Args:
        pair: The operation.
        operands: Relations of its operands.
        rules: Returns the relations of the results if each round of a loop relates by itself.
    """
    kinds = list(map(kind_of, operands))
    if not pair.rounds and Kind.TOTAL not in kinds and {*map(pieces_of, operands)} <= {None}:
        found = rules(pair, operands)
        has_rows = Kind.ROWS in kinds or Kind.ROWS not in map(kind_of, found)
        return found if has_rows else [_of_rounds(pair, x, operands) for x in found]
    in_pieces = [x for x in operands if x.is_in_pieces]
    alone = [x if x.pieces is None else x._replace(pieces=None) for x in operands]
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
    if found.kind is Kind.PART and [x.pieces for x in operands] == [UNIFORM]:
        return SAME.by(found.scale / pair.num_replicas)  # a sum of equal rows
    if found.cause is not None and found.cause.why is Why.ROWS and operands[0].pieces == UNIFORM:
        is_row = pair.name in ("slice", "dynamic_slice") and pair.has_equal_params()
        return SAME.by(operands[0].scale) if is_row else pair.other(Why.UNKNOWN)
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
