"""The rules of `relate`: how the results of each operation relate, given its operands."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

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
    CASTING,
    ELEMENTWISE,
    KEY,
    LINEAR,
    PASSING,
    PRIMITIVES,
    REDUCTION,
    SAMPLER,
    SCATTER,
    SHAPING,
    op_of,
)
from mirror._src.jaxprs.relations import (
    SAME,
    ZERO,
    Kind,
    Pair,
    Relation,
    Why,
    common,
    part,
    rows,
    worst,
)

Rule = Callable[[Pair, list[Relation]], Relation | None]
_ONE = Fraction(1)
_EXTREMES = {"max": Kind.MOST, "min": Kind.LEAST}
_OPPOSITE = {Kind.MOST: Kind.LEAST, Kind.LEAST: Kind.MOST}
_SCALED = frozenset({"abs", "max", "min", "reduce_max", "reduce_min", "reduce_window_max"})
_COMPARING = frozenset({"eq", "ge", "gt", "le", "lt", "ne", "sign"})
_POWERS = {"square": 2, "reciprocal": -1}
_NARROW = 4  # bytes below which an integer sum may wrap on one device only


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
    if all(x.is_equal for x in operands) and _is_same_operation(pair):
        is_zero = operands and name in _KEEPS_ZERO and all(x.kind is Kind.ZERO for x in operands)
        outputs = zip(pair.eqn.outvars, pair.whole.outvars, strict=True)
        if all(_shape(a) == _shape(b) for a, b in outputs):
            return [ZERO if is_zero else SAME] * count
    return [(_found(pair, operands) or _failed(pair, operands))] * count


def _is_same_operation(pair: Pair) -> bool:
    """Whether two operations differ in their operands only."""
    is_known = pair.name != "scatter" or _overwrites(pair)
    return is_known and pair.has_equal_params("update_jaxpr", "name")


def _found(pair: Pair, operands: list[Relation]) -> Relation | None:
    """Returns the relation of the results, `None` if no rule knows it."""
    name = pair.name
    if any(x.axis < 0 for x in operands) and _is_same_operation(pair):
        found = _of_each_row(operands)
        if found is not None and not pair.scaled_axes():
            return found
    if name == "dot_general":
        return _bilinear(pair, operands, _dot(pair, operands))
    if name == "conv_general_dilated":
        return _bilinear(pair, operands, _convolution(pair, operands))
    if name in SCATTER:
        return _scatter(pair, operands)
    if name in ELEMENTWISE:
        return _elementwise(pair, operands)
    if name in REDUCTION:
        return _reduction(pair, operands)
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


# Collectives


def _collective(pair: Pair, x: Relation) -> Relation:
    """Returns the relation of the result of a collective; over one device, it is its operand."""
    name, n = pair.name, pair.num_replicas
    if x.kind in (Kind.ZERO, Kind.OTHER):
        return x
    if not spans_whole_axis(pair.eqn):
        return pair.other(Why.UNKNOWN)
    if name in ALL_REDUCES and x.kind is Kind.ROWS and x.axis in axes_of(pair.eqn):
        kind = Kind.PART if name == "psum" else _EXTREMES[op_of(name)]  # as under `jax.vmap`
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
        return pair.other(Why.EXTREME if x.kind in _OPPOSITE else Why.UNKNOWN)
    if name in ("pmax", "pmin"):
        if x.kind is Kind.SAME:
            return x
        if x.kind is _EXTREMES[op_of(name)]:
            return SAME.by(x.scale, pair.cause(Why.SCALE))
        if x.kind is Kind.PART:
            return pair.other(Why.PART)
        return pair.other(Why.EXTREME if x.kind in _OPPOSITE else Why.UNKNOWN)
    return pair.other(Why.UNKNOWN)


# Arithmetic


def _elementwise(pair: Pair, xs: list[Relation]) -> Relation | None:
    name = pair.name
    if not pair.has_equal_params("sharding"):
        return None
    if name in ADDITION:
        return _sum(pair, xs)
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
    if name == "not" and xs[0].kind in _OPPOSITE and _dtype(pair.eqn.invars[0]) == jnp.bool_:
        return xs[0]._replace(kind=_OPPOSITE[xs[0].kind])
    powers = {**_POWERS, "integer_pow": pair.eqn.params.get("y")}
    first = xs[0]
    if name in powers and first.kind in (Kind.SAME, Kind.ROWS):
        power: Any = powers[name]
        scale = first.scale**power
        if first.kind is Kind.ROWS:
            return first._replace(scale=scale)
        return first.by(scale / first.scale, pair.cause(Why.SCALE))
    if name in _SCALED or name in _COMPARING:
        found = _alike(xs)
        if found is not None:
            return found if name in _SCALED else found._replace(scale=_ONE, cause=None)
    if name in ("max", "min") and _EXTREMES[name] in {x.kind for x in xs}:
        kind = _EXTREMES[name]
        is_known = all(x.is_equal or (x.kind is kind and x.scale == 1) for x in xs)
        return Relation(kind) if is_known else None
    return _of_each_row(xs) or _uniform(pair, xs)


def _alike(xs: list[Relation]) -> Relation | None:
    """Returns the relation of rows, or of what all have, of one scale; `None` if it is another."""
    values = [x for x in xs if x.kind is not Kind.ZERO]
    if not values or any(x.kind not in (Kind.SAME, Kind.ROWS) for x in values):
        return None
    if len({x.scale for x in values}) > 1:
        return None
    axes = {x.axis for x in values if x.kind is Kind.ROWS}
    if len(axes) > 1:
        return None
    return rows(axes.pop(), values[0].scale) if axes else values[0]


def _of_each_row(xs: list[Relation]) -> Relation | None:
    """Returns the relation of a function of each row, and of what all replicas have."""
    found = _alike(xs)
    return found if found is not None and found.scale == 1 else None


def _uniform(pair: Pair, xs: list[Relation]) -> Relation | None:
    """Returns the relation of an array of one number, whose length depends on the batch."""
    axes = pair.scaled_axes()
    is_known = all(x.kind is Kind.ZERO or (x.is_equal and not _shape(a)) for x, a in _zip(pair, xs))
    return rows(axes[0]) if is_known and len(axes) == 1 else None


def _sum(pair: Pair, xs: list[Relation]) -> Relation | None:
    found = common(xs, pair.num_replicas)
    if found is not None and found.kind in (Kind.ZERO, Kind.SAME, Kind.ROWS, Kind.PART):
        return found
    kinds = {x.kind for x in xs}
    (first, second) = xs
    if kinds == {Kind.NUMBER, Kind.ZERO} and (pair.name != "sub" or second.kind is Kind.ZERO):
        return found
    if pair.name != "sub" and Kind.INDEX in kinds:
        index, step = (first, second) if first.kind is Kind.INDEX else (second, first)
        if step.kind is Kind.ZERO:
            return index
        is_position = step.kind is Kind.NUMBER and step.scale == index.scale
        return rows(index.axis) if is_position and not index.columns else None
    if kinds <= {Kind.SAME, Kind.ROWS, Kind.ZERO}:
        return _alike(xs) or _scales_differ(xs)
    if kinds == {Kind.SAME, Kind.PART}:
        scaled = [x for x in xs if x.kind is Kind.SAME]
        return None if _is_literal(pair, xs, scaled[0]) else pair.other(Why.SCALE)
    if Kind.PART in kinds and kinds <= {Kind.PART, Kind.ROWS}:
        return pair.other(Why.PART)
    return None


def _scales_differ(xs: list[Relation]) -> Relation | None:
    causes = [x.cause for x in xs if x.cause is not None and x.kind is Kind.SAME]
    return Relation(Kind.OTHER, cause=causes[0]) if causes else None


def _is_literal(pair: Pair, xs: list[Relation], x: Relation) -> bool:
    return isinstance(pair.eqn.invars[xs.index(x)], Literal)


def _counted(pair: Pair, xs: list[Relation]) -> Relation | None:
    """Returns the relation of the index of a replica times a constant."""
    kinds = [x.kind for x in xs]
    if Kind.NUMBER not in kinds:
        return None
    i = kinds.index(Kind.NUMBER)
    atom = pair.eqn.invars[1 - i]
    if not isinstance(atom, Literal) or not jnp.issubdtype(_dtype(atom), jnp.integer):
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
    if not pair.has_equal_params():
        return None
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
        return rows_of._replace(scale=scale) if rows_of.kind is not Kind.OTHER else rows_of
    axes = {each.axis for each in xs if each.kind is Kind.ROWS}
    is_known = all(each.kind in (Kind.SAME, Kind.ROWS) for each in xs)
    is_each = len(axes) == 1 and (pair.name == "mul" or max(axes) < 0)
    return rows(axes.pop(), scale) if is_known and is_each else None


def _blamed(pair: Pair, xs: list[Relation], scale: Fraction) -> Any:
    """Returns the cause of the factor of a product of what all replicas have."""
    if scale == 1:
        return None
    causes = [x.cause for x in xs if x.cause is not None]
    is_constant = all(isinstance(atom, Literal) or x.scale != 1 for x, atom in _zip(pair, xs))
    return causes[0] if causes else None if is_constant else pair.cause(Why.SCALE)


def _quotient(pair: Pair, xs: list[Relation]) -> Relation | None:
    x, y = xs
    if x.kind is Kind.ZERO:
        return ZERO if y.kind in (Kind.SAME, Kind.ROWS) else None
    if y.kind not in (Kind.SAME, Kind.ROWS):
        return None
    scale = x.scale / y.scale
    if not jnp.issubdtype(_dtype(pair.eqn.outvars[0]), jnp.inexact) and (
        scale != 1 or x.kind is Kind.PART
    ):
        return None  # whose result is rounded
    if y.kind is Kind.SAME and x.kind is Kind.SAME:
        return SAME._replace(scale=scale, cause=_blamed(pair, xs, scale))
    if y.kind is Kind.SAME and x.kind is Kind.PART:
        return part(scale)
    axes = {each.axis for each in xs if each.kind is Kind.ROWS}
    is_known = x.kind in (Kind.SAME, Kind.ROWS) and len(axes) == 1
    return rows(axes.pop(), scale) if is_known else None


def _selection(pair: Pair, xs: list[Relation]) -> Relation | None:
    predicate, *cases = xs
    if predicate.is_equal:
        found = common(cases, pair.num_replicas)
        if found is not None:
            return found if found.kind is not Kind.NUMBER else None
        return _alike(cases) or _scales_differ(cases)
    if predicate.kind is not Kind.ROWS or predicate.scale != 1:
        return None
    values = [x for x in cases if x.kind is not Kind.ZERO]
    if not values:
        return ZERO
    found = _alike(values)
    is_alike = found is not None and found.axis in (0, predicate.axis)
    if found is None or not is_alike:
        return None
    if found.kind is Kind.ROWS and found.axis != predicate.axis:
        return None
    return rows(predicate.axis, found.scale)


def _conversion(pair: Pair, x: Relation) -> Relation | None:
    old, new = _dtype(pair.eqn.invars[0]), _dtype(pair.eqn.outvars[0])
    if x.is_equal or (x.kind is Kind.ROWS and x.scale == 1):
        return x
    is_inexact = jnp.issubdtype(new, jnp.inexact)
    if jnp.issubdtype(old, jnp.inexact):
        return x if is_inexact else None
    if x.kind in _OPPOSITE:
        return x if is_inexact or jnp.bool_ in (old, new) else None
    is_wide = old.itemsize >= _NARROW and new.itemsize >= old.itemsize
    if x.kind in (Kind.INDEX, Kind.NUMBER):
        return x if is_inexact or jnp.issubdtype(new, jnp.integer) else None
    if old.itemsize >= _NARROW and (is_inexact or is_wide):
        return x
    return pair.other(Why.UNKNOWN)  # whose sum may wrap on one device only


# Reductions


def _reduction(pair: Pair, xs: list[Relation]) -> Relation | None:
    (x,) = xs
    if not pair.has_equal_params("out_sharding"):
        return None
    name, axes = pair.name, pair.eqn.params["axes"]
    if x.kind is Kind.ZERO:
        return ZERO if name in _KEEPS_ZERO else None
    if x.kind is not Kind.ROWS:
        is_linear = name == "reduce_sum" and x.kind in (Kind.SAME, Kind.PART)
        is_extreme = x.kind is Kind.SAME and name in _SCALED
        is_same = x.kind in _EXTREMES.values() and _EXTREMES.get(op_of(name)) is x.kind
        return x if is_linear or is_extreme or is_same else None
    if x.axis in axes:
        if name == "reduce_sum":
            return part(x.scale)
        kind = _EXTREMES.get(op_of(name))
        return Relation(kind, x.scale) if kind is not None else None
    axis = x.axis - sum(axis < x.axis for axis in axes) if x.axis >= 0 else x.axis
    if name == "reduce_sum" or name in _SCALED:
        return rows(axis, x.scale)
    return rows(axis) if x.scale == 1 else None


def _along(*names: str, is_linear: bool = False) -> Rule:
    """Returns the rule of an operation that combines entries along the axis of a parameter."""

    def rule(pair: Pair, xs: list[Relation]) -> Relation | None:
        if not pair.has_equal_params("name"):
            return None
        values = [pair.eqn.params[name] for name in names if name in pair.eqn.params]
        axes = [axis for x in values for axis in (x if isinstance(x, tuple) else (x,))]
        return _batched(xs, lambda axis: axis not in axes, is_linear=is_linear)

    return rule


def _along_last(count: int) -> Rule:
    """Returns the rule of an operation that combines entries along the last axes."""

    def rule(pair: Pair, xs: list[Relation]) -> Relation | None:
        last = min(len(_shape(atom)) for atom in pair.eqn.invars) - count
        return _batched(xs, lambda axis: axis < last) if pair.has_equal_params() else None

    return rule


def _batched(
    xs: list[Relation], is_free: Callable[[int], bool], *, is_linear: bool = False
) -> Relation | None:
    """Returns the relation of what each row of all operands gives."""
    if is_linear and len(xs) == 1 and xs[0].kind in (Kind.PART, Kind.SAME, Kind.ZERO):
        return xs[0]
    found = _alike(xs)
    if found is None or found.kind is not Kind.ROWS or not is_free(found.axis):
        return None
    if any(x.kind is Kind.SAME for x in xs):
        return None
    return found if found.scale == 1 or is_linear else None


def _window(pair: Pair, xs: list[Relation]) -> Relation | None:
    params = pair.eqn.params
    if not pair.has_equal_params():
        return None
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")

    def is_free(axis: int) -> bool:
        if axis < 0:
            return True
        sizes = [params[name][axis] for name in names if name in params]
        return all(size == 1 for size in sizes) and tuple(params["padding"][axis]) == (0, 0)

    is_linear = pair.name in ("reduce_window_sum", "reduce_window_max")
    if pair.name == "reduce_window_max" and xs[0].kind is Kind.PART:
        return None
    return _batched(xs, is_free, is_linear=is_linear)


def _pooled(pair: Pair, xs: list[Relation]) -> Relation | None:
    """The rule of the gradient of max-pooling, which is linear in its first operand."""
    source, operand = xs
    found = _window(pair, [source._replace(scale=_ONE), operand])
    return found._replace(scale=source.scale) if found is not None else None


# Shapes


def _kept(x: Relation) -> Relation | None:
    """Returns the relation of elements of an array that is not made of rows."""
    return x if x.kind not in (Kind.ROWS, Kind.INDEX) else None


def _moved(x: Relation, axis: int | None) -> Relation | None:
    return None if axis is None else x._replace(axis=axis)


def _broadcast(pair: Pair, xs: list[Relation]) -> Relation | None:
    (x,), dims = xs, pair.eqn.params["broadcast_dimensions"]
    if not pair.has_equal_params("shape", "sharding"):
        return None
    if x.kind is Kind.ZERO:
        return ZERO
    if x.kind in (Kind.ROWS, Kind.INDEX):
        axis = x.axis if x.axis < 0 else int(dims[x.axis])
        axes = pair.scaled_axes()
        if axes != ([axis] if axis >= 0 else []):
            return pair.other(Why.ROWS)  # the rows of this replica in pairs
        return x._replace(axis=axis) if not x.columns else None
    axes = pair.scaled_axes()
    if not axes:
        return x
    if len(axes) > 1 or x.kind not in (Kind.SAME, Kind.PART):
        return None
    kind = Kind.ROWS if x.kind is Kind.SAME else Kind.SPREAD
    return Relation(kind, x.scale, axes[0])


def _reshape(pair: Pair, xs: list[Relation]) -> Relation | None:
    (x,) = xs
    if not pair.has_equal_params("new_sizes", "sharding") or pair.eqn.params["dimensions"]:
        return None
    if x.kind is Kind.ZERO or x.axis < 0 or x.kind not in (Kind.ROWS, Kind.INDEX):
        return x
    axes = pair.scaled_axes()
    if len(axes) != 1 or x.columns:
        return None
    before, after = _shape(pair.eqn.invars[0]), _shape(pair.eqn.outvars[0])
    (axis,) = axes
    # The rows of one replica are as many entries apart as before.
    is_same = math.prod(before[: x.axis]) == math.prod(after[:axis])
    return _moved(x, axis) if is_same and 0 not in before else None


def _transpose(pair: Pair, xs: list[Relation]) -> Relation | None:
    (x,), order = xs, pair.eqn.params["permutation"]
    if not pair.has_equal_params() or x.columns:
        return None
    is_moved = x.kind in (Kind.ROWS, Kind.INDEX) and x.axis >= 0
    return x._replace(axis=list(order).index(x.axis)) if is_moved else x


def _squeeze(pair: Pair, xs: list[Relation]) -> Relation | None:
    (x,), ndim = xs, len(_shape(pair.eqn.invars[0]))
    dims = {d % ndim for d in pair.eqn.params["dimensions"]}
    if not pair.has_equal_params() or x.columns:
        return None
    if x.kind not in (Kind.ROWS, Kind.INDEX) or x.axis < 0:
        return x
    return None if x.axis in dims else x._replace(axis=x.axis - sum(d < x.axis for d in dims))


def _reverse(pair: Pair, xs: list[Relation]) -> Relation | None:
    (x,) = xs
    if not pair.has_equal_params() or x.kind is Kind.INDEX:
        return None
    is_mixed = x.kind is Kind.ROWS and x.axis in pair.eqn.params["dimensions"]
    return None if is_mixed else x


def _slice(pair: Pair, xs: list[Relation]) -> Relation | None:
    (x,) = xs
    if x.kind is not Kind.ROWS or x.axis < 0:
        return x if pair.has_equal_params() and x.kind is not Kind.INDEX else None
    for eqn in (pair.eqn, pair.whole):
        start, stop = eqn.params["start_indices"], eqn.params["limit_indices"]
        strides = eqn.params["strides"] or [1] * len(start)
        full = (0, _shape(eqn.invars[0])[x.axis], 1)
        if (start[x.axis], stop[x.axis], strides[x.axis]) != full:
            return pair.other(Why.ROWS)
    others = [i for i in range(len(start)) if i != x.axis]
    a, b = pair.eqn.params, pair.whole.params
    names = ("start_indices", "limit_indices", "strides")
    is_equal = all(
        a[name] == b[name] or all(a[name][i] == b[name][i] for i in others) for name in names
    )
    return x if is_equal else None


def _split(pair: Pair, xs: list[Relation]) -> Relation | None:
    (x,) = xs
    if not pair.has_equal_params() or x.kind is Kind.INDEX:
        return None
    is_mixed = x.kind is Kind.ROWS and x.axis == pair.eqn.params["axis"]
    return None if is_mixed else x


def _stack(pair: Pair, xs: list[Relation]) -> Relation | None:
    axis, found = pair.eqn.params["axis"], common(xs, pair.num_replicas) or _alike(xs)
    if not pair.has_equal_params() or found is None or found.kind in (Kind.INDEX, Kind.NUMBER):
        return None
    is_moved = found.kind is Kind.ROWS and found.axis >= axis
    return found._replace(axis=found.axis + 1) if is_moved else found


def _unstack(pair: Pair, xs: list[Relation]) -> Relation | None:
    (x,), axis = xs, pair.eqn.params["axis"]
    if not pair.has_equal_params() or x.kind is Kind.INDEX:
        return None
    if x.kind is not Kind.ROWS or x.axis < 0:
        return x
    return None if x.axis == axis else x._replace(axis=x.axis - (x.axis > axis))


def _joined(pair: Pair, xs: list[Relation]) -> Relation | None:
    """The rule of `concatenate`."""
    axis = pair.eqn.params["dimension"]
    if not pair.has_equal_params():
        return None
    if any(x.kind is Kind.INDEX for x in xs):
        return _indices(pair, xs, axis)
    found = common(xs, pair.num_replicas) or _alike(xs)
    if found is None or found.kind is Kind.NUMBER:
        return None
    return None if found.kind is Kind.ROWS and found.axis == axis else found


def _indices(pair: Pair, xs: list[Relation], axis: int) -> Relation | None:
    """Returns the relation of indices, whose columns are joined along the last axis."""
    ndim = len(_shape(pair.eqn.outvars[0]))
    is_known = all(x.kind is Kind.INDEX or (x.kind is Kind.ROWS and x.scale == 1) for x in xs)
    is_single = all(_shape(atom)[axis] == 1 for atom in pair.eqn.invars)
    if axis != ndim - 1 or not is_known or not is_single or len({x.axis for x in xs}) > 1:
        return None
    if len({x.scale for x in xs if x.kind is Kind.INDEX}) > 1 or xs[0].axis == axis:
        return None
    index = next(x for x in xs if x.kind is Kind.INDEX)
    columns = frozenset(i for i, x in enumerate(xs) if x.kind is Kind.INDEX)
    return index._replace(columns=columns)


def _pad(pair: Pair, xs: list[Relation]) -> Relation | None:
    x, value = xs
    if not pair.has_equal_params():
        return None
    if x.kind is Kind.ROWS:
        config = pair.eqn.params["padding_config"]
        if x.axis >= 0 and tuple(config[x.axis]) != (0, 0, 0):
            return None
        return x if value.kind is Kind.ZERO or (value.is_equal and x.scale == 1) else None
    found = common(xs, pair.num_replicas)
    return found if found is not None and found.kind in (*_EXACT, Kind.PART) else None


def _iota(pair: Pair, _: list[Relation]) -> Relation | None:
    axes, dimension = pair.scaled_axes(), pair.eqn.params["dimension"]
    if len(axes) != 1 or not pair.has_equal_params("shape", "sharding"):
        return None
    (axis,) = axes
    size = _shape(pair.eqn.outvars[0])[axis]
    return rows(axis) if axis != dimension else Relation(Kind.INDEX, Fraction(size), axis)


# Products


def _dot(pair: Pair, xs: list[Relation]) -> Relation | None:
    """Returns the relation of a product of matrices whose rows are examples, without a factor."""
    (contracted, batched) = pair.eqn.params["dimension_numbers"]
    ranks = [len(_shape(atom)) for atom in pair.eqn.invars]
    found = []
    for i, x in enumerate(xs):
        if x.kind is not Kind.ROWS or x.axis < 0:
            continue
        free = [a for a in range(ranks[i]) if a not in contracted[i] and a not in batched[i]]
        before = len(batched[0])
        if i == 1:
            before += ranks[0] - len(contracted[0]) - len(batched[0])
        if x.axis in contracted[i]:
            found.append(("sum", list(contracted[i]).index(x.axis)))
        elif x.axis in batched[i]:
            found.append(("batch", list(batched[i]).index(x.axis)))
        else:
            found.append(("free", before + free.index(x.axis)))
    if any(x.kind not in (Kind.ROWS, Kind.SAME) or x.axis < 0 for x in xs):
        return None
    return _product(pair, found)


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
            return None
    if any(x.kind not in (Kind.ROWS, Kind.SAME) or x.axis < 0 for x in xs):
        return None
    return _product(pair, found)


def _product(pair: Pair, found: Sequence[tuple[str, int]]) -> Relation | None:
    """Returns the relation of a product, given what it does with the rows of its operands."""
    if len(found) == 1:
        ((how, axis),) = found
        return rows(axis) if how == "free" else None
    if len(found) == 2 and found[0] == found[1] and found[0][0] != "free":
        ((how, axis), _) = found
        return part() if how == "sum" else rows(axis)
    return pair.other(Why.ROWS) if len(found) == 2 else None


# Indices


def _dynamic_slice(pair: Pair, xs: list[Relation]) -> Relation | None:
    x, *starts = xs
    if not all(start.is_equal for start in starts):
        return None
    if x.kind is not Kind.ROWS or x.axis < 0:
        return _kept(x) if pair.has_equal_params() or x.axis < 0 else None
    if not pair.is_full(x.axis, "slice_sizes"):
        return pair.other(Why.ROWS)
    return x if pair.has_equal_params("slice_sizes") else None


def _dynamic_update(pair: Pair, xs: list[Relation]) -> Relation | None:
    array, update, *starts = xs
    if not all(start.is_equal for start in starts) or not pair.has_equal_params():
        return None
    found = common([array, update], pair.num_replicas)
    if found is None or found.kind in (Kind.INDEX, Kind.NUMBER):
        return None
    if found.kind is not Kind.ROWS or found.axis < 0:
        return found
    size, whole = (_shape(atom)[found.axis] for atom in pair.eqn.invars[:2])
    return found if size == whole else None


def _gather(pair: Pair, xs: list[Relation]) -> Relation | None:
    x, index = xs
    if not pair.has_equal_params("slice_sizes"):
        return None
    numbers = pair.eqn.params["dimension_numbers"]
    ndim, rank = len(_shape(pair.eqn.outvars[0])), len(_shape(pair.eqn.invars[0]))
    batch = [d for d in range(ndim) if d not in numbers.offset_dims]
    outside = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [d for d in range(rank) if d not in outside]
    last = len(_shape(pair.eqn.invars[1])) - 1
    is_own = x.kind is Kind.ROWS and x.axis >= 0
    if index.is_equal:
        if not is_own:
            return _kept(x) if pair.has_equal_params() else None
        if x.axis in numbers.start_index_map or x.axis not in window:
            return pair.other(Why.ROWS)
        is_full = pair.is_full(x.axis, "slice_sizes")
        return _moved(x, numbers.offset_dims[window.index(x.axis)]) if is_full else None
    if not pair.has_equal_params() or not 0 <= index.axis < last:
        return None
    if index.kind is Kind.ROWS and index.scale == 1:
        if x.kind is Kind.SAME:
            return rows(batch[index.axis], x.scale)
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        is_matched = is_own and (x.axis, index.axis) in pairs
        return rows(batch[index.axis], x.scale) if is_matched else None
    if index.kind is Kind.INDEX and is_own and _is_position(pair, index, x.axis):
        is_collapsed = x.axis in numbers.collapsed_slice_dims
        columns = index.columns or frozenset({0})
        is_read = columns == {list(numbers.start_index_map).index(x.axis)} if is_collapsed else None
        return rows(batch[index.axis], x.scale) if is_read else None
    return None


def _is_position(pair: Pair, index: Relation, axis: int) -> bool:
    """Whether an index counts the rows of an operand's axis."""
    numbers = pair.eqn.params["dimension_numbers"]
    read = getattr(numbers, "start_index_map", None)
    indexed: Any = numbers.scatter_dims_to_operand_dims if read is None else read
    return axis in indexed and _shape(pair.eqn.invars[0])[axis] == index.scale


def _scatter(pair: Pair, xs: list[Relation]) -> Relation | None:
    array, index, update = xs
    adds = pair.name in ("scatter-add", "scatter-sub")
    if not pair.has_equal_params("update_jaxpr") or not (adds or _overwrites(pair)):
        return None
    numbers = pair.eqn.params["dimension_numbers"]
    shapes = [_shape(atom) for atom in pair.eqn.invars]
    window_dims = numbers.update_window_dims
    batch = [d for d in range(len(shapes[2])) if d not in window_dims]
    outside = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [d for d in range(len(shapes[0])) if d not in outside]
    if index.is_equal:
        found = common([array, update], pair.num_replicas)
        if found is not None and found.kind in (*_EXACT, Kind.PART):
            return found
        if update.kind is not Kind.ROWS or update.axis not in window_dims:
            return None
        target = rows(window[list(window_dims).index(update.axis)], update.scale)
        is_full = shapes[0][target.axis] == shapes[2][update.axis]
        is_alike = array.kind is Kind.ZERO or array == target
        is_free = target.axis not in numbers.scatter_dims_to_operand_dims
        return target if is_full and is_alike and is_free else None
    if update.kind is not Kind.ROWS or not 0 <= index.axis < len(batch):
        return None
    if update.axis != batch[index.axis]:
        return None
    if index.kind is Kind.ROWS and index.scale == 1:
        for axis, by in zip(
            numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
        ):
            if by == index.axis:
                target = rows(axis, update.scale)
                return target if array in (ZERO, target) else None
        found = common([array, part(update.scale)], pair.num_replicas)
        return found if adds and found is not None and found.kind is Kind.PART else None
    if index.kind is Kind.INDEX:
        columns = index.columns or frozenset({0})
        if len(columns) != 1:
            return None
        axis = numbers.scatter_dims_to_operand_dims[next(iter(columns))]
        target = rows(axis, update.scale)
        is_row = axis in numbers.inserted_window_dims and _is_position(pair, index, axis)
        return target if is_row and array in (ZERO, target) else None
    return None


def _overwrites(pair: Pair) -> bool:
    """Whether a `scatter` writes its updates as they are."""
    program = pair.eqn.params["update_jaxpr"]
    return pair.name == "scatter" and (program is None or not jaxpr_of(program).eqns)


# Random numbers


def _keys(pair: Pair, xs: list[Relation]) -> Relation | None:
    """The rule of keys of which each belongs to an example."""
    if not pair.has_equal_params():
        return None
    found = _of_each_row(xs)
    ndim = len(_shape(pair.eqn.outvars[0]))
    return found if found is not None and found.axis < ndim else None


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype


def _zip(pair: Pair, xs: list[Relation]) -> Any:
    return zip(xs, pair.eqn.invars, strict=True)


_EXACT = (Kind.ZERO, Kind.SAME)
_MIXES_ROWS = frozenset({"argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin"})
_KEEPS_CLASS = frozenset({"is_finite"})
_KEEPS_ZERO = SHAPING | {"abs", "add", "add_any", "concatenate", "convert_element_type", "copy"}
_KEEPS_ZERO |= {"cumsum", "dynamic_slice", "mul", "neg", "reduce_max", "reduce_min", "reduce_or"}
_KEEPS_ZERO |= {"reduce_sum", "select_n", "sub"}
_CUMULATIVE = _along("axis")
_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "rev": _reverse,
    "slice": _slice,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "concatenate": _joined,
    "pad": _pad,
    "iota": _iota,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "gather": _gather,
    "cumsum": _along("axis", is_linear=True),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "cumlogsumexp"), _CUMULATIVE),
    "sort": _along("dimension"),
    "top_k": _along("axis"),
    "reduce_window_sum": _window,
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "select_and_scatter_add": _pooled,
    "select_and_gather_add": _window,
    **dict.fromkeys(("cholesky", "lu", "qr", "triangular_solve", "eigh", "svd"), _along_last(2)),
    **dict.fromkeys(
        (
            "random_bits",
            "random_clone",
            "random_fold_in",
            "random_gamma",
            "random_split",
            "random_unwrap",
            "random_wrap",
            "threefry2x32",
        ),
        _keys,
    ),
}
