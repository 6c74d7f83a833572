"""`UnequalGathers`: the lengths of the operands of all-gathers, per replica."""


class LengthsUnknown(BaseException):
    """An all-gather was met whose lengths on the other replicas are not known yet.

    No `Exception`: the user's function must not catch it.
    """

    def __init__(self, shape: tuple[int, ...], axis: int) -> None:
        super().__init__(shape, axis)
        self.shape = shape
        self.axis = axis


class UnequalGathers:
    """The lengths that replicas of different shapes bring to each all-gather of a step.

    A step is traced for each set of shapes by itself. At an all-gather, a trace must know what the
    other replicas bring; so it stops there, `LengthsUnknown`, until all have said it.
    """

    def __init__(self) -> None:
        self.known: list[tuple[int, ...]] = []
        self._met = 0

    def restart(self) -> None:
        """A trace begins."""
        self._met = 0

    def lengths(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        """Each replica's length at the next all-gather, along its axis."""
        if self._met == len(self.known):
            raise LengthsUnknown(shape, axis)
        self._met += 1
        return self.known[self._met - 1]
