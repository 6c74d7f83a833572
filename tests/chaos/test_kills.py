"""A kill at any point of a save loses nothing, and the next save works."""

import contextlib
import resource
import signal

import jax
import numpy as np
import pytest

from mirror import load_checkpoint as load
from tests.support import inside
from tests.support.checkpoints import START, path_of, same, steps_in
from tests.support.kills import before_changes, kill_me

CheckpointStore = inside.checkpoint_store()
FRACTIONS = (0, 0.1, 0.5, 0.99)


def arrays_of(turn: int) -> dict[str, np.ndarray]:
    """Returns arrays that encode the number of their save."""
    return {f"w{number}": np.arange(1000.0) + 10 * turn + number for number in range(2)}


def save(store, step: int, turn: int) -> None:
    store.save(step, arrays_of(turn), {"turn": turn})


def save_until(directory, wanted: str | None, says) -> None:
    """Saves, and is killed at the point with this name; tells the points, and the turns at an end.

    Step 3 is new, and makes the store delete step 1. Then another checkpoint replaces it.
    """
    jax.config.update("jax_platforms", "cpu")
    turns = [1, 2, 3, 4]
    points: dict[str, None] = {}

    def at(name: str) -> None:
        name = f"{name}, save {5 - len(turns)}"
        points[name] = None
        if name == wanted:
            kill_me()

    with CheckpointStore(directory, asynchronous=False, keep_last=2) as store:
        for step in (1, 2, 3, 3):
            if step == 3 and not points:
                before_changes(directory, at)
            for fraction in FRACTIONS if step == 3 else ():
                name = f"{fraction} of the file is written, save {5 - len(turns)}"
                points[name] = None
                if name == wanted:
                    kill_at_size(fraction * path_of(directory, 2).stat().st_size)
            save(store, step, turns[0])
            says.send((step, turns.pop(0)))
    says.send(list(points))


def kill_at_size(size: float) -> None:
    """Lets the system kill this process when a file grows beyond a size."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), most))


def told_by(directory, wanted: str | None = None) -> tuple[int | None, list]:
    """Returns the status of a process that saves, and what it has told."""
    listens, says = START.Pipe(duplex=False)
    process = START.Process(target=save_until, args=(directory, wanted, says))
    process.start()
    says.close()
    told = []
    with listens, contextlib.suppress(EOFError):
        while True:
            told.append(listens.recv())
    process.join()
    return process.exitcode, told


@pytest.fixture(scope="module")
def points(tmp_path_factory) -> list[str]:
    """The names of all points of two saves, in order."""
    status, told = told_by(tmp_path_factory.mktemp("points"))
    assert status == 0
    return told[-1]


def check_kill(directory, point: str) -> None:
    status, told = told_by(directory, point)
    assert status in (-signal.SIGKILL, -signal.SIGXFSZ), "the point was not reached"
    names = [path.stem for path in directory.glob("step-*.safetensors")]
    steps = tuple(sorted(int(name.removeprefix("step-")) for name in names))
    last = told[-1][0]  # each save that has ended is there, but for the one that is deleted
    assert steps[-1] in (last, 3)
    assert {step for step, _ in told} - {1} <= set(steps)
    with CheckpointStore(directory) as store:
        assert store.steps() == steps
        for step in steps:
            assert_whole(directory, step)
        if last == 3:
            assert assert_whole(directory, 3) >= told[-1][1]
        save(store, 9, 9)
    assert assert_whole(directory, 9) == 9
    assert steps_in(directory) == [*steps, 9]


def assert_whole(directory, step: int) -> int:
    """Checks that arrays and position are of one save; returns its number."""
    found = load(directory, step)
    wanted = arrays_of(found.position["turn"])
    assert found.arrays.keys() == wanted.keys()
    assert all(same(value, found.arrays[name]) for name, value in wanted.items())
    return found.position["turn"]


@pytest.mark.parametrize("is_last", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kill_in_a_save_loses_nothing(tmp_path_factory, points, subtests, is_last):
    """While the file is written, and before each name that is created, synced or deleted."""
    last = set({point.split(", save")[0]: point for point in points}.values())
    rows = [point for point in points if (point in last) == is_last]
    assert len(rows) > 7
    for point in rows:
        with subtests.test(msg=point):
            check_kill(tmp_path_factory.mktemp("row"), point)
