"""`kill -9` at random moments of a save loses nothing, and the next save works.

A few kills run with the slow tests, all hundred with `--nightly`.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from mirror._src.training.checkpoints import layout
from mirror._src.training.checkpoints.load import load_checkpoint as load
from mirror._src.training.checkpoints.store import CheckpointStore
from tests.support.checkpoints import START, same

NUMBERS = {"small": 2**13, "large": 2**23}  # in each array: 256 KiB and 64 MiB in all
ARRAYS = {"small": 8, "large": 2}
KILLS = {"small": 60, "large": 40}
IN_CI = {"small": 3, "large": 1}  # of the synchronous and of the asynchronous ones
_midway: list[bool] = []  # whether each kill interrupted a save
GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, are spread evenly, however many there are


def arrays_of(size: str, step: int) -> dict[str, np.ndarray]:
    """Returns arrays that encode their step, and that cannot be compressed."""
    noise = np.random.default_rng(step).integers(0, 2**32, NUMBERS[size], np.uint32)
    return {f"w{number}": noise + np.uint32(number) for number in range(ARRAYS[size])}


def save_until_killed(directory, size: str, asynchronous: bool, says) -> None:
    """Says how long a save takes, and then each step that is saved."""
    jax.config.update("jax_platforms", "cpu")
    arrays = {step: arrays_of(size, step) for step in range(4)}
    with CheckpointStore(directory, asynchronous=asynchronous) as store:
        for step in (0, 1):
            begin = time.monotonic()
            store.save(step, arrays[step], {"step": step})
            store.wait()
        says.send(time.monotonic() - begin)
        for step in (2, 3, 3, 2) * 1000:  # most of them replace a checkpoint
            store.save(step, arrays[step], {"step": step})
            if not asynchronous:
                says.send(step)


def assert_whole(directory, size: str, step: int) -> None:
    found = load(directory, step)
    assert found.position == {"step": step}
    wanted = arrays_of(size, step)
    assert found.arrays.keys() == wanted.keys()
    assert all(same(value, found.arrays[name]) for name, value in wanted.items())


def kills() -> Iterator[Any]:
    """Yields a row for each kill; their moments are spread over two saves."""
    for size, count in KILLS.items():
        for asynchronous in (False, True):
            for number in range(count // 2):
                kind = "asynchronous" if asynchronous else "synchronous"
                marks = [pytest.mark.nightly] if number >= IN_CI[size] else []
                moment = 2 * ((0.25 + number * GOLDEN) % 1)
                name = f"{size}-{kind}-{number}"
                yield pytest.param(size, asynchronous, moment, marks=marks, id=name)


@pytest.mark.parametrize(("size", "asynchronous", "moment"), list(kills()))
def test_kill_in_a_save_loses_nothing(tmp_path, size, asynchronous, moment):
    listens, says = START.Pipe(duplex=False)
    arguments = (tmp_path, size, asynchronous, says)
    process = START.Process(target=save_until_killed, args=arguments)
    process.start()
    says.close()
    with listens:
        secs = listens.recv()
        time.sleep(secs * moment)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        process.close()
        told = {0, 1}
        with contextlib.suppress(EOFError):
            while True:
                told.add(listens.recv())
    _midway.append(any(layout.LEFTOVER.fullmatch(name) for name in os.listdir(tmp_path)))
    steps = tuple(layout.checkpoints_in(tmp_path))
    assert set(steps) >= told
    with CheckpointStore(tmp_path) as store:
        assert store.steps() == steps
        for step in steps:
            assert_whole(tmp_path, size, step)
        store.save(9, arrays_of(size, 9), {"step": 9})
    assert_whole(tmp_path, size, 9)
    assert sorted(os.listdir(tmp_path)) == sorted(map(str, (*steps, 9)))


@pytest.mark.slow
def test_kills_come_in_the_middle_of_saves():
    if len(_midway) < 4:
        pytest.skip("needs the kills of this file")
    print(f"{sum(_midway)} of {len(_midway)} midway")
    assert sum(_midway) >= len(_midway) / 5
