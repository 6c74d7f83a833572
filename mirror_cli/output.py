"""Failures to write to standard output: a closed pipe, a full disk."""

import errno
import os
import signal
import sys

from mirror_cli.common import FAILED

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_CLOSED_PIPE = 128 + signal.SIGPIPE  # the status of a program that SIGPIPE ends


def is_output_error(error: OSError) -> bool:
    """Whether writing failed; an error of `open` names its file."""
    return isinstance(error, BrokenPipeError) or (error.errno in _FULL and error.filename is None)


def report_output_error(error: OSError) -> int:
    """Ends the output; returns the exit status.

    The reader of a pipe may stop early, as `head` does, so a closed pipe is not reported.
    """
    is_pipe = isinstance(error, BrokenPipeError)
    _discard(sys.stdout)
    if is_pipe:
        _discard(sys.stderr)
        return _CLOSED_PIPE
    print(f"mirror: error: cannot write the output: {error.strerror}", file=sys.stderr)
    return FAILED


def _discard(stream: object) -> None:
    """Discards what is still in the buffer: Python writes it at exit, and would fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())  # type: ignore[attr-defined]
    os.close(null)
