"""Finds by data flow how the results of a step on parts of a batch are joined.

Each part all-reduces among its own replicas alone. What the same step computes with all replicas in
one program follows from the reductions that a value was computed with: a mean is the mean over the
parts, a sum their sum, and so on. A value that is computed in any other way from reduced values,
such as the square root of a mean, cannot be joined.
"""

import enum
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from mirror._src.jaxprs.collective_eqns import (
    contains_collective,
    contains_replica_source,
    is_collective,
    is_replica_source,
    spans_whole_axis,
)
from mirror._src.jaxprs.equations import Interpreter, inner_programs, is_ref, jaxpr_of
from mirror._src.jaxprs.primitives import (
    ADDITION,
    CASTING,
    JOINING,
    LINEAR,
    PASSING,
    PICKING,
    SHAPING,
)


class Join(enum.Enum):
    """The relation between the values of the parts and the value of the whole step."""

    SAME = "same"  # the parts have the same value
    OWN = "own"  # each replica has its own
    MEAN = "mean"  # weighted by rows
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    RAW_SUM = "raw sum"  # of the replicas of a part; divided by their number, it is a mean
    NONE = "none"  # cannot be joined


_REDUCED_BY = {"psum": Join.RAW_SUM, "pmax": Join.MAX, "pmin": Join.MIN}
_SHAPING = SHAPING | PICKING
_JOINING = ADDITION | JOINING
_KEEPING = SHAPING | CASTING
_PRODUCTS = frozenset(("mul", "dot_general", "conv_general_dilated"))


def find_joins(
    program: ClosedJaxpr | Jaxpr, arguments: Sequence[Join], num_replicas: int
) -> list[Join]:
    """Returns how the outputs of a step are joined.

    Args:
        program: The step of one replica.
        arguments: For each input, `SAME` or `OWN`.
        num_replicas: Number of the replicas of a part.
    """
    return list(map(_summed, _Pass(num_replicas).call(program, arguments)))


class _Pass(Interpreter[Join]):
    """Data-flow pass over one program."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__()
        self.num_replicas = num_replicas

    def constant(self, _: Any) -> Join:
        return Join.SAME

    def leaf(self, eqn: JaxprEqn, operands: list[Join]) -> Sequence[Join]:
        name = eqn.primitive.name
        if name in _REDUCED_BY and spans_whole_axis(eqn):
            return [_reduced(_REDUCED_BY[name], operand) for operand in operands]
        if name in PASSING:
            return operands
        return [_joined(eqn, operands, self.num_replicas)] * len(eqn.outvars)

    def chosen(self, predicate: Join, cases: Sequence[Join]) -> Join:
        found = functools.reduce(_either, cases)
        if predicate is Join.SAME:
            return found
        is_own = predicate is Join.OWN and found in (Join.SAME, Join.OWN)
        return Join.OWN if is_own else Join.NONE


def _summed(join: Join) -> Join:
    """Returns the join of a raw sum that is not divided any more."""
    return Join.SUM if join is Join.RAW_SUM else join


def _reduced(by: Join, operand: Join) -> Join:
    """Returns the join of an all-reduced value."""
    if operand is Join.OWN or (operand is Join.SAME and by is Join.RAW_SUM):
        return by
    if operand is Join.SAME:
        return Join.SAME
    # The maximum of a maximum is known, but the sum of a sum counts replicas of one part only.
    return operand if operand is by and by is not Join.RAW_SUM else Join.NONE


def _joined(eqn: JaxprEqn, operands: list[Join], num_replicas: int) -> Join:
    """Returns the join of the results of an operation that is not an all-reduce."""
    kinds = set(operands) - {Join.SAME}
    inner = list(map(jaxpr_of, inner_programs(eqn.params.values())))
    is_unknown = is_collective(eqn) or any(map(contains_collective, inner))
    if is_unknown or any(map(is_ref, [*eqn.invars, *eqn.outvars])) or Join.NONE in kinds:
        return Join.NONE
    if not kinds or kinds == {Join.OWN}:
        is_own = is_replica_source(eqn) or any(map(contains_replica_source, inner))
        return Join.OWN if is_own or kinds else Join.SAME
    if Join.RAW_SUM in kinds:
        if _is_mean(eqn, operands, num_replicas):
            return Join.MEAN
        # A mean of integers is one of floats: an integer sum stays a sum whatever it is divided by.
        is_float = jnp.issubdtype(_dtype(eqn.invars[0]), jnp.inexact)
        if len(kinds) == 1 and eqn.primitive.name in _KEEPING and is_float:
            return kinds.pop()
    operands = list(map(_summed, operands))
    kinds = set(operands) - {Join.SAME}
    if len(kinds) > 1 or inner:
        return Join.NONE
    return _of_reduced(eqn, operands, kinds.pop())


def _is_mean(eqn: JaxprEqn, operands: list[Join], num_replicas: int) -> bool:
    """Whether a sum over a part is divided by the number of replicas."""
    divisor = eqn.invars[-1]
    return (
        eqn.primitive.name == "div"
        and operands[0] is Join.RAW_SUM
        and isinstance(divisor, Literal)
        and np.ndim(divisor.val) == 0
        and float(divisor.val) == num_replicas
    )


def _of_reduced(eqn: JaxprEqn, operands: list[Join], kind: Join) -> Join:
    """Returns the join of the result, where some operands are `kind`, and the others `SAME`."""
    name = eqn.primitive.name
    first, rest = operands[0], operands[1:]
    are_others_same = kind not in rest
    is_extreme = kind in (Join.MAX, Join.MIN)
    is_affine = kind is Join.MEAN or Join.SAME not in operands
    if name in _SHAPING:
        is_kept = are_others_same
    elif name == "convert_element_type":
        is_kept = _keeps_values(eqn, is_extreme=is_extreme)
    elif is_extreme:
        is_kept = False
    elif name in LINEAR:
        is_kept = True
    elif name in _JOINING:
        is_kept = is_affine
    elif name in _PRODUCTS:
        is_kept = operands.count(kind) == 1
    elif name == "div":
        is_kept = are_others_same and jnp.issubdtype(_dtype(eqn.outvars[0]), jnp.inexact)
    elif name == "select_n":
        is_kept = first is Join.SAME and (kind is Join.MEAN or Join.SAME not in rest)
    elif name in ("dynamic_update_slice", "scatter", "scatter-add", "scatter-sub"):
        values, indices = _updated(name, operands)
        is_kept = kind not in indices and (kind is Join.MEAN or Join.SAME not in values)
    else:
        is_kept = False
    return kind if is_kept else Join.NONE


def _updated(name: str, operands: list[Join]) -> tuple[list[Join], list[Join]]:
    """Splits the operands of an update into values and indices."""
    if name == "dynamic_update_slice":
        return operands[:2], operands[2:]
    return [operands[0], operands[2]], [operands[1]]


def _keeps_values(eqn: JaxprEqn, *, is_extreme: bool) -> bool:
    """Whether a conversion of reduced values is a conversion of what they were reduced from.

    Args:
        eqn: The conversion.
        is_extreme: Whether they are maxima or minima, which integers that stand for bools may be.
    """
    old, new = _dtype(eqn.invars[0]), _dtype(eqn.outvars[0])
    if jnp.issubdtype(new, jnp.inexact):
        return True
    return not jnp.issubdtype(old, jnp.inexact) and (new != jnp.bool_ or is_extreme)


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype


def _either(a: Join, b: Join) -> Join:
    """Returns the join of a value that is one of two values, chosen equally on all parts."""
    if a is b:
        return a
    pair = {_summed(a), _summed(b)}
    others = pair - {Join.SAME}
    if len(pair) == 1 or others in ({Join.OWN}, {Join.MEAN}):
        return others.pop()
    return Join.NONE
