"""The rules of shapes and indices: where the rows of an array are after an operation."""

import itertools
import math
import operator
from collections.abc import Collection, Sequence
from fractions import Fraction

from mirror._src.jaxprs.equations import jaxpr_of
from mirror._src.jaxprs.primitives import (
    COMBINING,
    MOVES,
    SCATTER,
    axis_after,
    combined_axes,
    gather_axes,
    scatter_axes,
    shape_of,
)
from mirror._src.jaxprs.relations import (
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
    moved,
    part,
    rows,
)

_ONE = Fraction(1)
_EXACT = (Kind.ZERO, Kind.SAME)


def _combined(pair: Pair, xs: list[Relation]) -> Relation | None:
    """The rule of operations that combine entries along some axes, or move them."""
    is_linear, kinds = pair.name in _SCALED, {x.kind for x in xs}
    if is_linear and kinds <= {*_EXACT, Kind.PART}:
        return xs[0] if pair.name != "reduce_window_max" or kinds != {Kind.PART} else None
    found = alike(xs)
    if found is None or Kind.SAME in kinds or found.axis in combined_axes(pair.eqn):
        return None
    return found if found.scale == 1 or is_linear else None


def _triangular_solve(pair: Pair, xs: list[Relation]) -> Relation | None:
    """The rule of the solution of systems, which is linear in the right-hand sides."""
    matrix, sides = xs
    ndim = len(shape_of(pair.eqn.invars[1]))
    if matrix == SAME and sides.kind in (Kind.PART, Kind.SAME, Kind.ZERO):
        return sides
    if matrix == SAME and sides.kind is Kind.ROWS:  # each side is a column, or a row
        is_side = sides.axis == ndim - (1 if pair.eqn.params["left_side"] else 2)
        return sides if is_side or sides.axis < 0 else None
    is_batch = matrix == rows(sides.axis) and sides.axis < ndim - 2
    return sides if sides.kind is Kind.ROWS and is_batch else None


def _pooled(pair: Pair, xs: list[Relation]) -> Relation | None:
    """The rule of the gradient of max-pooling, which is linear in its first operand."""
    source, operand = xs
    found = _combined(pair, [source._replace(scale=_ONE), operand])
    return found._replace(scale=source.scale) if found is not None else None


def _kept(x: Relation) -> Relation | None:
    """Returns the relation of elements of an array that is not made of rows."""
    return x if x.kind not in (Kind.ROWS, Kind.INDEX) else None


def _broadcast(pair: Pair, xs: list[Relation]) -> Relation | None:
    (x,), dims = xs, pair.eqn.params["broadcast_dimensions"]
    if x.kind in (Kind.ROWS, Kind.INDEX):
        axis = x.axis if x.axis < 0 else int(dims[x.axis])
        axes = pair.scaled_axes()
        if pair.row_counts is None and axes != ([axis] if axis >= 0 else []):
            return pair.other(Why.PAIRS) if x.kind is Kind.ROWS else None
        return x._replace(axis=axis) if not x.columns else None
    axes = pair.scaled_axes()
    if not axes:
        return x
    if len(axes) > 1 and x.is_equal:
        return pair.other(Why.CONSTANT)
    if len(axes) > 1 or x.kind not in (Kind.SAME, Kind.PART):
        return None
    kind = Kind.ROWS if x.kind is Kind.SAME else Kind.SPREAD
    return Relation(kind, x.scale, axes[0])


def _reshape(pair: Pair, xs: list[Relation]) -> Relation | None:
    (x,) = xs
    axes, after = pair.scaled_axes(), shape_of(pair.eqn.outvars[0])
    before, order = shape_of(pair.eqn.invars[0]), pair.eqn.params["dimensions"]
    order = list(order or range(len(before)))
    before = tuple(before[i] for i in order)

    def to(axis: int) -> int | None:
        if 0 in before:
            return None
        if pair.row_counts is not None:
            return _kept_axis(before, after, order.index(axis), pair.row_counts)
        if len(axes) != 1:
            return None
        # The rows of one replica are as many entries apart as before.
        is_same = math.prod(before[: order.index(axis)]) == math.prod(after[: axes[0]])
        return axes[0] if is_same else None

    return moved(x, to) or (_in_pieces(pair, x) if order == sorted(order) else None)


def _kept_axis(
    before: Sequence[int], after: Sequence[int], axis: int, row_counts: Collection[int]
) -> int | None:
    """Returns where a reshape is likely to move the rows of an axis."""
    products = itertools.accumulate(after, operator.mul, initial=1)
    starts = [i for i, size in enumerate(products) if size == math.prod(before[:axis])]
    ends = [i for i in starts if i < len(after) and after[i] > 1]
    joined = [i for i in ends if after[i] % before[axis] == 0]
    split = [i for i in ends if after[i] in row_counts and before[axis] % after[i] == 0]
    return next(iter(joined + split), None)


def _slice(pair: Pair, xs: list[Relation]) -> Relation | None:
    (x,) = xs
    if x.kind is not Kind.ROWS or x.axis < 0:
        return x if pair.has_equal_params() and x.kind is not Kind.INDEX else None
    a, b = pair.eqn.params, pair.whole.params
    sizes = [shape_of(eqn.invars[0])[x.axis] for eqn in (pair.eqn, pair.whole)]
    stops = [each["limit_indices"][x.axis] for each in (a, b)]
    has_steps = any(each["strides"] and each["strides"][x.axis] != 1 for each in (a, b))
    if stops != sizes or has_steps or a["start_indices"][x.axis] or b["start_indices"][x.axis]:
        return _some_rows(pair, "limit_indices", x.axis)
    others = [i for i in range(len(a["start_indices"])) if i != x.axis]
    names = ("start_indices", "limit_indices", "strides")
    is_equal = all(
        a[name] == b[name] or all(a[name][i] == b[name][i] for i in others) for name in names
    )
    return x if is_equal else None


def _in_pieces(pair: Pair, x: Relation) -> Relation | None:
    """Returns the relation of rows that are reshaped to pieces of the batch."""
    before, after = shape_of(pair.eqn.invars[0]), shape_of(pair.eqn.outvars[0])
    axes = pair.scaled_axes()
    if pair.row_counts is not None:  # assumes that the pieces come first
        start = math.prod(before[: max(x.axis, 0)])
        axes = [i for i in range(1, len(after)) if math.prod(after[: i - 1]) == start][:1]
    if x.kind is not Kind.ROWS or x.axis < 0 or len(axes) != 1 or not axes[0] or 0 in before:
        return None
    axis = axes[0]
    is_split = math.prod(before[: x.axis]) == math.prod(after[: axis - 1])
    is_whole = before[x.axis] == after[axis - 1] * after[axis]
    return x._replace(axis=axis, pieces=axis - 1) if is_split and is_whole else None


def _moved(pair: Pair, xs: list[Relation]) -> Relation | None:
    return moved(xs[0], lambda axis: axis_after(pair.eqn, axis))


def _stack(pair: Pair, xs: list[Relation]) -> Relation | None:
    axis, found = pair.eqn.params["axis"], common(xs, pair.num_replicas) or alike(xs)
    if found is None or found.kind in (Kind.INDEX, Kind.NUMBER):
        return None
    return moved(found, lambda a: a + (a >= axis))


def _joined(pair: Pair, xs: list[Relation]) -> Relation | None:
    """The rule of `concatenate`."""
    axis = pair.eqn.params["dimension"]
    if any(x.kind is Kind.INDEX for x in xs):
        return _indices(pair, xs, axis)
    found = common(xs, pair.num_replicas) or alike(xs)
    if found is None or found.kind is Kind.NUMBER:
        return None
    return None if found.kind is Kind.ROWS and found.axis == axis else found


def _indices(pair: Pair, xs: list[Relation], axis: int) -> Relation | None:
    """Returns the relation of indices, whose columns are joined along the last axis."""
    ndim = len(shape_of(pair.eqn.outvars[0]))
    is_known = all(x.kind is Kind.INDEX or (x.kind is Kind.ROWS and x.scale == 1) for x in xs)
    is_single = all(shape_of(atom)[axis] == 1 for atom in pair.eqn.invars)
    if axis != ndim - 1 or not is_known or not is_single or len({x.axis for x in xs}) > 1:
        return None
    if len({x.scale for x in xs if x.kind is Kind.INDEX}) > 1 or xs[0].axis == axis:
        return None
    index = next(x for x in xs if x.kind is Kind.INDEX)
    columns = frozenset(i for i, x in enumerate(xs) if x.kind is Kind.INDEX)
    return index._replace(columns=columns)


def _pad(pair: Pair, xs: list[Relation]) -> Relation | None:
    x, value = xs
    if x.kind is Kind.ROWS:
        config = pair.eqn.params["padding_config"]
        if x.axis >= 0 and tuple(config[x.axis]) != (0, 0, 0):
            return None
        return x if value.kind is Kind.ZERO or (value.is_equal and x.scale == 1) else None
    found = common(xs, pair.num_replicas)
    return found if found is not None and found.kind in (*_EXACT, Kind.PART) else None


def _iota(pair: Pair, _: list[Relation]) -> Relation | None:
    axes, dimension = pair.scaled_axes(), pair.eqn.params["dimension"]
    if len(axes) != 1:
        return None
    (axis,) = axes
    size = shape_of(pair.eqn.outvars[0])[axis]
    return rows(axis) if axis != dimension else Relation(Kind.INDEX, Fraction(size), axis)


def _some_rows(pair: Pair, sizes: str, axis: int) -> Relation | None:
    """Returns the relation of selected rows; a share of the rows may be one of several shares."""
    if pair.row_counts is not None:
        return None
    is_share = pair.eqn.params[sizes][axis] != pair.whole.params[sizes][axis]
    return None if is_share else pair.other(Why.ROWS)


def _dynamic_slice(pair: Pair, xs: list[Relation]) -> Relation | None:
    x, *starts = xs
    if not all(start.is_equal for start in starts):
        return None
    if x.kind is not Kind.ROWS or x.axis < 0:
        return _kept(x) if pair.has_equal_params() or x.axis < 0 else None
    if not pair.is_full(x.axis, "slice_sizes"):
        return _some_rows(pair, "slice_sizes", x.axis)
    return x if pair.has_equal_params("slice_sizes") else None


def _dynamic_update(pair: Pair, xs: list[Relation]) -> Relation | None:
    array, update, *starts = xs
    if not all(start.is_equal for start in starts):
        return None
    found = common([array, update], pair.num_replicas)
    if found is None or found.kind in (Kind.INDEX, Kind.NUMBER):
        return None
    if found.kind is not Kind.ROWS or found.axis < 0:
        return found
    size, whole = (shape_of(atom)[found.axis] for atom in pair.eqn.invars[:2])
    return found if size == whole else None


def _gather(pair: Pair, xs: list[Relation]) -> Relation | None:
    x, index = xs
    numbers = pair.eqn.params["dimension_numbers"]
    if pair.eqn.params["fill_value"] and (x.kind in (Kind.PART, Kind.NUMBER) or x.scale != 1):
        return None  # the number in place of what is outside is not a part
    batch, place = gather_axes(pair.eqn)
    last = len(shape_of(pair.eqn.invars[1])) - 1
    is_own = x.kind is Kind.ROWS and x.axis >= 0
    if index.is_equal:
        if not is_own:
            return _kept(x) if pair.has_equal_params() else None
        if x.axis in numbers.start_index_map or x.axis not in place:
            return _some_rows(pair, "slice_sizes", x.axis)
        is_full = pair.is_full(x.axis, "slice_sizes")
        return x._replace(axis=place[x.axis]) if is_full else None
    if not pair.has_equal_params() or not 0 <= index.axis < last:
        return None
    if index.kind is Kind.ROWS and index.scale == 1:
        if x.kind is Kind.SAME:
            return rows(batch[index.axis], x.scale)
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        is_matched = is_own and (x.axis, index.axis) in pairs
        return rows(batch[index.axis], x.scale) if is_matched else None
    if index.kind is Kind.INDEX and is_own and x.axis in numbers.start_index_map:
        column = list(numbers.start_index_map).index(x.axis)
        is_row = x.axis in numbers.collapsed_slice_dims and _columns(pair, index) == {column}
        is_position = shape_of(pair.eqn.invars[0])[x.axis] == index.scale
        return rows(batch[index.axis], x.scale) if is_row and is_position else None
    return None


def _columns(pair: Pair, index: Relation) -> frozenset[int]:
    """Returns the columns of an index that count rows: all of them, unless others were joined."""
    return index.columns or frozenset(range(shape_of(pair.eqn.invars[1])[-1]))


def _scatter(pair: Pair, xs: list[Relation]) -> Relation | None:
    array, index, update = xs
    adds = pair.name in ("scatter-add", "scatter-sub")
    if not (adds or overwrites(pair)):
        return None
    numbers = pair.eqn.params["dimension_numbers"]
    shapes = [shape_of(atom) for atom in pair.eqn.invars]
    batch, place = scatter_axes(pair.eqn)
    if index.is_equal:
        found = common([array, update], pair.num_replicas)
        if found is not None and found.kind in (*_EXACT, Kind.PART):
            return found
        if update.kind is not Kind.ROWS or update.axis not in place:
            return None
        target = rows(place[update.axis], update.scale)
        is_full = shapes[0][target.axis] == shapes[2][update.axis]
        is_alike = array.kind is Kind.ZERO or array == target
        is_free = target.axis not in numbers.scatter_dims_to_operand_dims
        return target if is_full and is_alike and is_free else None
    if update.kind is not Kind.ROWS or not 0 <= index.axis < len(batch):
        return None
    if update.axis != batch[index.axis]:
        return None
    if index.kind is Kind.ROWS and index.scale == 1:
        by = numbers.scatter_indices_batching_dims
        if index.axis in by:
            target = rows(numbers.operand_batching_dims[by.index(index.axis)], update.scale)
            return target if array in (ZERO, target) else None
        found = common([array, part(update.scale)], pair.num_replicas)
        return found if adds and found is not None and found.kind is Kind.PART else None
    if index.kind is Kind.INDEX:
        columns = _columns(pair, index)
        if len(columns) != 1:
            return None
        axis = numbers.scatter_dims_to_operand_dims[next(iter(columns))]
        target = rows(axis, update.scale)
        is_row = axis in numbers.inserted_window_dims and shapes[0][axis] == index.scale
        return target if is_row and array in (ZERO, target) else None
    return None


def overwrites(pair: Pair) -> bool:
    """Whether a `scatter` writes its updates as they are."""
    program = pair.eqn.params["update_jaxpr"]
    return pair.name == "scatter" and (program is None or not jaxpr_of(program).eqns)


_SCALED = frozenset({"cumsum", "fft", "reduce_window_sum", "reduce_window_max"})
RULES: dict[str, Rule] = {
    **dict.fromkeys(COMBINING, guarded(_combined, "name")),
    **dict.fromkeys(MOVES, guarded(_moved)),
    **dict.fromkeys(SCATTER, guarded(_scatter, "update_jaxpr")),
    "triangular_solve": guarded(_triangular_solve),
    "select_and_scatter_add": guarded(_pooled),
    "broadcast_in_dim": guarded(_broadcast, "shape", "sharding"),
    "reshape": guarded(_reshape, "new_sizes", "sharding"),
    "slice": _slice,
    "stack": guarded(_stack),
    "concatenate": guarded(_joined),
    "pad": guarded(_pad),
    "iota": guarded(_iota, "shape", "sharding"),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": guarded(_dynamic_update),
    "gather": guarded(_gather, "slice_sizes"),
}
