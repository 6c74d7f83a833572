"""The rules of `relate`: how the results of each operation relate, given its operands."""

from fractions import Fraction

import jax.numpy as jnp

from mirror._src.jaxprs import relation_arithmetic, relation_shapes
from mirror._src.jaxprs.collective_eqns import (
    ALL_REDUCES,
    axes_of,
    contains_collective,
    contains_replica_source,
    is_collective,
    is_replica_source,
    spans_whole_axis,
)
from mirror._src.jaxprs.equations import inner_programs, jaxpr_of
from mirror._src.jaxprs.primitives import (
    ADDITION,
    ELEMENTWISE,
    KEY,
    LINEAR,
    PASSING,
    PICKING,
    PRIMITIVES,
    SAMPLER,
    SHAPING,
    op_of,
)
from mirror._src.jaxprs.relation_pieces import of_pieces
from mirror._src.jaxprs.relation_shapes import overwrites
from mirror._src.jaxprs.relations import (
    EXTREMES,
    SAME,
    ZERO,
    Kind,
    Pair,
    Relation,
    Rule,
    Why,
    dtype_of,
    guarded,
    of_each_row,
    rows,
    shape_of,
    worst,
)


def result(pair: Pair, operands: list[Relation]) -> list[Relation]:
    """Returns the relations of the results of an operation."""
    if pair.name in PASSING and len(pair.eqn.outvars) == len(operands):
        return operands
    return of_pieces(pair, operands, _result)


def _result(pair: Pair, operands: list[Relation]) -> list[Relation]:
    """Returns the relations of the results, of operands that relate in each round of a loop."""
    name, count = pair.name, len(pair.eqn.outvars)
    if pair.has_own_samples and (name in SAMPLER or name in KEY):
        return _own_samples(pair, operands)
    if is_collective(pair.eqn):
        return [_collective(pair, x) or pair.other(Why.UNKNOWN) for x in operands]
    if name == "axis_index":
        return [Relation(Kind.NUMBER)]
    if is_replica_source(pair.eqn) or name not in PRIMITIVES or name == "call_hi_primitive":
        return [pair.other(Why.UNKNOWN)] * count
    inner = list(map(jaxpr_of, inner_programs(pair.eqn.params.values())))
    if any(contains_collective(each) or contains_replica_source(each) for each in inner):
        return [pair.other(Why.UNKNOWN)] * count
    if name == "select_n" and operands[0].kind is Kind.ZERO:
        return operands[1:2]
    if name in _PRODUCTS and any(x.kind is Kind.ZERO for x in operands):
        return [ZERO]
    found = worst(operands)
    if found is not None:
        return [_passed_on(pair, found, operands)] * count
    if any(x.kind is Kind.SPREAD for x in operands):
        return [pair.other(Why.PART)] * count
    is_zero = operands and all(x.kind is Kind.ZERO for x in operands)
    if is_zero and (name in _KEEPS_ZERO or pair.eqn.params.get("y", 0) > 0):  # `integer_pow`
        return [ZERO] * count
    if all(x.is_equal for x in operands) and _is_same_operation(pair):
        outputs = zip(pair.eqn.outvars, pair.whole.outvars, strict=True)
        is_scaled = pair.row_counts is not None and pair.scaled_axes()
        if not is_scaled and all(shape_of(a) == shape_of(b) for a, b in outputs):
            return [SAME] * count
    return [_found(pair, operands) or _failed(pair, operands)] * count


def _passed_on(pair: Pair, x: Relation, operands: list[Relation]) -> Relation:
    """Returns the relation of a function of a value that does not relate."""
    name, cause = pair.name, x.cause
    if name in _SORTS:  # a permutation may be without effect
        return pair.other(Why.UNKNOWN)
    if cause is None or cause.why is not Why.PAIRS:
        return x
    is_linear = name in SHAPING | LINEAR | ADDITION | _PRODUCTS | {"div"}
    if is_linear and all(each is x or each.kind is Kind.SAME for each in operands):
        return x
    if name in _CHOOSES:  # which may be the pairs of a row with itself
        return pair.other(Why.UNKNOWN)
    return x._replace(cause=cause._replace(why=Why.ROWS))


def _is_same_operation(pair: Pair) -> bool:
    """Whether two operations differ in their operands only."""
    is_known = pair.name != "scatter" or overwrites(pair)
    return is_known and pair.has_equal_params("update_jaxpr", "name")


def _found(pair: Pair, operands: list[Relation]) -> Relation | None:
    """Returns the relation of the results, `None` if no rule knows it."""
    name = pair.name
    if any(x.axis < 0 for x in operands) and _is_same_operation(pair):
        found = of_each_row(operands)
        if found is not None and not pair.scaled_axes():
            return found
    if (name in SAMPLER or name in KEY) and not any(x.kind is Kind.ROWS for x in operands):
        return pair.other(Why.SAMPLES)
    rule = _RULES.get(name)
    return rule(pair, operands) if rule is not None else None


def _failed(pair: Pair, operands: list[Relation]) -> Relation:
    """Returns the relation of a result that no rule knows."""
    kinds = {x.kind for x in operands}
    if pair.name not in ELEMENTWISE or kinds & {Kind.MOST, Kind.LEAST}:
        return pair.other(Why.UNKNOWN)
    if Kind.PART in kinds:
        # The digits of an integer are functions of a part, but may be added up again.
        is_float = jnp.issubdtype(dtype_of(pair.eqn.invars[0]), jnp.inexact)
        is_known = is_float and pair.name != "is_finite"
        return pair.other(Why.PART if is_known else Why.UNKNOWN)
    causes = [x.cause for x in operands if x.kind is Kind.SAME and x.scale != 1 and x.cause]
    if causes and kinds <= {Kind.SAME, Kind.ZERO} and pair.name not in _HIDES_FACTOR:
        return Relation(Kind.OTHER, cause=causes[0])
    return pair.other(Why.UNKNOWN)


def _collective(pair: Pair, x: Relation) -> Relation | None:
    """Returns the relation of the result of a collective; over one device, it is its operand."""
    name, n = pair.name, pair.num_replicas
    if x.kind in (Kind.ZERO, Kind.OTHER):
        return x
    if not spans_whole_axis(pair.eqn):
        return None
    if name in ALL_REDUCES and x.kind is Kind.ROWS and x.axis in axes_of(pair.eqn):
        kind = Kind.PART if name == "psum" else EXTREMES[op_of(name)]  # as under `jax.vmap`
        x = Relation(kind, x.scale)
    is_extreme = x.kind in EXTREMES.values()
    match name:
        case "all_gather" if pair.eqn.params["tiled"]:
            is_whole = x.kind is Kind.ROWS and x.axis == pair.eqn.params["all_gather_dimension"]
            return SAME.by(x.scale, pair.cause(Why.SCALE)) if is_whole else None
        case "reduce_scatter" if pair.eqn.params["tiled"]:
            axis, factor = pair.eqn.params["scatter_dimension"], n if x.kind is Kind.SAME else 1
            return rows(axis, x.scale * factor) if x.kind in (Kind.SAME, Kind.PART) else None
        case "psum":
            if x.kind is Kind.SPREAD and x.axis not in axes_of(pair.eqn):
                return rows(x.axis, x.scale)
            if x.kind is Kind.PART:
                return SAME.by(x.scale, pair.cause(Why.SCALE))
            if x.kind is Kind.SAME:
                return x.by(Fraction(n), pair.cause(Why.SCALE))
        case "pmax" | "pmin":
            if x.kind is Kind.SAME:
                return x
            if x.kind is EXTREMES[op_of(name)]:
                return SAME.by(x.scale, pair.cause(Why.SCALE))
            if x.kind is Kind.PART:
                return pair.other(Why.PART)
        case _:
            return None
    return pair.other(Why.EXTREME) if is_extreme else None


def _own_samples(pair: Pair, operands: list[Relation]) -> list[Relation]:
    """Returns the relations of keys and random numbers that count as the ones of one device."""
    found = worst(x for x in operands if x.cause is None or x.cause.why is not Why.SAMPLES)
    axes = pair.scaled_axes() or [x.axis for x in operands if x.kind is Kind.ROWS][:1]
    if found is None and len(axes) > 1:
        found = pair.other(Why.UNKNOWN)
    return [found or (rows(axes[0]) if axes else SAME)] * len(pair.eqn.outvars)


def _keys(pair: Pair, xs: list[Relation]) -> Relation | None:
    """The rule of keys of which each belongs to an example."""
    found = of_each_row(xs)
    ndim = len(shape_of(pair.eqn.outvars[0]))
    return found if found is not None and found.axis < ndim else None


_KEYS = """
random_bits random_clone random_fold_in random_gamma random_split random_unwrap random_wrap
threefry2x32
"""
_RULES: dict[str, Rule] = {
    **relation_arithmetic.RULES,
    **relation_shapes.RULES,
    **dict.fromkeys(_KEYS.split(), guarded(_keys)),
}
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
_SORTS = frozenset({"sort", "top_k"})
_CHOOSES = PICKING | {"mul", "select_n", "slice"}
_KEEPS_ZERO = SHAPING | {"abs", "add", "add_any", "concatenate", "convert_element_type", "copy"}
_KEEPS_ZERO |= {"cumsum", "dynamic_slice", "mul", "neg", "reduce_max", "reduce_min", "reduce_or"}
_KEEPS_ZERO |= {"reduce_sum", "select_n", "sub", "sqrt", "square", "tanh"}
# A softmax forgets the factor of a logarithm, and a clipped gradient its own factor.
_HIDES_FACTOR = frozenset(
    {"log", "log1p", "log2", "clamp", "max", "min", "eq", "ge", "gt", "le", "lt", "ne"}
)
