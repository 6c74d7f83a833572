"""Runs a command in place of this process, which Linux kills when its parent ends.

    python -c "$(cat die_with_parent.py)" PID COMMAND [ARGUMENT ...]

PID is the parent. Even if it is killed, it leaves no process behind. Why not `preexec_fn`: it forks
the parent, in which JAX may have started threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def run(parent: int, command: list[str]) -> None:
    """Replaces this process by the command."""
    # Python's own handler only notes Ctrl-C, which would be lost with this process.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2:])
