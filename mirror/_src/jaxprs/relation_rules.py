"""The rules of `relate`: how the results of each operation relate, given its operands."""

import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from mirror._src.jaxprs import relation_shapes
from mirror._src.jaxprs.collective_eqns import (
    ALL_REDUCES,
    axes_of,
    is_collective,
    is_replica_source,
    spans_whole_axis,
)
from mirror._src.jaxprs.equations import with_inner
from mirror._src.jaxprs.primitives import (
    ADDITION,
    CASTING,
    ELEMENTWISE,
    JOINING,
    KEY,
    LINEAR,
    PASSING,
    PICKING,
    PRIMITIVES,
    REDUCTION,
    SAMPLER,
    SCATTER,
    SHAPING,
    SIMPLE,
    dot_axes,
    dtype_of,
    op_of,
    samples_jointly,
    shape_of,
)
from mirror._src.jaxprs.relation_shapes import overwrites
from mirror._src.jaxprs.relations import (
    ALONG_AXIS,
    EXTREMES,
    SAME,
    ZERO,
    Kind,
    Pair,
    Relation,
    Rule,
    Why,
    alike,
    common,
    guarded,
    kind_of,
    moved,
    of_each_row,
    part,
    rows,
    worst,
)

_ONE = Fraction(1)
_SUMMED = (Kind.ZERO, Kind.SAME, Kind.ROWS, Kind.PART)
_OPPOSITE = {Kind.MOST: Kind.LEAST, Kind.LEAST: Kind.MOST}
_SCALED = frozenset({"abs", "max", "min", "reduce_max", "reduce_min", "reduce_window_max"})
_COMPARING = frozenset({"eq", "ge", "gt", "le", "lt", "ne", "sign"})
_POWERS = {"square": 2, "reciprocal": -1}
_ROOTS = {"sqrt": 1, "rsqrt": -1}
_NARROW = 4  # bytes below which an integer sum may wrap on one device only


def _elementwise(pair: Pair, xs: list[Relation]) -> Relation | None:
    name = pair.name
    if all(x.is_equal for x in xs):
        return _uniform(pair, xs)
    if name in ADDITION:
        return _sum(pair, xs)
    if name == "complex":
        found = common(xs, pair.num_replicas)
        return found if found is not None and found.kind in _SUMMED else None
    if name == "mul":
        return _counted(pair, xs) or _bilinear(pair, xs, None)
    if name == "div":
        return _quotient(pair, xs)
    if name == "select_n":
        return _selection(pair, xs)
    if name == "convert_element_type":
        return _conversion(pair, xs[0])
    if name in LINEAR or name in CASTING or name in PASSING:
        (x,) = xs
        if name == "neg" and x.kind in _OPPOSITE:
            return x._replace(kind=_OPPOSITE[x.kind])
        return x if x.kind not in (Kind.INDEX, Kind.NUMBER, *_OPPOSITE) else None
    if name == "lt" and xs[0].kind is Kind.INDEX and xs[1].kind is Kind.ZERO:
        return ZERO
    if name == "ne" and pair.eqn.invars[0] is pair.eqn.invars[1] and xs[0].kind in _OPPOSITE:
        return Relation(Kind.MOST)  # whether one of them is NaN, as the extreme is then
    if name == "not" and xs[0].kind in _OPPOSITE and dtype_of(pair.eqn.invars[0]) == jnp.bool_:
        return xs[0]._replace(kind=_OPPOSITE[xs[0].kind])
    found = _power(pair, xs[0])
    if found is not None:
        return found
    if name in _SCALED or name in _COMPARING:
        found = alike(xs)
        if found is not None:
            return found if name in _SCALED else found._replace(scale=_ONE, cause=None)
    if name in ("max", "min") and EXTREMES[name] in {x.kind for x in xs}:
        kind = EXTREMES[name]
        is_known = all(x.is_equal or (x.kind is kind and x.scale == 1) for x in xs)
        return Relation(kind) if is_known else None
    return of_each_row(xs)


def _power(pair: Pair, x: Relation) -> Relation | None:
    """Returns the relation of a power or root, whose factor is rational."""
    power: Any = {**_POWERS, "integer_pow": pair.eqn.params.get("y")}.get(pair.name)
    factor = x.scale
    if pair.name in _ROOTS:
        root = Fraction(math.isqrt(factor.numerator), math.isqrt(factor.denominator))
        if root**2 == factor:
            power, factor = _ROOTS[pair.name], root
    if power is None or x.kind not in (Kind.SAME, Kind.ROWS):
        return None
    return x.by(factor**power / x.scale, pair.cause(Why.SCALE))


def _uniform(pair: Pair, xs: list[Relation]) -> Relation | None:
    """Returns the relation of an array of one number, whose length depends on the batch."""
    axes = pair.scaled_axes()
    if len(axes) != 1:
        return None
    (axis,) = axes
    is_known = all(
        x.kind is Kind.ZERO or not shape_of(atom) or shape_of(atom)[axis] == 1
        for x, atom in zip(xs, pair.eqn.invars, strict=True)
    )
    return rows(axis) if is_known else None


def _sum(pair: Pair, xs: list[Relation]) -> Relation | None:
    found = common(xs, pair.num_replicas)
    if found is not None and found.kind in _SUMMED:
        return found
    kinds = {x.kind for x in xs}
    (first, second) = xs
    if kinds == {Kind.NUMBER, Kind.ZERO} and (pair.name != "sub" or second.kind is Kind.ZERO):
        return first if second.kind is Kind.ZERO else second
    if pair.name != "sub" and Kind.INDEX in kinds:
        index, step = (first, second) if first.kind is Kind.INDEX else (second, first)
        if step.kind is Kind.ZERO:
            return index
        is_position = step.kind is Kind.NUMBER and step.scale == index.scale
        return rows(index.axis) if is_position and not index.columns else None
    if kinds <= {Kind.SAME, Kind.ROWS, Kind.ZERO}:
        is_of_rows = kinds == {Kind.ROWS} and first.scale != second.scale
        is_of_rows = is_of_rows and first.pieces == second.pieces
        return alike(xs) or _scales_differ(xs) or (pair.other(Why.SCALE) if is_of_rows else None)
    if kinds == {Kind.SAME, Kind.PART}:
        atom = pair.eqn.invars[[x.kind for x in xs].index(Kind.SAME)]
        return None if isinstance(atom, Literal) else pair.other(Why.SCALE)
    return None


def _of_sums(pair: Pair, xs: list[Relation]) -> Relation | None:
    """Returns the relation of a linear function of rows of which only the sum relates."""
    along, name = [x for x in xs if x.kind in ALONG_AXIS], pair.name
    axis, n = along[0].axis, pair.num_replicas
    pairs = zip(xs, pair.eqn.invars, strict=True)
    others = [shape_of(atom) for x, atom in pairs if x not in along and x.kind is not Kind.ZERO]
    if axis < 0 or any(shape and shape[axis] != 1 for shape in others):
        return None
    sums = [x.scale / n if x.kind in (Kind.SPREAD, Kind.PART) else x.scale for x in xs]
    cause = along[0].cause or pair.cause(Why.PART)
    found = Relation(Kind.ADDED, sums[xs.index(along[0])], axis, cause=cause)
    if name in ADDITION:
        scales = {scale for scale, x in zip(sums, xs, strict=True) if x.kind is not Kind.ZERO}
        is_known = {*map(kind_of, xs)} <= {*_SUMMED, Kind.SPREAD, Kind.ADDED}
        is_known = is_known and len({x.axis for x in along}) == 1
        return found if len(scales) == 1 and is_known else None
    if len(along) > 1:
        return None
    if name == "reduce_sum":
        axes = pair.eqn.params["axes"]
        return (
            part(found.scale)
            if axis in axes
            else moved(xs[0], lambda a: a - sum(b < a for b in axes))
        )
    if name not in ELEMENTWISE:
        return None
    of_sum = _elementwise(pair, [part(found.scale) if x in along else x for x in xs])
    if of_sum is None or of_sum.kind is not Kind.PART:
        return None
    return found._replace(scale=of_sum.scale)


def _scales_differ(xs: list[Relation]) -> Relation | None:
    causes = [x.cause for x in xs if x.cause is not None and x.kind is Kind.SAME]
    return Relation(Kind.OTHER, cause=causes[0]) if causes else None


def _counted(pair: Pair, xs: list[Relation]) -> Relation | None:
    """Returns the relation of the index of a replica times a constant."""
    kinds = [x.kind for x in xs]
    if Kind.NUMBER not in kinds:
        return None
    i = kinds.index(Kind.NUMBER)
    atom = pair.eqn.invars[1 - i]
    if not isinstance(atom, Literal) or not jnp.issubdtype(dtype_of(atom), jnp.integer):
        return None
    return xs[i].by(Fraction(int(atom.val)))


def _bilinear(pair: Pair, xs: list[Relation], rows_of: Relation | None) -> Relation | None:
    """Returns the relation of a product that is linear in each of two operands.

    Args:
        pair: The operation.
        xs: Its operands.
        rows_of: The relation of its result without a factor, if an operand has rows.
    """
    x, y = xs
    if Kind.ZERO in (x.kind, y.kind):
        return ZERO
    scale = x.scale * y.scale
    if x.kind is y.kind is Kind.SAME:
        return SAME._replace(scale=scale, cause=_blamed(pair, xs, scale))
    if {x.kind, y.kind} == {Kind.SAME, Kind.PART}:
        return part(scale)
    if Kind.PART in (x.kind, y.kind):
        return pair.other(Why.PART)
    if rows_of is not None:
        return rows_of._replace(scale=scale)
    axes = {each.axis for each in xs if each.kind is Kind.ROWS}
    is_known = all(each.kind in (Kind.SAME, Kind.ROWS) for each in xs)
    is_each = len(axes) == 1 and (pair.name in ("mul", "div") or max(axes) < 0)
    return rows(axes.pop(), scale) if is_known and is_each else None


def _blamed(pair: Pair, xs: list[Relation], scale: Fraction) -> Any:
    """Returns the cause of the factor of a product of what all replicas have."""
    if scale == 1:
        return None
    causes = [x.cause for x in xs if x.cause is not None]
    is_constant = all(
        isinstance(atom, Literal) or x.scale != 1
        for x, atom in zip(xs, pair.eqn.invars, strict=True)
    )
    return causes[0] if causes else None if is_constant else pair.cause(Why.SCALE)


def _quotient(pair: Pair, xs: list[Relation]) -> Relation | None:
    x, y = xs
    if x.kind is Kind.ZERO:
        return ZERO if y.kind in (Kind.SAME, Kind.ROWS) else None
    if y.kind not in (Kind.SAME, Kind.ROWS):
        return None
    if not _is_inexact(pair) and (x.scale != y.scale or x.kind is Kind.PART):
        return None  # whose result is rounded
    return _bilinear(pair, [x, y._replace(scale=1 / y.scale)], None)


def _is_inexact(pair: Pair) -> bool:
    """Whether the result has numbers that may be rounded or infinite."""
    return bool(jnp.issubdtype(dtype_of(pair.eqn.outvars[0]), jnp.inexact))


def _selection(pair: Pair, xs: list[Relation]) -> Relation | None:
    predicate, *cases = xs
    if predicate.is_equal:
        found = common(cases, pair.num_replicas)
        if found is not None:
            return found if found.kind is not Kind.NUMBER else None
        return alike(cases) or _scales_differ(cases)
    if predicate.kind is not Kind.ROWS or predicate.scale != 1:
        return None
    if all(x.kind is Kind.ZERO for x in cases):
        return ZERO
    found = alike(cases)
    if found is None or (found.kind is Kind.ROWS and found.axis != predicate.axis):
        return None
    return rows(predicate.axis, found.scale)


def _conversion(pair: Pair, x: Relation) -> Relation | None:
    old, new = dtype_of(pair.eqn.invars[0]), dtype_of(pair.eqn.outvars[0])
    if x.is_equal or (x.kind is Kind.ROWS and x.scale == 1):
        return x
    is_inexact = jnp.issubdtype(new, jnp.inexact)
    if jnp.issubdtype(old, jnp.inexact):
        return x if is_inexact else None
    if x.kind in _OPPOSITE:
        is_truth = new == jnp.bool_ and jnp.issubdtype(old, jnp.unsignedinteger)  # not of -1
        return x if is_inexact or is_truth or old == jnp.bool_ else None
    is_wide = old.itemsize >= _NARROW and new.itemsize >= old.itemsize
    if x.kind in (Kind.INDEX, Kind.NUMBER):
        return x if is_inexact or jnp.issubdtype(new, jnp.integer) else None
    if old.itemsize >= _NARROW and (is_inexact or is_wide):
        return x
    return pair.other(Why.UNKNOWN)  # whose sum may wrap on one device only


def _reduction(pair: Pair, xs: list[Relation]) -> Relation | None:
    (x,) = xs
    name, axes = pair.name, pair.eqn.params["axes"]
    extreme = EXTREMES.get(op_of(name, dtype_of(pair.eqn.invars[0])))
    if x.kind is not Kind.ROWS:
        is_linear = name == "reduce_sum" and x.kind in (Kind.SAME, Kind.PART)
        is_extreme = x.kind is Kind.SAME and name in _SCALED
        is_same = extreme is not None and extreme is x.kind
        return x if is_linear or is_extreme or is_same else None
    if x.axis in axes:
        if name == "reduce_sum":
            return part(x.scale)
        return Relation(extreme, x.scale) if extreme is not None else None
    axis = x.axis - sum(axis < x.axis for axis in axes) if x.axis >= 0 else x.axis
    if name == "reduce_sum" or name in _SCALED:
        return rows(axis, x.scale)
    return rows(axis) if x.scale == 1 else None


def _dot(pair: Pair, xs: list[Relation]) -> Relation | None:
    """The rule of a product of matrices."""
    (contracted, batched) = pair.eqn.params["dimension_numbers"]
    found = []
    for i, (x, place) in enumerate(zip(xs, dot_axes(pair.eqn), strict=True)):
        if x.kind is not Kind.ROWS or x.axis < 0:
            continue
        if x.axis in contracted[i]:
            found.append(("sum", list(contracted[i]).index(x.axis)))
        else:
            found.append(("batch" if x.axis in batched[i] else "free", place[x.axis]))
    return _product(pair, xs, found)


def _convolution(pair: Pair, xs: list[Relation]) -> Relation | None:
    numbers, params = pair.eqn.params["dimension_numbers"], pair.eqn.params
    found = []
    for i, (x, spec) in enumerate(zip(xs, (numbers.lhs_spec, numbers.rhs_spec), strict=True)):
        if x.kind is not Kind.ROWS or x.axis < 0:
            continue
        if x.axis == spec[1] and params["feature_group_count"] == 1:
            found.append(("sum", 0))
        elif i == 0 and x.axis == spec[0] and params["batch_group_count"] == 1:
            found.append(("free", numbers.out_spec[0]))
        else:
            return _bilinear(pair, xs, None)
    return _product(pair, xs, found)


def _product(pair: Pair, xs: list[Relation], found: Sequence[tuple[str, int]]) -> Relation | None:
    """Returns the relation of a product, given what it does with the rows of its operands."""
    if len(found) == 2 and (found[0] != found[1] or found[0][0] == "free"):
        return pair.other(Why.PAIRS)
    is_known = all(x.kind is Kind.SAME or (x.kind is Kind.ROWS and x.axis >= 0) for x in xs)
    rows_of = None
    if found and is_known:
        how, axis = found[0]
        if how == "sum":
            rows_of = part() if len(found) == 2 else None
        elif how == "free" or len(found) == 2:
            rows_of = rows(axis)
    return _bilinear(pair, xs, rows_of)


def results(pair: Pair, operands: list[Relation]) -> list[Relation]:
    """Returns the relations of the results, of operands that relate in each round of a loop."""
    name, count = pair.name, len(pair.eqn.outvars)
    if pair.has_own_samples and (name in SAMPLER or name in KEY):
        return _own_samples(pair, operands)
    if name not in SIMPLE:
        if is_collective(pair.eqn):
            return [_collective(pair, x) or pair.other(Why.UNKNOWN) for x in operands]
        if name == "axis_index":
            return [Relation(Kind.NUMBER)]
        is_known = name in PRIMITIVES and name != "call_hi_primitive"
        if not is_known or any(map(is_replica_source, with_inner(pair.eqn))):
            return [pair.other(Why.UNKNOWN)] * count
    if name == "select_n" and operands[0].kind is Kind.ZERO:
        return operands[1:2]
    kinds = list(map(kind_of, operands))
    is_product = name in _PRODUCTS and Kind.ZERO in kinds
    if is_product or (name == "div" and kinds == [Kind.ZERO, Kind.SAME]):
        is_finite = Kind.OTHER not in kinds or not _is_inexact(pair)  # 0 times infinity is NaN
        return [ZERO if is_finite else pair.other(Why.UNKNOWN)]
    if Kind.OTHER in kinds and (found := worst(operands)) is not None:
        return [_passed_on(pair, found, operands)] * count
    is_added = name in ADDITION and {*kinds} == {Kind.ROWS, Kind.PART}
    if Kind.SPREAD in kinds or Kind.ADDED in kinds or is_added:
        causes = [x.cause for x in operands if x.kind is Kind.ADDED and x.cause is not None]
        different = Relation(Kind.OTHER, cause=causes[0]) if causes else pair.other(Why.PART)
        return [guarded(_of_sums, "sharding", "out_sharding")(pair, operands) or different] * count
    keeps_zero = name in _KEEPS_ZERO or pair.eqn.params.get("y", 0) > 0  # `integer_pow`
    if keeps_zero and all(x.kind is Kind.ZERO for x in _values(pair, operands)):
        return [ZERO] * count
    if all(x.is_equal for x in operands) and _is_same_operation(pair):
        outputs = zip(pair.eqn.outvars, pair.whole.outvars, strict=True)
        is_scaled = pair.row_counts is not None and pair.scaled_axes()
        if not is_scaled and all(shape_of(a) == shape_of(b) for a, b in outputs):
            return [SAME] * count
    return [_found(pair, operands) or _failed(pair, operands)] * count


def _values(pair: Pair, operands: list[Relation]) -> list[Relation]:
    """Returns the operands whose elements are the result's, without indices and predicates."""
    dtype, fill = dtype_of(pair.eqn.outvars[0]), pair.eqn.params.get("fill_value")
    is_filled = fill is not None and fill == fill and fill != 0
    if not operands or is_filled or (pair.name == "scatter" and not overwrites(pair)):
        return [SAME]
    pairs = zip(operands, pair.eqn.invars, strict=True)
    return [x for x, atom in pairs if dtype_of(atom) == dtype] or operands


def _passed_on(pair: Pair, x: Relation, operands: list[Relation]) -> Relation:
    """Returns the relation of a function of a value that does not relate."""
    name, cause = pair.name, x.cause
    is_extreme = cause is not None and cause.why is Why.EXTREME
    if name in _SORTS or (is_extreme and name in _COMPARING):
        return pair.other(Why.UNKNOWN)  # a permutation without effect, or whether any is true
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
    name, is_of_rows = pair.name, any(x.kind is Kind.ROWS for x in operands)
    if (name in SAMPLER or name in KEY) and (not is_of_rows or samples_jointly(pair.eqn)):
        return pair.other(Why.SAMPLES)
    if min(map(operator.attrgetter("axis"), operands), default=0) < 0 and _is_same_operation(pair):
        found = of_each_row(operands)
        if found is not None and not pair.scaled_axes():
            return found
    rule = _RULES.get(name)
    return rule(pair, operands) if rule is not None else None


def _failed(pair: Pair, operands: list[Relation]) -> Relation:
    """Returns the relation of a result that no rule knows."""
    kinds = {x.kind for x in operands}
    if pair.name not in ELEMENTWISE or kinds & {Kind.MOST, Kind.LEAST}:
        return pair.other(Why.UNKNOWN)
    if len({x.axis for x in operands if x.kind is Kind.ROWS}) > 1:
        # The difference of a row and itself is 0, so that pairs of other rows must count.
        return pair.other(Why.ROWS if pair.name == "sub" else Why.PAIRS)
    if Kind.PART in kinds:
        # The digits of an integer are functions of a part, but may be added up again.
        is_float = jnp.issubdtype(dtype_of(pair.eqn.invars[0]), jnp.inexact)
        is_known = is_float and pair.name != "is_finite"
        return pair.other(Why.PART if is_known else Why.UNKNOWN)
    causes = [x.cause for x in operands if x.kind is Kind.SAME and x.scale != 1 and x.cause]
    if causes and kinds <= {Kind.SAME, Kind.ZERO} and pair.name not in _HIDES_FACTOR:
        return Relation(Kind.OTHER, cause=causes[0])
    has_factor = any(x.kind is Kind.ROWS and x.scale != 1 for x in operands)
    return pair.other(Why.FACTOR if has_factor else Why.UNKNOWN)


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
    **dict.fromkeys(REDUCTION, guarded(_reduction, "out_sharding")),
    **dict.fromkeys(ELEMENTWISE, guarded(_elementwise, "sharding")),
    "dot_general": guarded(_dot),
    "conv_general_dilated": guarded(_convolution),
    **relation_shapes.RULES,
    **dict.fromkeys(_KEYS.split(), guarded(_keys)),
}
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
_SORTS = frozenset({"sort", "top_k"})
_CHOOSES = PICKING | {"mul", "select_n", "slice"}
_ZERO_OF_ZERO = """
abs copy dynamic_update_slice mul reduce_max reduce_min reduce_or select_n sqrt square tanh
"""
_KEEPS_ZERO = SHAPING | PICKING | JOINING | LINEAR | ADDITION | CASTING | SCATTER
_KEEPS_ZERO |= {*_ZERO_OF_ZERO.split()}
# A softmax forgets the factor of a logarithm, and a clipped gradient its own factor.
_HIDES_FACTOR = _COMPARING - {"sign"} | {"log", "log1p", "log2", "clamp", "max", "min"}
