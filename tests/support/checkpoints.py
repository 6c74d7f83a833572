"""Names, processes that start quickly, and bitwise comparison, for tests of checkpoints."""

import contextlib
import multiprocessing
import os
import pathlib
import signal

import numpy as np

from tests.support import inside

KeyData = inside.key_data()
START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(["pytest", __name__])


def path_of(directory: str | os.PathLike[str], step: int | str) -> pathlib.Path:
    """Returns the file of a checkpoint."""
    return pathlib.Path(directory) / f"step-{step}.safetensors"


def steps_in(directory: str | os.PathLike[str]) -> list[int]:
    """Returns the steps of the files in a directory, which must contain checkpoints only."""
    names = os.listdir(directory)
    steps = [int(name.removeprefix("step-").removesuffix(".safetensors")) for name in names]
    assert {path_of(directory, step).name for step in steps} == set(names)
    return sorted(steps)


def is_interrupted(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory contains the file of a save that was interrupted."""
    return any(name.endswith(".unfinished") for name in os.listdir(directory))


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
