"""The processes of servers and workers, as the conductor calls them, and their answers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from mirror._src.ps.messages import Raised, Rejected, Result
from mirror._src.ps.remote_value import RemoteValue


class Lost(NamedTuple):
    """The answer of a process that has ended.

    Attributes:
        task: Index of the server or worker.
        is_forever: Whether it will not be restarted.
        reason: Why, in words.
    """

    task: int
    is_forever: bool
    reason: str


class Task(NamedTuple):
    """A scheduled function.

    Attributes:
        method: The method of the worker that runs it.
        arguments: The arguments of the method, after the assignment, for each part.
        join: Returns its result, given the `Result` of each part.
        value: What is resolved at its end.
    """

    method: str
    arguments: Sequence[tuple[Any, ...]]
    join: Callable[[Sequence[Result]], Any]
    value: RemoteValue


class Engine(Protocol):
    """The processes. `done` is called in any thread, with the reply, `Lost` or an exception."""

    num_servers: int
    num_workers: int

    def dumps(self, value: Any) -> Any:
        """Pickles an object for another process."""
        ...

    def loads(self, pickled: Any) -> Any:
        """Returns what a worker pickled."""
        ...

    def free_resources(self) -> str:
        """Returns a sentence that names the resources of the cluster that nothing occupies."""
        ...

    def set_up_worker(self, worker: int, done: Callable[[Any], None]) -> None:
        """Tells a worker its servers, as soon as it has been restarted."""
        ...

    def call_worker(
        self, worker: int, method: str, arguments: Sequence[Any], done: Callable[[Any], None]
    ) -> None:
        """Calls a method of a worker."""
        ...

    def call_servers(
        self,
        method: str,
        arguments: Sequence[Sequence[Any]],
        done: Callable[[list[Any] | Lost], None],
        *,
        waits_for_restart: bool = False,
    ) -> None:
        """Calls a method of each server with its arguments."""
        ...

    def ask_server(self, server: int, method: str, *arguments: Any) -> Any:
        """Calls a method of one server, and waits for the reply, which can be `Lost`."""
        ...


def are_all_answers(reply: Any) -> bool:
    """Whether all servers have answered what was asked."""
    failures = (Lost, Rejected, BaseException)
    return isinstance(reply, list) and not any(isinstance(each, failures) for each in reply)


def error_of(raised: Raised, worker: int, loads: Callable[[Any], Any]) -> BaseException:
    """Returns the error that the user's function raised on a worker."""
    error: BaseException = RuntimeError(raised.text)
    if raised.pickled is not None:
        try:
            loaded = loads(raised.pickled)
            if isinstance(loaded, BaseException):
                error = loaded
            else:
                kind, arguments, attributes = loaded
                error = kind.__new__(kind, *arguments)
                error.args = arguments
                vars(error).update(attributes)
        except Exception:
            error = RuntimeError(raised.text)
    error.add_note(f"Raised on worker {worker}:\n{raised.traceback}")
    return error
