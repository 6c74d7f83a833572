"""Facts about the rows of the batch in one value of a program, and the values of padding.

The values of rows that are padding are constants, as far as they are known. `None` is an unknown
finite number. A value of a loop is a tuple, of which only equality is known.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from mirror._src.jaxprs.primitives import CASTING, ELEMENTWISE, PASSING, dtype_of, op_of

Value: TypeAlias = float | tuple[str, int, int] | None

# As good as infinite: `where(mask, x, -1e9)` hides padding, also divided by a temperature.
_HUGE = 1e8
_LARGEST_ARRAY = 2**16
POSITIVE: Value = ("positive", 0, 0)
"""A positive number without rows, such as a learned temperature."""
SOME_NAN: Value = ("NaN", 0, 0)
"""Numbers of which some are NaN."""
REPLICA: Value = ("replica", 1, 0)
"""The index of the replica times an integer, here 1. `("round", 3, 8)` is the index of the round of
a loop with 8 rounds, in 3 loops."""

_SAME = {"add_any": "add", "lt_to": "lt", "le_to": "le", "eq_to": "eq"}
_KEEPING = PASSING | CASTING | {"real"}
_COMMUTING = frozenset(("add", "mul", "and", "or"))
_NEUTRAL = {"add": (0,), "sub": (0,), "mul": (1,), "div": (1,), "and": (1,), "or": (0,)}
_ABSORBING = {"mul": (0,), "div": (0,), "and": (0,), "or": (1,)}
_DECIDED = frozenset(("add", "sub", "lt", "le", "gt", "ge", "eq", "ne"))  # by a huge number
_KEEP_SIGN = frozenset(("add", "mul", "div", "max", "min", "clamp"))
_OF_NUMPY = """
abs acos acosh add asin asinh atan atan2 atanh cbrt ceil cos cosh exp exp2 expm1 floor log log1p
log2 pow sign sin sinh sqrt square tan tanh sub:subtract mul:multiply div:divide rem:fmod
max:maximum min:minimum neg:negative round:rint is_finite:isfinite lt:less le:less_equal gt:greater
ge:greater_equal eq:equal ne:not_equal
"""
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{each.split(":")[0]: getattr(np, each.split(":")[-1]) for each in _OF_NUMPY.split()},
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "erf": math.erf,
    "erfc": math.erfc,
}
_LOGICAL: dict[str, Callable[..., Any]] = {
    "and": np.minimum,
    "or": np.maximum,
    "not": lambda x: 1 - x,
    "xor": np.not_equal,
}


def constant_of(value: Any) -> Value:
    """Returns the number that all entries of a constant are."""
    if getattr(value, "size", 1) > _LARGEST_ARRAY:
        return None
    try:
        array = np.asarray(value)
        if np.imag(array).any():
            return None
        first, *_ = entries = np.real(array).ravel().astype(np.float64)
    except (TypeError, ValueError):  # a PRNG key, an empty array
        return None
    return _number(first) if (entries == first).all() or np.isnan(entries).all() else None


def elementwise(eqn: JaxprEqn, values: Sequence[Value]) -> Value:
    """Returns the result of an elementwise operation."""
    name = eqn.primitive.name
    name = _SAME.get(name, name)
    if name == "select_n":
        which, cases = values[0], values[1:]
        if isinstance(which, float):
            return cases[int(which)]
        return cases[0] if all(case == cases[0] for case in cases) else None
    if name in _KEEPING:
        return _cast(values[0], eqn)
    if all(isinstance(value, float) for value in values):
        return _evaluated(name, eqn, values)
    if any(map(is_nan, values)):
        is_number = jnp.issubdtype(dtype_of(eqn.outvars[0]), jnp.inexact)
        is_known = name in _FUNCTIONS and name != "pow"  # NaN ** 0 is 1
        return SOME_NAN if is_number and (is_known or name == "integer_pow") else None
    if name == "pow" and values[0] == 0:  # an exponent that is trained may be less than 1
        return SOME_NAN
    if name in ("exp", "exp2", "logistic") or (
        name in _KEEP_SIGN and all(map(_is_positive, values))
    ):
        return POSITIVE
    is_bitwise = name in _LOGICAL and dtype_of(eqn.outvars[0]) != np.dtype(bool)
    if len(values) != 2 or is_bitwise:
        return None
    x, y = values
    if name == "lt" and y == 0 and isinstance(x, tuple) and x[0] in ("replica", "round"):
        return 0.0
    if name == "mul" and REPLICA in values:
        factor = y if x == REPLICA else x
        if isinstance(factor, float) and factor.is_integer():
            return "replica", int(factor), 0
    if x in _ABSORBING.get(name, ()) or (name != "div" and y in _ABSORBING.get(name, ())):
        return x if x in _ABSORBING[name] else y
    for number, other in [(x, y), (y, x)] if name in _COMMUTING else [(x, y)]:
        is_scaled = name in ("mul", "div") and _is_huge(number) and other == POSITIVE
        if is_scaled or other in _NEUTRAL.get(name, ()):
            return number
    if name in _DECIDED and (_is_huge(x) or _is_huge(y)):
        known = [value if isinstance(value, float) else 0.0 for value in values]
        return _evaluated(name, eqn, known)
    if name in ("max", "min"):
        sign = 1 if name == "max" else -1
        for value, other in ((x, y), (y, x)):
            if _is_huge(value):
                return value if sign * float(value) > 0 else other  # type: ignore[arg-type]
    return None


def reduction(eqn: JaxprEqn, value: Value, count: int) -> Value:
    """Returns the result of a reduction of `count` equal entries."""
    name = eqn.primitive.name
    if not isinstance(value, float):
        is_kept = value == SOME_NAN and name in ("reduce_sum", "reduce_max", "reduce_min")
        return value if is_kept else None
    if name == "reduce_sum":
        return _cast(_number(value * count), eqn)
    if name == "reduce_prod":
        return _number(math.prod([value] * count)) if value in (0, 1) else None
    return value if name in ("reduce_max", "reduce_min", "reduce_and", "reduce_or") else None


def product(values: Sequence[Value]) -> Value:
    """Returns the product of numbers, any of which may be unknown, if it is 0 or NaN."""
    if any(map(is_nan, values)):
        return SOME_NAN
    if 0 not in values:
        return None
    return math.nan if any(isinstance(x, float) and math.isinf(x) for x in values) else 0.0


def is_nan(value: Value) -> bool:
    """Whether some numbers are NaN."""
    return value == SOME_NAN or (isinstance(value, float) and math.isnan(value))


def is_neutral(name: str, value: Value, dtype: Any) -> bool:
    """Whether an operation gives the same for a set of entries and for the set with a value."""
    if not isinstance(value, float):
        return False
    match op_of(name, dtype):
        case "sum" | "xor":
            return value == 0
        case "prod":
            return value == 1
        case "max" | "argmax":
            return value <= max(-_HUGE, limits(dtype)[0])
        case "min" | "argmin":
            return value >= min(_HUGE, limits(dtype)[1])
    return False


def _evaluated(name: str, eqn: JaxprEqn, values: Sequence[Any]) -> Value:
    is_bool = np.dtype(bool) == dtype_of(eqn.outvars[0])
    table = {**_FUNCTIONS, **_LOGICAL} if is_bool else _FUNCTIONS
    function = table.get(name)
    if name == "round" and eqn.params["rounding_method"] == jax.lax.RoundingMethod.AWAY_FROM_ZERO:
        return None
    if name == "integer_pow":
        values, function = [*values, float(eqn.params["y"])], np.power
    if function is None and eqn.primitive.name in ELEMENTWISE and len(eqn.outvars) == 1:
        dtypes = map(dtype_of, eqn.invars)  # JAX computes what is rare, such as `lgamma`
        values = [np.asarray(x).astype(dtype) for x, dtype in zip(values, dtypes, strict=True)]
        function = functools.partial(eqn.primitive.bind, **eqn.params)
    elif function is not None:
        values = list(map(np.float64, values))
    else:
        return None
    with np.errstate(all="ignore"):
        return _cast(_number(np.real(function(*values))), eqn)


def _cast(value: Value, eqn: JaxprEqn) -> Value:
    """Returns the number in the dtype of the result of an operation."""
    dtype = dtype_of(eqn.outvars[0])
    if not isinstance(value, float):
        return value
    if jnp.issubdtype(dtype, jnp.integer) and not limits(dtype)[0] <= value <= limits(dtype)[1]:
        return None
    with np.errstate(all="ignore"):
        return _number(np.real(np.asarray(value).astype(dtype)).astype(np.float64))


def limits(dtype: Any) -> tuple[float, float]:
    """Returns the smallest and the largest number of a dtype."""
    if np.dtype(bool) == dtype:
        return 0, 1
    info: Any = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    return float(info.min), float(info.max)


def _is_huge(value: Value) -> bool:
    return isinstance(value, float) and abs(value) >= _HUGE


def _is_positive(value: Value) -> bool:
    return value == POSITIVE or (isinstance(value, float) and value > 0)


def _number(value: Any) -> float:
    value = float(value)
    return math.nan if math.isnan(value) else value  # one object, which equals itself in tuples


class Place(NamedTuple):
    """The place of an operation in the user's code.

    Attributes:
        line: The line, as in `train.py:42 in loss_fn`.
        is_statistics: Whether it is in a normalization layer of Flax, and not a collective.
        is_mean_of_means: Whether it averages means over unequal numbers of examples.
        counts_padding: Whether it divides a sum over examples by a number that counts the padding.
    """

    line: str
    is_statistics: bool = False
    is_mean_of_means: bool = False
    counts_padding: bool = False


Lines = frozenset[Place]


class RowAxis(NamedTuple):
    """An axis along which rows lie.

    Attributes:
        axis: The axis, or a negative number inside a loop over it.
        size: Number of rows; fewer if a reshape has split the axis of the rows.
        inner: Number of consecutive entries per row.
        origin: Empty if entry i is row i of the batch; "joined" if rows start at multiples of
            `size`, "extended" if they start elsewhere, "gathered" for rows of a replica beside rows
            of the others, "replicas" for all rows of a replica as one, pairs (from, to) if rows
            come from another replica.
    """

    axis: int
    size: int
    inner: int = 1
    origin: str | tuple[tuple[int, int], ...] = ""

    def at(self, axis: int) -> "RowAxis":
        """Returns the same rows along another axis."""
        return self._replace(axis=axis)

    def permuted(self, pairs: Sequence[tuple[int, int]]) -> "RowAxis":
        """Returns the rows after replicas sent them to others, perhaps back to their own."""
        if isinstance(self.origin, str) and self.origin:
            return self
        before = dict(self.origin) if self.origin else {a: a for a, _ in pairs}
        sources = {to: a for a, to in before.items()}
        found = tuple(sorted((sources[a], to) for a, to in pairs if a in sources))
        return self._replace(origin="" if all(a == b for a, b in found) else found)


ALONE = -500
"""The axis of the only row of a replica that lies along no axis of the array."""
Axes = frozenset[RowAxis]
NO_AXES: Axes = frozenset()
NO_LINES: Lines = frozenset()
Fills = frozenset[tuple[RowAxis, Value]]
NO_FILLS: Fills = frozenset()
Positions = frozenset[tuple[RowAxis, int]]
NO_POSITIONS: Positions = frozenset()
ANY_COLUMN = -1


Excludes = Callable[[Value], bool]


def known(value: Value) -> bool:
    """Padding with a known number does not change the result."""
    return isinstance(value, float) and not is_nan(value)


def neutral(name: str, dtype: Any) -> Excludes:
    """Padding with a number that is neutral for a primitive does not change the result."""
    return lambda value: is_neutral(name, value, dtype)


class Rows(NamedTuple):
    """Facts about one value.

    Attributes:
        axes: Axes along which rows lie.
        fills: For axes along which all entries of padding are one known number: this number.
        constant: The number that all entries are, if it is known.
        mixed: Lines at which rows came to depend on each other.
        padded: Lines at which padding came to influence other rows.
        means: Lines of means over the examples of one replica, whose numbers may differ.
        diluted: Lines of means that count the padding, unless two of them are divided.
        undefined: Lines at which numbers became NaN, of a value with known numbers that are NaN.
        unknown: Lines of operations that the pass does not know.
        is_mask: Whether it is computed from the mask and constants only.
        positions: Axes along which entry i is i, or the column i of the last axis that they are in;
            "gathered" ones if it is the position of row i among the rows of all replicas.
        num_summed: Numbers of entries, with padding, that were summed over rows.
        factor: Product of the constants by which their sum was multiplied.
    """

    axes: Axes = NO_AXES
    fills: Fills = NO_FILLS
    constant: Value = None
    mixed: Lines = NO_LINES
    padded: Lines = NO_LINES
    means: Lines = NO_LINES
    diluted: Lines = NO_LINES
    undefined: Lines = NO_LINES
    unknown: Lines = NO_LINES
    is_mask: bool = False
    positions: Positions = NO_POSITIONS
    num_summed: frozenset[int] = frozenset()
    factor: float = 1.0

    def moved(self, move: Callable[[RowAxis], Iterable[RowAxis]]) -> "Rows":
        """Returns the value with its axes moved; an axis may be split, or vanish."""
        axes = frozenset(new for axis in self.axes for new in move(axis))
        fills = frozenset((new, value) for axis, value in self.fills for new in move(axis))
        positions = frozenset((new, k) for axis, k in self.positions for new in move(axis))
        return self._replace(axes=axes, fills=fills, positions=positions)

    def value(self, axis: RowAxis) -> Value:
        """Returns the number that entries of padding along an axis are."""
        return dict(self.fills).get(axis) if axis in self.axes else self.constant

    def filled(self, value: Callable[[RowAxis], Value]) -> "Rows":
        """Returns the value with other numbers for the entries of padding."""
        known = ((axis, value(axis)) for axis in self.axes)
        fills = frozenset(each for each in known if each[1] not in (None, POSITIVE))
        return self._replace(fills=fills)

    def spread(self, operand: "Rows", axes: Iterable[int]) -> "Rows":
        """Returns a combination of entries along axes, which is NaN if one of them is."""
        if not any(is_nan(operand.value(row)) for row in operand.axes if row.axis in axes):
            return self
        return self._replace(constant=SOME_NAN).filled(lambda _: SOME_NAN)

    def cut(self) -> "Rows":
        """Returns some of the entries, of which perhaps none is NaN."""
        value = self.filled(lambda axis: None if self.value(axis) == SOME_NAN else self.value(axis))
        return value._replace(constant=None) if self.constant == SOME_NAN else value

    def noted(self, operands: Sequence["Rows"], line: Place) -> "Rows":
        """Returns the result of an operation with the lines at which numbers became NaN."""
        if not self.has_nan:
            return self._replace(undefined=NO_LINES)
        is_new = not any(x.has_nan for x in operands)
        return self._replace(undefined=frozenset({line}) if is_new else self.undefined)

    @property
    def has_nan(self) -> bool:
        """Whether a known number is NaN."""
        return is_nan(self.constant) or any(is_nan(value) for _, value in self.fills)

    def without(self, axes: Iterable[int], line: Place, excludes: Excludes | None = None) -> "Rows":
        """Returns the value after the entries along some axes were combined at a line.

        Args:
            axes: The axes.
            line: The line.
            excludes: Whether padding with a number does not change the result. Defaults to none.
        """
        lost = frozenset(row for row in self.axes if row.axis in axes)
        if not lost:
            return self
        is_excluded = excludes is not None and all(excludes(self.value(axis)) for axis in lost)
        rest = self.moved(lambda row: () if row in lost else (row,))
        padded = self.padded if is_excluded else self.padded | {line}
        # Some replica has examples.
        is_mask = self.is_mask and all(row.origin != "replicas" for row in lost)
        return rest._replace(mixed=self.mixed | {line}, padded=padded, is_mask=is_mask)


NO_ROWS = Rows()
_LINES = ("mixed", "padded", "means", "diluted", "undefined", "unknown")


def row(size: int, *, axis: int = 0, is_mask: bool = False) -> Rows:
    """Returns the facts about an input with one entry per row: data, or the mask of examples."""
    axes = frozenset({RowAxis(axis, size)})
    fills = frozenset((axis, 0.0) for axis in axes) if is_mask else NO_FILLS
    return Rows(axes, fills, is_mask=is_mask)


def join(operands: Sequence[Rows]) -> Rows:
    """Returns the facts about a value that is computed from others, entry by entry."""
    facts = [x for x in operands if not is_plain(x)]

    def common(values: list[Value]) -> Value:
        first, *others = values or [None]
        return first if all(value == first for value in others) else None

    lines: dict[str, Any] = {
        name: NO_LINES.union(*(getattr(x, name) for x in facts)) for name in _LINES
    }
    joined = Rows(
        NO_AXES.union(*(x.axes for x in facts)),
        constant=common([x.constant for x in operands]),
        is_mask=bool(facts) and all(x.is_mask for x in facts),
        positions=frozenset.intersection(*(x.positions for x in facts)) if facts else NO_POSITIONS,
        **lines,
    )
    return joined.filled(lambda axis: common([x.value(axis) for x in operands]))


def is_plain(value: Rows) -> bool:
    """Whether a value has nothing to do with rows."""
    return value._replace(constant=None) == NO_ROWS


def unknown(operands: Sequence[Rows], line: Place) -> Rows:
    lines: dict[str, Any] = {name: getattr(join(operands), name) for name in _LINES}
    lines.update(undefined=NO_LINES, unknown=lines["unknown"] | {line})
    return Rows(**lines)
