"""Sets of the numbers that a server has applied."""

import bisect
from collections.abc import Sequence


class Numbers:
    """A set of integers, stored as ranges: numbers that are applied nearly in order need one range.

    Args:
        ranges: Ranges `start, stop` that ascend and do not touch.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]] = ()) -> None:
        self._starts = [start for start, _ in ranges]
        self._stops = [stop for _, stop in ranges]

    def __contains__(self, number: int) -> bool:
        position = bisect.bisect_right(self._starts, number) - 1
        return position >= 0 and number < self._stops[position]

    def add(self, number: int) -> bool:
        """Adds a number; returns whether it is new."""
        if number in self:
            return False
        position = bisect.bisect_right(self._starts, number)
        joins_before = position > 0 and self._stops[position - 1] == number
        joins_after = position < len(self._starts) and self._starts[position] == number + 1
        if joins_before and joins_after:
            self._stops[position - 1] = self._stops.pop(position)
            del self._starts[position]
        elif joins_before:
            self._stops[position - 1] = number + 1
        elif joins_after:
            self._starts[position] = number
        else:
            self._starts.insert(position, number)
            self._stops.insert(position, number + 1)
        return True

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges `start, stop`, ascending."""
        return tuple(zip(self._starts, self._stops, strict=True))
