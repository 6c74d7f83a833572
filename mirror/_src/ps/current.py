"""The scheduled function that this process runs, if it is a worker."""

import itertools
from typing import Any

from mirror._src.ps.messages import Rejected
from mirror._src.ps.replies import ServerGoneError, Servers


class RunningFunction:
    """A scheduled function that runs on this worker.

    Args:
        task: Number of its task.
        incarnation: How often the servers had gone back to a snapshot when it was started.
        worker: Index of the worker.
        servers: The servers.
        iterators: The iterators of the worker over per-worker datasets, by number.
        load: Fetches an exported object.
    """

    def __init__(
        self,
        task: int,
        incarnation: int,
        worker: int,
        servers: Servers,
        iterators: dict[int, Any],
        load: Any,
    ) -> None:
        self.task, self.incarnation, self.worker = task, incarnation, worker
        self.servers, self.iterators, self.load = servers, iterators, load
        self.has_writes = False
        self._operations = itertools.count(1)

    def variable(self, server: int, name: str, operation: str, value: Any) -> Any:
        """Applies an operation to a variable, once, even if the function is repeated.

        Raises:
            ServerGoneError: If the server is lost, or has gone back to a snapshot since.
        """
        mark = None if operation == "read" else (self.task, next(self._operations))
        self.has_writes = self.has_writes or mark is not None
        arguments = (name, operation, value, mark, self.incarnation)
        reply = self.servers.call(server, "variable", *arguments)
        if isinstance(reply, Rejected):
            raise ServerGoneError(server if reply.reason == "not loaded" else None)
        if isinstance(reply, BaseException):
            raise reply
        return reply


_running: RunningFunction | None = None


def running_function() -> RunningFunction | None:
    """Returns the function that this process runs as a worker; None elsewhere."""
    return _running


def set_running(function: RunningFunction | None) -> None:
    """Sets what `running_function` returns."""
    global _running
    _running = function
