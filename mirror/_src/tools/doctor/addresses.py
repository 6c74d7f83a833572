"""The address at which gloo, the collectives of CPU devices, listens in this process."""

import contextlib
import ipaddress
import socket
from collections.abc import Callable
from typing import Any


def gloo_address(host: str) -> str | None:
    """Returns the first address of this machine's host name that can be used, as gloo does.

    None if the name does not resolve to an address of this machine.
    """
    return _own_address(host, 0, socket.SOCK_STREAM, socket.socket.bind)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_towards(host: str) -> str | None:
    """Returns this machine's address in the network of another one. Sends nothing."""
    return _own_address(host, 9, socket.SOCK_DGRAM, socket.socket.connect)


def _own_address(
    host: str, port: int, kind: int, use: Callable[[socket.socket, Any], None]
) -> str | None:
    """Returns the own address of a socket after the first use of an address that succeeds."""
    with contextlib.suppress(OSError):
        for family, *arguments, _, address in socket.getaddrinfo(host, port, type=kind):
            with contextlib.suppress(OSError), socket.socket(family, *arguments) as test:
                use(test, address)
                return str(test.getsockname()[0])
    return None
