"""The operations of the driver on named variables that no snapshot covers yet."""

import itertools
from typing import Any, NamedTuple, final


class Operation(NamedTuple):
    """An operation on a named variable.

    Attributes:
        server: Index of its server.
        name: Name of the variable.
        operation: For example `assign`.
        value: Its operand.
        mark: Tells the server which operation it is, so that it applies it once. The numbers of
            tasks of the driver are negative.
    """

    server: int
    name: str
    operation: str
    value: Any
    mark: tuple[int, int] | None

    @property
    def arguments(self) -> tuple[str, str, Any]:
        """Name, operation and operand."""
        return self.name, self.operation, self.value


@final
class Journal:
    """Operations that are repeated when the servers return to a snapshot."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._numbers = itertools.count(1)
        self._covered: dict[int, int] = {}

    def operation(self, server: int, name: str, operation: str, value: Any) -> Operation:
        """Returns a new operation; `add` it once it has been applied."""
        mark = None if operation == "read" else (-next(self._numbers), 1)
        return Operation(server, name, operation, value, mark)

    def add(self, operation: Operation) -> None:
        """Adds an operation that was applied."""
        self.operations.append(operation)

    def mark(self, snapshot: int) -> None:
        """Notes that a snapshot covers all operations so far."""
        self._covered = {snapshot: len(self.operations)}

    def keep(self, snapshot: int) -> None:
        """Drops the operations that a snapshot covers."""
        del self.operations[: self._covered.pop(snapshot, 0)]
