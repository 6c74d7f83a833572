"""The rules of `relate`: how the results of each operation relate, given its operands."""

from fractions import Fraction

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
    ELEMENTWISE,
    KEY,
    PASSING,
    PRIMITIVES,
    SAMPLER,
    SHAPING,
    op_of,
)
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
    guarded,
    of_each_row,
    rows,
    shape_of,
    worst,
)


def result(pair: Pair, operands: list[Relation]) -> list[Relation]:
    """Returns the relations of the results of an operation."""
    name, count = pair.name, len(pair.eqn.outvars)
    if name in PASSING and count == len(operands):
        return operands
    if is_collective(pair.eqn):
        return [_collective(pair, operand) for operand in operands]
    if name == "axis_index":
        return [Relation(Kind.NUMBER)]
    if is_replica_source(pair.eqn) or name not in PRIMITIVES or name == "call_hi_primitive":
        return [pair.other(Why.UNKNOWN)] * count
    inner = list(map(jaxpr_of, inner_programs(pair.eqn.params.values())))
    if any(contains_collective(each) or contains_replica_source(each) for each in inner):
        return [pair.other(Why.UNKNOWN)] * count
    if name == "select_n" and operands[0].kind is Kind.ZERO:
        return operands[1:2]
    found = worst(operands)
    if found is None and any(x.kind is Kind.SPREAD for x in operands):
        found = pair.other(Why.PART)
    if found is not None:
        return [found] * count
    if operands and name in _KEEPS_ZERO and all(x.kind is Kind.ZERO for x in operands):
        return [ZERO] * count
    if all(x.is_equal for x in operands) and _is_same_operation(pair):
        outputs = zip(pair.eqn.outvars, pair.whole.outvars, strict=True)
        if all(shape_of(a) == shape_of(b) for a, b in outputs):
            return [SAME] * count
    return [_found(pair, operands) or _failed(pair, operands)] * count


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
    if pair.name in _MIXES_ROWS and any(x.kind is Kind.ROWS for x in operands):
        return pair.other(Why.ROWS)
    if pair.name in ELEMENTWISE and pair.name not in _KEEPS_CLASS:
        kinds = {x.kind for x in operands}
        if Kind.PART in kinds and not kinds & {Kind.MOST, Kind.LEAST}:
            return pair.other(Why.PART)
        scaled = [x for x in operands if x.kind is Kind.SAME and x.scale != 1]
        if kinds <= {Kind.SAME, Kind.ZERO} and any(x.cause for x in scaled):
            return Relation(Kind.OTHER, cause=next(x.cause for x in scaled if x.cause))
    return pair.other(Why.UNKNOWN)


def _collective(pair: Pair, x: Relation) -> Relation:
    """Returns the relation of the result of a collective; over one device, it is its operand."""
    name, n = pair.name, pair.num_replicas
    if x.kind in (Kind.ZERO, Kind.OTHER):
        return x
    if not spans_whole_axis(pair.eqn):
        return pair.other(Why.UNKNOWN)
    if name in ALL_REDUCES and x.kind is Kind.ROWS and x.axis in axes_of(pair.eqn):
        kind = Kind.PART if name == "psum" else EXTREMES[op_of(name)]  # as under `jax.vmap`
        x = Relation(kind, x.scale)
    if name == "all_gather" and pair.eqn.params["tiled"]:
        axis = pair.eqn.params["all_gather_dimension"]
        if x.kind is Kind.ROWS and x.axis == axis:
            return SAME.by(x.scale, pair.cause(Why.SCALE))
        return pair.other(Why.UNKNOWN)
    if name == "psum":
        if x.kind is Kind.SPREAD and x.axis not in axes_of(pair.eqn):
            return rows(x.axis, x.scale)
        if x.kind is Kind.PART:
            return SAME.by(x.scale, pair.cause(Why.SCALE))
        if x.kind is Kind.SAME:
            return x.by(Fraction(n), pair.cause(Why.SCALE))
        return pair.other(Why.EXTREME if x.kind in EXTREMES.values() else Why.UNKNOWN)
    if name in ("pmax", "pmin"):
        if x.kind is Kind.SAME:
            return x
        if x.kind is EXTREMES[op_of(name)]:
            return SAME.by(x.scale, pair.cause(Why.SCALE))
        if x.kind is Kind.PART:
            return pair.other(Why.PART)
        return pair.other(Why.EXTREME if x.kind in EXTREMES.values() else Why.UNKNOWN)
    return pair.other(Why.UNKNOWN)


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
_MIXES_ROWS = frozenset({"argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin"})
_KEEPS_ZERO = SHAPING | {"abs", "add", "add_any", "concatenate", "convert_element_type", "copy"}
_KEEPS_ZERO |= {"cumsum", "dynamic_slice", "mul", "neg", "reduce_max", "reduce_min", "reduce_or"}
_KEEPS_ZERO |= {"reduce_sum", "select_n", "sub"}
_KEEPS_CLASS = frozenset({"is_finite"})
