"""The rules of `rows`: what each operation does with the rows of the batch."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from jax.extend.core import JaxprEqn

from mirror._src.jaxprs.primitives import (
    ADDITION,
    CASTING,
    COMBINING,
    ELEMENTWISE,
    KEY,
    LINEAR,
    REDUCTION,
    SAMPLER,
    SCATTER,
    axis_after,
    combined_axes,
    dot_axes,
    dtype_of,
    gather_axes,
    samples_jointly,
    scatter_axes,
    shape_of,
)
from mirror._src.jaxprs.row_facts import (
    ALONE,
    ANY_COLUMN,
    NO_AXES,
    NO_FILLS,
    NO_LINES,
    NO_POSITIONS,
    SOME_NAN,
    Place,
    Positions,
    RowAxis,
    Rows,
    Value,
    elementwise,
    is_nan,
    join,
    limits,
    neutral,
    product,
    reduction,
    unknown,
)

Rule = Callable[[JaxprEqn, list[Rows], Place], Rows]


def _elementwise(eqn: JaxprEqn, operands: list[Rows], line: Place) -> Rows:
    name, joined = eqn.primitive.name, join(operands)
    joined = joined.filled(lambda axis: elementwise(eqn, [x.value(axis) for x in operands]))
    joined = joined._replace(constant=elementwise(eqn, [x.constant for x in operands]))
    if name == "select_n" and operands[0].is_mask and joined.constant is None:
        of_padding = {value for _, value in operands[0].fills}
        of_examples = [x for i, x in enumerate(operands[1:]) if i not in of_padding]
        if any(is_nan(x.constant) for x in of_examples):
            joined = joined._replace(constant=SOME_NAN)
    if name in ("mul", "div") and joined.mixed and not joined.is_mask:
        counts = [x for x in operands if x.is_mask and not x.axes and x.mixed]
        if counts and any(not x.is_mask and x.mixed and not x.axes for x in operands):
            joined = joined._replace(means=joined.means | {line})
    if name in ("mul", "div"):
        joined = _scaled(eqn, operands, joined, line)
    joined = _still_summed(eqn, operands, joined)
    if name == "lt" and operands[0].positions and operands[1].constant == 0:
        joined = joined._replace(constant=0.0)  # JAX adds the size to a negative index
    joined = joined._replace(positions=_positions(eqn, operands))
    return _own_column(operands, joined) if name == "eq" else joined


def _own_column(operands: list[Rows], joined: Rows) -> Rows:
    """Returns whether a column of all rows is the row itself, as in one-hot labels of them.

    In the rows that are examples, it is not the column of padding.
    """
    for x, y in (operands, operands[::-1]):
        for row, _ in x.positions:
            for column, _ in y.positions:
                if row.origin and not column.origin and row.axis != column.axis:
                    own = RowAxis(column.axis, row.size, 1, "gathered")
                    rest = RowAxis(column.axis, column.size // row.size, row.size, "replicas")
                    fills = frozenset({(own, 0.0), (rest, 0.0)})
                    return joined._replace(axes=joined.axes | {own, rest}, fills=fills)
    return joined


def _positions(eqn: JaxprEqn, operands: list[Rows]) -> Positions:
    """Returns the axes along which the result of an elementwise operation counts rows."""
    name, x = eqn.primitive.name, operands[0]
    if name == "convert_element_type":
        return x.positions
    if name == "select_n" and isinstance(x.constant, float):
        return operands[1 + int(x.constant)].positions
    if name != "add":
        return NO_POSITIONS
    found = set()
    for x, y in (operands, operands[::-1]):
        for row, column in x.positions:
            if y.constant == 0:
                found.add((row, column))
            elif not row.origin and y.constant == ("replica", row.size, 0):
                found.add((row._replace(origin="gathered"), column))
    return frozenset(found)


def _scaled(eqn: JaxprEqn, operands: list[Rows], joined: Rows, line: Place) -> Rows:
    """Returns a product or quotient: the mean of a sum over examples may count the padding."""
    x, y = operands
    is_quotient = eqn.primitive.name == "div"
    if is_quotient and x.diluted and y.diluted:
        return joined._replace(diluted=NO_LINES)  # as in (x * mask).mean() / mask.mean()
    for rows, number in ((x, y.constant), (y, x.constant)):
        if not rows.num_summed or not isinstance(number, float) or (is_quotient and rows is y):
            continue
        factor = 1 / number if is_quotient and number else number
        weights = [abs(factor * count) for count in rows.num_summed]
        if any(abs(x * by - 1) < 1e-3 for x in weights for by in (1, abs(rows.factor))):
            # Alone, as in 0.5 * x.sum() / len(x), or with the factors before.
            place = line._replace(counts_padding=True)
            return joined._replace(diluted=joined.diluted | {place})
        return joined._replace(num_summed=rows.num_summed, factor=rows.factor * factor)
    for rows, number in ((x, y.constant), (y, x.constant)):
        if isinstance(number, float) and number and not (is_quotient and rows is y):
            count = abs(number if is_quotient else 1 / number)
            times = [count / row.size for row in rows.axes if row.size > 1]
            if any(0.5 < each < math.inf and abs(each - round(each)) < 1e-3 for each in times):
                place = line._replace(counts_padding=True)  # if it is summed
                return joined._replace(unknown=joined.unknown | {place})
    return joined


def _still_summed(eqn: JaxprEqn, operands: list[Rows], joined: Rows) -> Rows:
    """Returns a value that is a sum over examples like its operands."""
    sums = [x for x in operands if x.num_summed]
    factors = {x.factor for x in sums}
    if eqn.primitive.name not in ADDITION | CASTING | LINEAR or len(factors) != 1:
        return joined
    counts = frozenset[int]().union(*(x.num_summed for x in sums))
    return joined._replace(num_summed=counts, factor=factors.pop())


def _counts(value: Rows, axes: Collection[int], count: int) -> frozenset[int]:
    """Returns the numbers that divide a sum of `count` entries in a mean over its rows.

    The rows of another replica are likely to be added to the rows of all.
    """
    origins = [row.origin for row in value.axes if row.axis in axes]
    sent = {count * len(origin) for origin in origins if isinstance(origin, tuple)}
    return frozenset({count, *sent} if origins else ())


def moved(eqn: JaxprEqn, value: Rows) -> Rows:
    """Returns the value with its axes where the operation moves them."""

    def move(row: RowAxis) -> tuple[RowAxis, ...]:
        axis = row.axis if row.axis < 0 else axis_after(eqn, row.axis)
        if axis is None and eqn.primitive.name == "squeeze":
            axis = ALONE
        return () if axis is None else (row.at(axis),)

    return value.moved(move)


def _reduction(eqn: JaxprEqn, operands: list[Rows], line: Place) -> Rows:
    name, axes, joined = eqn.primitive.name, eqn.params["axes"], join(operands)
    count = math.prod(shape_of(eqn.invars[0])[axis] for axis in axes)
    result = joined.without(axes, line, neutral(name, dtype_of(eqn.invars[0])))
    result = moved(eqn, result)
    result = result.filled(lambda axis: reduction(eqn, result.value(axis), count))
    result = result._replace(constant=reduction(eqn, joined.constant, count))
    if name in ("reduce_sum", "reduce_max", "reduce_min"):
        result = result.spread(joined, axes)
    result = result._replace(positions=NO_POSITIONS)
    if name != "reduce_sum":
        return result
    before = frozenset(count * each for each in operands[0].num_summed)
    num_summed = before or _counts(joined, axes, count)
    return result._replace(num_summed=num_summed, factor=operands[0].factor)


def _combined(eqn: JaxprEqn, operands: list[Rows], line: Place) -> Rows:
    """The rule of operations that combine entries along some axes, or move them."""
    result = _shuffled(eqn, join(operands), combined_axes(eqn), line)
    if eqn.primitive.name not in ("cholesky", "triangular_solve"):
        return result
    first = operands[0]  # a matrix of zeros has no inverse

    def number(axis: RowAxis) -> Value:
        has_nan = first.value(axis) == 0 or any(is_nan(x.value(axis)) for x in operands)
        return SOME_NAN if has_nan else result.value(axis)

    return result.filled(number)


def _sort(eqn: JaxprEqn, operands: list[Rows], line: Place) -> Rows:
    """The rule of `sort`: the rows of the first operands determine the order."""
    keys, axes = join(operands[: eqn.params["num_keys"]]), [eqn.params["dimension"]]
    result = _shuffled(eqn, keys, axes, line)
    fills = result.fills if len(operands) == 1 else NO_FILLS
    return join([result, *operands])._replace(positions=NO_POSITIONS, fills=fills)


def _shuffled(eqn: JaxprEqn, value: Rows, axes: Iterable[int], line: Place) -> Rows:
    """Returns the value after entries along some axes were combined, or moved to others."""
    name, axes = eqn.primitive.name, set(axes)
    result = value.without(axes, line, neutral(name, dtype_of(eqn.invars[0])))
    result = result._replace(positions=NO_POSITIONS, constant=None)
    if name not in ("top_k", "approx_top_k"):  # whose results are examples only
        result = result._replace(axes=value.axes)

    def fill(axis: RowAxis) -> Value:
        number = value.value(axis)
        if axis.axis in axes:  # a cumulative sum ends with the sum of all rows, or starts with it
            is_last = name == "cumsum" and eqn.params["reverse"] and number == 0
            return number if is_last or name in _KEEPS_FILL else None
        is_kept = name in _KEEPS_OTHER_FILL or (number == 0 and name in _KEEPS_ZERO)
        return number if is_kept else None

    return result.filled(fill)


def _moved(eqn: JaxprEqn, operands: list[Rows], _line: Place) -> Rows:
    return moved(eqn, operands[0])


def _tile(eqn: JaxprEqn, operands: list[Rows], _line: Place) -> Rows:
    repeated = {axis for axis, count in enumerate(eqn.params["reps"]) if count != 1}
    sizes = [shape_of(eqn.invars[0])[axis] for axis in repeated]
    return _extended(operands[0], repeated, operands, [(operands[0], n, 0) for n in sizes])


def _unstack(eqn: JaxprEqn, operands: list[Rows], line: Place) -> Rows:
    return moved(eqn, _picked(operands[0], {eqn.params["axis"]}, line))


def _stack(eqn: JaxprEqn, operands: list[Rows], _line: Place) -> Rows:
    axis = eqn.params["axis"]
    joined = join(operands).moved(lambda row: (row.at(row.axis + (row.axis >= axis)),))
    is_last = axis == len(shape_of(eqn.outvars[0])) - 1
    return joined._replace(positions=_columns(operands) if is_last else NO_POSITIONS)


def _columns(operands: list[Rows]) -> Positions:
    """Returns of which columns a value knows that they are an index of rows, one per operand."""
    return frozenset((axis, k) for k, x in enumerate(operands) for axis, _ in x.positions)


def _reshape(eqn: JaxprEqn, operands: list[Rows], line: Place) -> Rows:
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    lost = []

    def move(row: RowAxis) -> list[RowAxis]:
        if row.axis < 0:
            return [row]
        if old[: row.axis + 1] == new[: row.axis + 1]:
            return [row]
        # A reshape keeps the distance of two rows in memory.
        stride, left = row.inner * math.prod(old[row.axis + 1 :]), row.size
        found = []
        for axis in reversed(range(len(new))):
            step = math.prod(new[axis + 1 :])
            if left > 1 and step <= stride < step * new[axis]:
                part = min(left, step * new[axis] // stride)
                if stride % step or left % part:
                    break
                found.append(RowAxis(axis, part, stride // step, row.origin))
                stride, left = stride * part, left // part
        if left > 1 or not found:
            lost.append(row)
        return found

    positions = frozenset(
        x for x in operands[0].positions if old[: x[0].axis + 1] == new[: x[0].axis + 1]
    )
    moved = operands[0]._replace(positions=NO_POSITIONS).moved(move)._replace(positions=positions)
    return moved._replace(unknown=moved.unknown | {line}) if lost else moved


def _slice(eqn: JaxprEqn, operands: list[Rows], line: Place) -> Rows:
    """The rule of slices: a slice of concatenated rows may undo the concatenation."""
    result, sizes = operands[0], shape_of(eqn.outvars[0])
    for other in operands[1:]:  # indices
        result = join([result, other._replace(axes=NO_AXES)])
    shape = shape_of(eqn.invars[0])
    cut = {axis for axis, size in enumerate(shape) if sizes[axis] != size}
    result = result._replace(fills=operands[0].fills, constant=operands[0].constant)
    result = result._replace(positions=NO_POSITIONS)
    for axis, start in enumerate(operands[1:]):
        if sizes[axis] == 1 and (row := _round_axis(start, shape[axis])):
            result = _placed(result, {axis: row})
    starts = eqn.params.get("start_indices")
    if starts is None or set(eqn.params["strides"] or ()) - {1}:
        return _picked(result, cut, line)
    return _picked(result, cut, line, {axis: (starts[axis], sizes[axis]) for axis in cut})


def _round_axis(index: Rows, size: int) -> int:
    """Returns the axis of what round i of a loop reads or writes at an index i; 0 for others."""
    match index.constant:
        case ("round", depth, length) if length <= size:
            return -depth
    return 0


def _picked(
    value: Rows, cut: set[int], line: Place, bounds: dict[int, tuple[int, ...]] | None = None
) -> Rows:
    """Returns the value after some of the entries along axes were picked.

    They are counted from the end as well, where the padding is, so that no number is neutral.

    Args:
        value: The value.
        cut: The axes.
        line: The line.
        bounds: Where the entries start, and their number, by axis; `None` if it is not known.
    """
    whole = {  # a slice of joined rows that has all rows
        x.axis
        for x in value.axes
        if x.axis in cut and x.origin == "joined" and bounds is not None
        if all(number % x.size == 0 for number in bounds[x.axis])
    }
    value = value.cut() if cut else value
    return value.without(cut - whole, line)._replace(axes=value.axes)


def _split(eqn: JaxprEqn, operands: list[Rows], line: Place) -> Rows:
    axis = eqn.params["axis"]
    cut = {axis} if len(eqn.outvars) > 1 else set()
    return _picked(operands[0], cut, line, {axis: tuple(eqn.params["sizes"])})


def _concatenate(eqn: JaxprEqn, operands: list[Rows], _line: Place) -> Rows:
    # Indices [i, j] of rows and columns, as in logits[jnp.arange(n), labels].
    dimension, ndim = eqn.params["dimension"], len(shape_of(eqn.outvars[0]))
    are_columns = dimension == ndim - 1 and all(shape_of(x)[-1] == 1 for x in eqn.invars)
    joined = join(operands)._replace(positions=_columns(operands) if are_columns else NO_POSITIONS)
    axes = {dimension} if len(operands) > 1 else set()
    sizes = [shape_of(x)[dimension] for x in eqn.invars]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = zip(operands, sizes, starts, strict=True)
    return _extended(joined, axes, operands, [each for each in parts if each[0].axes])


def _extended(
    value: Rows, axes: set[int], operands: list[Rows], parts: Sequence[tuple[Rows, int, int]]
) -> Rows:
    """Returns the value after other entries, which are not padding, were put beside its rows.

    Args:
        value: The result.
        axes: Axes along which it is longer than the operands.
        operands: The operands.
        parts: Operands with rows, each with its length and with its start in the result.
    """

    def own(axis: RowAxis) -> Value:
        if axis.axis not in axes:
            return value.value(axis)
        return join([x for x in operands if axis in x.axes]).value(axis)

    value = _partly(value.filled(own), operands)

    def move(row: RowAxis) -> tuple[RowAxis]:
        if row.axis not in axes or row.origin not in ("", "joined"):
            return (row,)
        is_joined = row.inner == 1 and all(
            size % row.size == start % row.size == 0 for x, size, start in parts if row in x.axes
        )
        return (row._replace(origin="joined" if is_joined else "extended"),)

    return value.moved(move)


def _partly(value: Rows, parts: list[Rows]) -> Rows:
    """Returns a value that consists of parts, any of which may be NaN."""

    def number(of: Callable[[Rows], Value]) -> Value:
        return SOME_NAN if any(is_nan(of(x)) for x in parts) else of(value)

    filled = value.filled(lambda axis: number(lambda x: x.value(axis)))
    return filled._replace(constant=number(lambda x: x.constant))


def _pad(eqn: JaxprEqn, operands: list[Rows], _line: Place) -> Rows:
    config = eqn.params["padding_config"]
    axes = {i for i, pads in enumerate(config) if any(pads)}
    rows = {row.axis for row in operands[0].axes} & axes
    starts = [config[i][0] if config[i][1] >= 0 and not config[i][2] else 1 for i in rows]
    parts = [
        (operands[0], shape_of(eqn.invars[0])[i], start)
        for i, start in zip(rows, starts, strict=True)
    ]
    return _extended(join(operands), axes, operands, parts)


def _update(eqn: JaxprEqn, operands: list[Rows], line: Place) -> Rows:
    """The rule of `dynamic_update_slice`."""
    shape, part = (shape_of(eqn.invars[i]) for i in (0, 1))
    cut = {axis for axis, size in enumerate(shape) if part[axis] != size}
    own, indices = operands[:2], [x._replace(axes=NO_AXES) for x in operands[2:]]
    for axis, start in enumerate(indices):
        if part[axis] == 1 and (row := _round_axis(start, shape[axis])):
            own[1] = _placed(own[1], {row: axis})
    joined = join([*own, *indices])._replace(fills=join(own).fills, positions=NO_POSITIONS)
    is_cut = any(x.axis in cut for x in operands[1].axes)
    return joined._replace(unknown=joined.unknown | {line}) if is_cut else joined


def _dot(eqn: JaxprEqn, operands: list[Rows], line: Place) -> Rows:
    contracted, _ = eqn.params["dimension_numbers"]
    sides = []
    for x, own, place in zip(operands, contracted, dot_axes(eqn), strict=True):
        places = place | {axis: -1000 - k for k, axis in enumerate(own)}
        sides.append(_placed(x, places))
    constant = product([x.constant for x in sides])
    joined = join(sides)._replace(constant=constant, positions=NO_POSITIONS)
    joined = joined.filled(lambda axis: product([x.value(axis) for x in sides]))
    axes = [-1000 - k for k in range(len(contracted[0]))]
    count = math.prod(shape_of(eqn.invars[0])[d] for d in contracted[0])
    result = joined.without(axes, line, lambda value: value == 0).spread(joined, axes)
    return result._replace(num_summed=_counts(joined, axes, count))


def _placed(value: Rows, place: dict[int, int]) -> Rows:
    return value.moved(lambda row: (row.at(place.get(row.axis, row.axis)),))


def _conv(eqn: JaxprEqn, operands: list[Rows], line: Place) -> Rows:
    spec = eqn.params["dimension_numbers"]
    (image, kernel), (batch, features, *_) = operands, spec.lhs_spec
    others = [row.axis for row in image.axes if row.axis >= 0 and row.axis != batch]
    is_grouped = features in others and eqn.params["feature_group_count"] > 1
    if eqn.params["batch_group_count"] > 1 or kernel.axes or is_grouped:
        return unknown(operands, line)
    image = image.without(others, line)
    moved = image.moved(lambda row: (row.at(spec.out_spec[0] if row.axis >= 0 else row.axis),))
    joined = join([moved, kernel])._replace(constant=None)
    return joined.filled(lambda axis: 0.0 if moved.value(axis) == 0 else None)


def _of_vectors(eqn: JaxprEqn, indices: Rows, line: Place) -> Rows:
    """Returns indices whose last axis, with the numbers of one index, has no rows."""
    last = len(shape_of(eqn.invars[1])) - 1
    alone = indices.moved(lambda x: (x.at(ALONE if (x.axis, x.size) == (last, 1) else x.axis),))
    positions = frozenset(x for x in alone.positions if x[0].axis != last)
    return alone.without([last], line)._replace(positions=positions)


def _indexed(indices: Rows, dims: Sequence[int], axis: int, origin: str = "") -> list[RowAxis]:
    """Returns the axes along which entry i of the indices is i for an axis of the array."""
    columns = (ANY_COLUMN, list(dims).index(axis)) if axis in dims else ()
    found = [row for row, column in indices.positions if column in columns]
    return sorted(row for row in found if row.origin == origin)


def _is_of_all(array: Rows, axis: int, size: int) -> bool:
    """Whether the rows of all replicas, of this size each, lie along an axis, one after another."""
    found = {(x.origin, x.inner) for x in array.axes if x.axis == axis}
    return found == {("gathered", 1), ("replicas", size)}


def _gather(eqn: JaxprEqn, operands: list[Rows], line: Place) -> Rows:
    array, indices = operands[0].cut(), _of_vectors(eqn, operands[1], line)
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = shape_of(eqn.invars[0])
    batch, place = gather_axes(eqn)
    for a, b in zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True):
        place[a] = batch[b]
    # JAX gathers the only row of a replica along an axis of its own.
    if any(row.size == 1 and row.axis in place for row in array.axes):
        indices = indices.moved(lambda row: (row,) if row.size > 1 else ())
    moved = indices.moved(lambda row: (row.at(batch[row.axis] if row.axis >= 0 else row.axis),))
    moved = moved._replace(is_mask=False, positions=NO_POSITIONS)
    picked = {
        d for d in dims.start_index_map if sizes[d] != shape[d] or d in dims.collapsed_slice_dims
    }
    places = {}  # of rows of which entry i of the result is row i
    for x in array.axes:
        is_own = x.axis >= 0 and not x.origin and x.size == shape[x.axis]
        along = _indexed(indices, dims.start_index_map, x.axis, "" if is_own else "gathered")
        if along and sizes[x.axis] == 1 and (is_own or _is_of_all(array, x.axis, along[0].size)):
            at = along[0].axis
            places[x] = RowAxis(batch[at] if at >= 0 else at, along[0].size)
    lost = {x.axis for x in array.axes if x.axis in picked and x not in places}
    result = array.without(lost, line)
    result = result.moved(lambda x: (places.get(x) or x.at(place.get(x.axis, x.axis)),))
    fill = eqn.params["fill_value"]
    # Of padding, too, an index may be outside. JAX's default, NaN or a limit, is a mistake then.
    if fill is not None and fill == fill and fill not in limits(dtype_of(eqn.invars[0])):
        inside = frozenset(x for x in result.fills if x[1] == fill)
        result, array = result._replace(fills=inside), array._replace(constant=None)
    return join([result, moved])._replace(fills=result.fills, constant=array.constant)


def _scatter(eqn: JaxprEqn, operands: list[Rows], line: Place) -> Rows:
    array, indices, updates = operands[0], _of_vectors(eqn, operands[1], line), operands[2]
    dims = eqn.params["dimension_numbers"]
    joined = join([array, indices._replace(axes=NO_AXES), updates._replace(axes=NO_AXES)])
    scattered, place = scatter_axes(eqn)
    for a, b in zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True):
        place[scattered[b]] = a
    rows = updates.moved(
        lambda x: (x.at(place.get(x.axis, x.axis)),) if x.axis in place or x.axis < 0 else ()
    )
    is_first = dims.inserted_window_dims == dims.scatter_dims_to_operand_dims == (0,)
    if is_first and (row := _round_axis(indices, shape_of(eqn.invars[0])[0])):
        rows = _placed(rows, {row: 0})
    rest = [row.axis for row in updates.axes if row.axis >= 0 and row.axis not in place]
    own = [row for row in indices.axes if row.axis >= 0 and scattered[row.axis] not in place]
    name, both = eqn.primitive.name, join([array, rows])
    result = join([joined, rows])._replace(is_mask=False, positions=NO_POSITIONS, constant=None)
    result = result.filled(
        lambda axis: both.value(axis) if name == "scatter" or both.value(axis) == 0 else None
    )
    if name == "scatter-add":
        result = _partly(result, [array, rows])
    if not rest and not own:
        return result
    names, shape = dims.scatter_dims_to_operand_dims, shape_of(eqn.invars[0])
    along = {
        axis: {row.axis for row in _indexed(indices, names, axis) if row.size == shape[axis]}
        for axis in set(names) & set(dims.inserted_window_dims)
    }
    hit = [x.axis for x in array.axes if x.axis in along and not x.origin]
    is_own = len(hit) == len(array.axes)
    hit = hit or [axis for axis, found in along.items() if found]  # of an array without rows
    common = set(range(len(scattered))).intersection(*(along[axis] for axis in hit))
    written = {*own, *(row for row in updates.axes if row.axis in rest)}
    rows_at = {*rest, *(scattered[row.axis] for row in own)}
    if is_own and hit and any(rows_at <= {scattered[axis]} for axis in common):
        # x.at[jnp.arange(n), labels].set(v)
        axes = {row.at(axis) for row in written for axis in hit}
        return result._replace(axes=result.axes | axes)
    if not is_own:
        return result._replace(unknown=result.unknown | {line})
    excludes = neutral(name, dtype_of(eqn.invars[2]))
    mixed = updates.without(rest, line, excludes)
    is_excluded = bool(rest) and mixed.padded == updates.padded  # wherever it is added
    chosen = indices.without([x.axis for x in own], line, lambda _: is_excluded)
    return join([result, join([mixed, chosen])._replace(axes=NO_AXES)])._replace(fills=result.fills)


def gathered(eqn: JaxprEqn, value: Rows) -> Rows:
    """Returns the rows of all replicas."""
    dim, tiled, num = (eqn.params[name] for name in ("all_gather_dimension", "tiled", "axis_size"))
    if num == 1:
        return value.moved(lambda row: (row.at(row.axis + (not tiled and row.axis >= dim)),))
    inner = shape_of(eqn.invars[0])[dim] if tiled else 1
    origin = "extended" if eqn.params["axis_index_groups"] else "gathered"

    def move(row: RowAxis) -> list[RowAxis]:
        axis = row.axis if tiled or row.axis < dim else row.axis + 1
        own = row._replace(axis=axis, origin=origin)
        return [own, RowAxis(dim, num, inner, origin.replace("gathered", "replicas"))]

    return value.moved(move)


def _leading(eqn: JaxprEqn, operands: list[Rows], line: Place) -> Rows:
    """The rule of operations on PRNG keys, whose axes come first in the result."""
    if samples_jointly(eqn):
        return unknown(operands, line)
    value = join(operands)._replace(fills=NO_FILLS, constant=None)
    return value._replace(is_mask=False, positions=NO_POSITIONS)


_KEEPS_FILL = frozenset(("sort", "svd", "eigh"))
_KEEPS_OTHER_FILL = frozenset(("sort", "rev", "top_k", "approx_top_k", "cummax", "cummin"))
_KEEPS_OTHER_FILL |= {"reduce_window_max", "reduce_window_min"}
_KEEPS_ZERO = frozenset(("cumsum", "cumprod", "lu", "reduce_window_sum"))
# The only result that keeps them: values, not their positions or vectors.
FILLED_RESULT = {"approx_top_k": 0, "eigh": 1, "lu": 0, "svd": 0, "top_k": 0}
RULES: dict[str, Rule] = {
    **dict.fromkeys(SAMPLER | KEY, _leading),
    **dict.fromkeys(ELEMENTWISE | {"threefry2x32", "random_fold_in"}, _elementwise),
    **dict.fromkeys(REDUCTION, _reduction),
    **dict.fromkeys(COMBINING, _combined),
    "sort": _sort,
    **dict.fromkeys(("broadcast_in_dim", "transpose", "squeeze"), _moved),
    "reshape": _reshape,
    "slice": _slice,
    "dynamic_slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
    "stack": _stack,
    "tile": _tile,
    "unstack": _unstack,
    "pad": _pad,
    "dynamic_update_slice": _update,
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "gather": _gather,
    **dict.fromkeys(SCATTER, _scatter),
}
CONSTANT_RULES = frozenset((_elementwise, _reduction, _moved, _reshape))
