"""Runs a command until it ends, or until the process that started it has.

    python tethered.py SECS HEAD COMMAND [ARGUMENT ...]

SECS is how long the command has to end after SIGTERM, or after SIGINT if nothing answers at HEAD.
The parent holds the other end of standard input, which the kernel closes when the parent ends,
even by SIGKILL.
"""

import os
import signal
import socket
import subprocess
import sys
import threading

_CONNECT_SECS = 2.0


def answers(address: str) -> bool:
    """Whether something listens at an address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECS):
            return True
    except OSError:
        return False


def run(secs: float, head: str, command: list[str]) -> int:
    """Returns the exit status of a command; SIGTERM, or the end of the parent, terminates it."""
    signal.signal(signal.SIGINT, lambda *_: None)  # of a terminal: the command gets it, too
    received = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: received.set())
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def end() -> None:
        received.wait()
        # On SIGTERM, Ray's node drains first: for half a minute, if the head is gone (Ray 2.60).
        child.send_signal(signal.SIGTERM if answers(head) else signal.SIGINT)
        try:
            child.wait(secs)
        except subprocess.TimeoutExpired:
            child.kill()

    def wait_for_parent() -> None:
        while os.read(0, 1):  # not `sys.stdin`, whose lock would be held at exit
            pass
        received.set()

    for target in (end, wait_for_parent):
        threading.Thread(target=target, daemon=True).start()
    return child.wait()


if __name__ == "__main__":
    status = run(float(sys.argv[1]), sys.argv[2], sys.argv[3:])
    sys.exit(status if status >= 0 else 128 - status)
