"""The address at which gloo, the collectives of CPU devices, listens in this process."""

import contextlib
import ipaddress
import socket


def gloo_address(host: str) -> str | None:
    """Returns the first address of this machine's host name that can be used, as gloo does.

    None if the name does not resolve to an address of this machine.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in entries:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as test:
            test.bind(address)
            return str(address[0])
    return None


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_towards(host: str) -> str | None:
    """Returns this machine's address in the network of another one. Sends nothing."""
    try:
        entries = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in entries:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as test:
            test.connect(address)
            return str(test.getsockname()[0])
    return None
