"""Processes that start quickly, and bitwise comparison, for tests of checkpoints."""

import contextlib
import multiprocessing
import signal

import numpy as np

from tests.support import inside

KeyData = inside.key_data()
START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(["pytest", "orbax.checkpoint", "tensorstore", __name__])


def same(one, other) -> bool:
    """Whether two arrays, or keys, are the same bit by bit."""
    if isinstance(one, KeyData):
        return one.impl == other.impl and same(one.data, other.data)
    one, other = np.asarray(one), np.asarray(other)
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def in_a_process(target, *arguments) -> None:
    """Runs a function in a process that starts at once, and fails with it."""
    process = START.Process(target=target, args=arguments)
    process.start()
    process.join(600)
    assert process.exitcode == 0
    process.close()


def killed(target, *arguments) -> int:
    """Runs a function in a process that kills itself; returns the last step that it sends.

    It gets a connection to send steps through, as the last argument.
    """
    listens, says = START.Pipe(duplex=False)
    with listens:
        process = START.Process(target=target, args=(*arguments, says))
        process.start()
        says.close()
        with contextlib.suppress(EOFError):
            while True:
                told = listens.recv()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        process.close()
    return told
