"""Facts about the rows of the batch in one value of a program."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mirror._src.jaxprs.row_fills import POSITIVE, SOME_NAN, Value, is_nan, is_neutral


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
        origin: Empty if entry i is row i of the batch; "joined" if rows were concatenated with
            others, "gathered" if they come from all replicas.
    """

    axis: int
    size: int
    inner: int = 1
    origin: str = ""

    def at(self, axis: int) -> "RowAxis":
        """Returns the same rows along another axis."""
        return self._replace(axis=axis)


Axes = frozenset[RowAxis]
NO_AXES: Axes = frozenset()
NO_LINES: Lines = frozenset()
Fills = frozenset[tuple[RowAxis, Value]]
NO_FILLS: Fills = frozenset()


Excludes = Callable[[Value], bool]


def never(_: Value) -> bool:
    """Padding with any number changes the result."""
    return False


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
        is_index: Whether it is computed from an index of rows and constants only.
        num_summed: Number of entries, with padding, that were summed over rows; 0 if unknown.
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
    is_index: bool = False
    num_summed: int = 0
    factor: float = 1.0

    def moved(self, move: Callable[[RowAxis], Iterable[RowAxis]]) -> "Rows":
        """Returns the value with its axes moved; an axis may be split, or vanish."""
        axes = frozenset(new for axis in self.axes for new in move(axis))
        fills = frozenset((new, value) for axis, value in self.fills for new in move(axis))
        return self._replace(axes=axes, fills=fills)

    def value(self, axis: RowAxis) -> Value:
        """Returns the number that entries of padding along an axis are."""
        return dict(self.fills).get(axis) if axis in self.axes else self.constant

    def filled(self, value: Callable[[RowAxis], Value]) -> "Rows":
        """Returns the value with other numbers for the entries of padding."""
        known = ((axis, value(axis)) for axis in self.axes)
        return self._replace(
            fills=frozenset(each for each in known if each[1] not in (None, POSITIVE))
        )

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

    def without(self, axes: Iterable[int], line: Place, excludes: "Excludes" = never) -> "Rows":
        """Returns the value after the entries along some axes were combined at a line.

        Args:
            axes: The axes.
            line: The line.
            excludes: Whether padding with a number does not change the result.
        """
        lost = frozenset(row for row in self.axes if row.axis in axes)
        if not lost:
            return self
        is_excluded = all(excludes(self.value(axis)) for axis in lost)
        rest = self.moved(lambda row: () if row in lost else (row,))
        padded = self.padded if is_excluded else self.padded | {line}
        return rest._replace(mixed=self.mixed | {line}, padded=padded)


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
        is_index=bool(facts) and all(x.is_index for x in facts),
        **lines,
    )
    return joined.filled(lambda axis: common([x.value(axis) for x in operands]))


def is_plain(value: Rows) -> bool:
    """Whether a value has nothing to do with rows."""
    return value._replace(constant=None) == NO_ROWS


def unknown(operands: Sequence[Rows], line: Place) -> Rows:
    joined = join(operands)
    lines: dict[str, Any] = {name: getattr(joined, name) for name in _LINES}
    return Rows(**lines)._replace(undefined=NO_LINES, unknown=joined.unknown | {line})
