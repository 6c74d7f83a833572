"""Facts about the rows of the batch in one value of a program."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


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


class Rows(NamedTuple):
    """Facts about one value.

    Attributes:
        axes: Axes along which rows lie.
        clean: Those along which entries of padding do not depend on the padding.
        zero: Those along which entries of padding are 0 or False.
        one: Those along which entries of padding are True.
        mixed: Lines at which rows came to depend on each other.
        padded: Lines at which padding came to influence other rows.
        means: Lines of means over the examples of one replica, whose numbers may differ.
        diluted: Lines of means that count the padding, unless two of them are divided.
        unknown: Lines of operations that the pass does not know.
        is_mask: Whether it is computed from the mask and constants only.
        is_index: Whether it is computed from an index of rows and constants only.
        num_summed: Number of entries, with padding, that were summed over rows; 0 if unknown.
    """

    axes: Axes = NO_AXES
    clean: Axes = NO_AXES
    zero: Axes = NO_AXES
    one: Axes = NO_AXES
    mixed: Lines = NO_LINES
    padded: Lines = NO_LINES
    means: Lines = NO_LINES
    diluted: Lines = NO_LINES
    unknown: Lines = NO_LINES
    is_mask: bool = False
    is_index: bool = False
    num_summed: int = 0

    def moved(self, move: Callable[[RowAxis], Iterable[RowAxis]]) -> "Rows":
        """Returns the value with its axes moved; an axis may be split, or vanish."""

        def all_moved(axes: Axes) -> Axes:
            return frozenset(new for axis in axes for new in move(axis))

        return self._replace(
            axes=all_moved(self.axes),
            clean=all_moved(self.clean),
            zero=all_moved(self.zero),
            one=all_moved(self.one),
        )

    def without(self, axes: Iterable[int], line: Place) -> "Rows":
        """Returns the value after the entries along some axes were combined at a line."""
        lost = frozenset(row for row in self.axes if row.axis in axes)
        if not lost:
            return self
        rest = self.moved(lambda row: () if row in lost else (row,))
        padded = self.padded if lost <= self.clean else self.padded | {line}
        return rest._replace(mixed=self.mixed | {line}, padded=padded)

    def shuffled(self, axes: Iterable[int], line: Place) -> "Rows":
        """Returns the value after entries along some axes were combined, or moved to others."""
        combined = self.without(axes, line)
        return combined._replace(axes=self.axes, clean=self.clean & self.axes)


NO_ROWS = Rows()


def row(size: int, *, axis: int = 0, is_mask: bool = False) -> Rows:
    """Returns the facts about an input with one entry per row: data, or the mask of examples."""
    axes = frozenset({RowAxis(axis, size)})
    zero = axes if is_mask else NO_AXES
    return Rows(axes, zero, zero, is_mask=is_mask)


def join(operands: Sequence[Rows]) -> Rows:
    """Returns the facts about a value that is computed from others, entry by entry."""
    facts = [x for x in operands if x != NO_ROWS]
    axes = NO_AXES.union(*(x.axes for x in facts))

    def everywhere(name: str) -> Axes:
        """Returns the axes that have a property in all operands with these axes."""
        lacking = (row for x in facts for row in x.axes - getattr(x, name))
        return axes.difference(lacking)

    def lines(name: str) -> Lines:
        return NO_LINES.union(*(getattr(x, name) for x in facts))

    is_whole = len(facts) == len(operands)  # a constant may have any value
    return Rows(
        axes,
        everywhere("clean"),
        everywhere("zero") if is_whole else NO_AXES,
        everywhere("one") if is_whole else NO_AXES,
        lines("mixed"),
        lines("padded"),
        lines("means"),
        lines("diluted"),
        lines("unknown"),
        bool(facts) and all(x.is_mask for x in facts),
        bool(facts) and all(x.is_index for x in facts),
    )


def unknown(operands: Sequence[Rows], line: Place) -> Rows:
    joined = join(operands)
    return Rows(
        mixed=joined.mixed,
        padded=joined.padded,
        means=joined.means,
        diluted=joined.diluted,
        unknown=joined.unknown | {line},
    )
