"""`kill -9` at any point of a save loses nothing, and the next save works."""

import contextlib
import os
import signal

import jax
import numpy as np
import pytest

from mirror import load_checkpoint as load
from tests.support import inside
from tests.support.checkpoints import START, same
from tests.support.kills import before_changes, kill_me

CheckpointStore = inside.checkpoint_store()


def arrays_of(turn: int) -> dict[str, np.ndarray]:
    """Returns arrays that encode the number of their save."""
    return {f"w{number}": np.arange(1000.0) + 10 * turn + number for number in range(2)}


def save(store, step: int, turn: int) -> None:
    store.save(step, arrays_of(turn), {"turn": turn})


def save_until(directory, wanted: str | None, says) -> None:
    """Saves, and ends before the point with this name; tells the points, and the turns at an end.

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
            save(store, step, turns[0])
            says.send((step, turns.pop(0)))
    says.send(list(points))


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
    assert status == -signal.SIGKILL, "the point was not reached"
    steps = tuple(inside.checkpoint_layout().checkpoints_in(directory))
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
    assert sorted(os.listdir(directory)) == sorted(map(str, (*steps, 9)))


def assert_whole(directory, step: int) -> int:
    """Checks that arrays and position are of one save; returns its number."""
    found = load(directory, step)
    wanted = arrays_of(found.position["turn"])
    assert found.arrays.keys() == wanted.keys()
    assert all(same(value, found.arrays[name]) for name, value in wanted.items())
    return found.position["turn"]


def is_of_mirror(point: str) -> bool:
    """Whether the point is a step of mirror's own protocol: names and deletions."""
    return (point.startswith("os.rename") and "orbax" not in point) or "is deleted" in point


@pytest.mark.parametrize("own", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_kill_in_a_save_loses_nothing(tmp_path_factory, points, subtests, own):
    """Before each name that mirror changes, and before each file that Orbax creates."""
    # What Orbax does is the same in both saves, and so is what mirror does at most points.
    last = set({point.split(", save")[0]: point for point in points}.values())
    quick = [point for point in points if point in last and is_of_mirror(point)]
    rest = [p for p in points if p not in quick and (p in last or is_of_mirror(p))]
    rows = quick if own else rest
    assert len(rows) > 5
    for point in rows:
        with subtests.test(msg=point):
            check_kill(tmp_path_factory.mktemp("row"), point)
