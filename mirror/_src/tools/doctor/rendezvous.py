"""The rendezvous of `mirror doctor --distributed`: which processes of a job have joined?

JAX aborts a process whose job is not complete in time, and does not say who is missing. So before
JAX joins the processes, process 0 listens on the port of the coordinator, which JAX takes next, and
tells all others who has joined.
"""

import contextlib
import errno
import functools
import json
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from mirror._src.cluster.resolvers import Membership

_RETRY_SECS, _CONNECT_SECS = 0.2, 5.0
_GREETING_SECS = 1.0  # for the first line of a connection, which may come from another program
_MARGIN_SECS = 5.0  # for the answer of process 0, which may have started later
_LONGEST_LINE = 2**16


class Rendezvous(NamedTuple):
    """The processes that have joined; the same in all of them.

    Attributes:
        absent: The processes that have not joined.
        repeated: Indices that several processes have.
        other_counts: Pairs of a process and its number of processes, where it is another one.
    """

    absent: Sequence[int]
    repeated: Sequence[int]
    other_counts: Sequence[tuple[int, int]]


class UnreachableError(Exception):
    """Raised if process 0 cannot listen, or cannot be reached."""


def meet(member: Membership, secs: float) -> Rendezvous:
    """Waits until all processes have joined, or for some seconds.

    Raises:
        UnreachableError: If process 0 cannot use its port, or this process cannot reach it.
    """
    host, _, port = member.coordinator_address.rpartition(":")
    deadline = time.monotonic() + secs
    if member.process_id == 0:
        return _listen(int(port), member, deadline)
    return _answer(host.strip("[]"), int(port), member, deadline)


def _listen(port: int, member: Membership, deadline: float) -> Rendezvous:
    try:
        server = _server(port)
    except OSError as error:
        raise UnreachableError(f"port {port} cannot be used: {error.strerror}") from None
    arrived: dict[int, list[int]] = {0: [member.num_processes]}  # process: its numbers of processes
    with server, contextlib.ExitStack() as stack:
        server.settimeout(_RETRY_SECS)
        connections = []
        while time.monotonic() < deadline and len(arrived) < member.num_processes:
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                stack.enter_context(connection)
                greeting = _read(connection, time.monotonic() + _GREETING_SECS)
                match greeting:
                    case {"process": int(process), "of": int(count)}:
                        arrived.setdefault(process, []).append(count)
                        connections.append(connection)
        found = Rendezvous(
            [i for i in range(member.num_processes) if i not in arrived],
            [i for i, counts in arrived.items() if len(counts) > 1],
            [(i, n) for i, ns in arrived.items() for n in ns if n != member.num_processes],
        )
        for connection in connections:
            with contextlib.suppress(OSError):
                _write(connection, found._asdict())
        for connection in connections:  # they close first, so that JAX can take the port at once
            with contextlib.suppress(OSError):
                connection.settimeout(_GREETING_SECS)
                connection.recv(1)
    return found


def _server(port: int) -> socket.socket:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET  # as JAX does
    create = functools.partial(
        socket.create_server, ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6
    )
    try:
        return create()
    except OSError as error:
        if error.errno != errno.EADDRINUSE or _is_served(port):
            raise
    return create(reuse_port=True)  # `mirror launch` reserves the port for the job


def _is_served(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("localhost", port), _CONNECT_SECS).close()
        return True
    return False


def _answer(host: str, port: int, member: Membership, deadline: float) -> Rendezvous:
    reason = "no time was left"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), min(left, _CONNECT_SECS)) as connection:
                _write(connection, {"process": member.process_id, "of": member.num_processes})
                answer = _read(connection, deadline + _MARGIN_SECS)
            if answer is not None:
                counts = [(int(i), int(n)) for i, n in answer["other_counts"]]
                return Rendezvous(answer["absent"], answer["repeated"], counts)
            reason = "another program answers, or process 0 has ended"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(_RETRY_SECS, max(left, 0.0)))
    raise UnreachableError(reason)


def _write(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps({"mirror": message}).encode() + b"\n")


def _read(connection: socket.socket, deadline: float) -> dict[str, Any] | None:
    """Returns a message; None if the connection ends first, or another program sends something."""
    with (
        contextlib.suppress(OSError, ValueError, KeyError, TypeError),
        connection.makefile("rb") as file,
    ):
        connection.settimeout(deadline - time.monotonic())
        message = json.loads(file.readline(_LONGEST_LINE))["mirror"]
        return message if isinstance(message, dict) else None
    return None
