"""A stand-in for Ray's actors: each is a process of this machine. Its methods run one at a time."""

import atexit
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any


class _Reference:
    """The result of a call that an actor has begun."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def get(self) -> Any:
        result, error = self._connection.recv()
        if error:
            raise RuntimeError(error)
        return result


class _Method:
    def __init__(self, connection: Any, name: str) -> None:
        self._connection, self._name = connection, name

    def remote(self, *arguments: Any) -> _Reference:
        self._connection.send((self._name, arguments))
        return _Reference(self._connection)


class _Handle:
    def __init__(self, kind: type) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(target=_serve, args=(kind, theirs), daemon=True)
        process.start()
        # By default, multiprocessing sends SIGTERM, which JAX only notes in a job, and then waits.
        atexit.register(process.kill)

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._connection, name)


class _Actor:
    def __init__(self, kind: type) -> None:
        self._kind = kind

    def remote(self) -> _Handle:
        return _Handle(self._kind)


def _serve(kind: type, connection: Any) -> None:
    actor = kind()
    while True:
        name, arguments = connection.recv()
        try:
            connection.send((getattr(actor, name)(*arguments), ""))
        except Exception as error:
            connection.send((None, f"{type(error).__name__}: {error}"))


def remote(**options: float) -> Callable[[type], _Actor]:
    """Stands in for `ray.remote(num_cpus=1)`."""
    assert options, "without options, ray.remote is the decorator itself"
    return _Actor


def get(references: _Reference | Sequence[_Reference]) -> Any:
    """Stands in for `ray.get`."""
    if isinstance(references, _Reference):
        return references.get()
    return [reference.get() for reference in references]
