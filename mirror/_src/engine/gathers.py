"""`UnequalGathers`: the operands' lengths at all-gathers of replicas with unequal shapes."""


class LengthsUnknown(BaseException):
    """Raised at an all-gather if the operands' lengths on the other replicas are not yet known.

    A `BaseException`, because an `except Exception` in the user's function must not catch it.
    """

    def __init__(self, shape: tuple[int, ...], axis: int) -> None:
        super().__init__(shape, axis)
        self.shape = shape
        self.axis = axis


class UnequalGathers:
    """The operands' lengths, on every replica, at each all-gather of a step.

    Replicas with unequal shapes are traced separately, but the trace of an all-gather needs the
    lengths on all replicas. Each trace therefore stops at an all-gather with `LengthsUnknown`, and
    is repeated once every trace has reached it.

    Attributes:
        known: For each all-gather in execution order, the length on every replica.
    """

    def __init__(self) -> None:
        self.known: list[tuple[int, ...]] = []
        self._num_reached = 0

    def restart(self) -> None:
        """Prepares for a new trace, which starts at the first all-gather."""
        self._num_reached = 0

    def lengths(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        """Returns the length on every replica at the next all-gather.

        Args:
            shape: Shape of this replica's operand.
            axis: Axis of the all-gather, non-negative.

        Raises:
            LengthsUnknown: If the lengths are not yet known.
        """
        if self._num_reached == len(self.known):
            raise LengthsUnknown(shape, axis)
        self._num_reached += 1
        return self.known[self._num_reached - 1]
