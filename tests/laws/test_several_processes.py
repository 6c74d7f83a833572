"""Several processes train as one device does, agree on real programs, and survive `kill -9`."""

import functools
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import mirror
from tests.support import fresh, processes

LAYOUTS = {"1x4": (1, 4), "2x2": (2, 2), "4x1": (4, 1)}  # processes, devices of each
TOLERANCE = 1e-6  # relative to the largest magnitude of an array
ROWS = 4 * 2  # kinds of state, optimizers; for each batch size
BATCH_SIZES = ["10", "8 3"]  # "10" and "2x2" are in CI, the other rows nightly


def rows(*layouts: str) -> pytest.MarkDecorator:
    """The parameters `layout` and `sizes`."""
    table = [(layout, sizes) for layout in layouts for sizes in BATCH_SIZES]
    marks = {True: pytest.mark.slow, False: pytest.mark.nightly}
    return pytest.mark.parametrize(
        ("layout", "sizes"),
        [pytest.param(*row, marks=marks[row == ("2x2", "10")], id=", ".join(row)) for row in table],
    )


@functools.cache
def trained(
    layout: str, sizes: str, directory: str
) -> tuple[list[dict[str, tuple[float, str]]], dict]:
    """Returns the rows that each process has printed, and all arrays and proofs."""
    count, devices = LAYOUTS[layout]
    file = f"{directory}/{layout} {sizes}.npz"
    ended = processes.run_program(
        *("several_conformance", file, *sizes.split()),
        processes=count,
        devices=devices,
        after_failure=15,
        timeout=900,
    )
    printed = [
        {name: (float(off), bits) for name, off, bits in re.findall(r"row (\S+) (\S+) (\w+)", text)}
        for text in processes.outputs_of(ended)
    ]
    with np.load(file) as arrays:
        return printed, dict(arrays)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("several"))


@rows(*LAYOUTS)
def test_processes_train_like_one_device(layout, sizes, directory):
    """nnx, Linen, plain pytrees and `Trainer`; SGD and Adam; batches that do not divide."""
    printed, _ = trained(layout, sizes, directory)
    for rows in printed:
        assert len(rows) == ROWS * len(sizes.split())
        assert {name: off for name, (off, _) in rows.items() if not off < TOLERANCE} == {}
        assert max(off for off, _ in rows.values()) > 0, "one device was compared with itself"
        assert rows == printed[0], "the processes have different bits"


@pytest.mark.nightly
@rows("2x2", "4x1")
def test_processes_train_like_a_mirrored_strategy_with_the_same_proof(layout, sizes, directory):
    """One process has a `MirroredStrategy` on all devices."""
    _, arrays = trained(layout, sizes, directory)
    _, wanted = trained("1x4", sizes, directory)
    assert arrays.keys() == wanted.keys()
    proofs = [name for name in arrays if name.endswith(" proof")]
    assert len(proofs) == 3 * 2 * len(sizes.split()), "of nnx, Linen and plain pytrees"
    for name in proofs:
        text = str(arrays.pop(name))
        assert text == str(wanted[name])
        assert "on 4 replicas: proved to stay in sync" in text
        assert "all-reduce (sum)" in text
    for name, value in arrays.items():
        off = np.abs(value - wanted[name]).max() / np.abs(wanted[name]).max()
        assert off < TOLERANCE, name


@pytest.mark.nightly
@pytest.mark.parametrize(("count", "devices"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("packed", ["packed", "unpacked"])
def test_600_steps_that_nobody_awaits_finish(count, devices, packed):
    ended = processes.run_program(
        *("several_alone", "600", packed),
        processes=count,
        devices=devices,
        after_failure=15,
        timeout=900,
    )
    assert all("finished" in output for output in processes.outputs_of(ended))


@pytest.mark.nightly
def test_real_programs_agree_from_other_folders_and_hash_seeds(tmp_path):
    """No false alarm: 12 real programs, 5 models and 3 transformations of JAX."""
    for name in ("mirror", "tests"):
        shutil.copytree(fresh.ROOT / name, tmp_path / "elsewhere" / name)
    each = [
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "2", "PYTHONPATH": str(tmp_path / "elsewhere")},
    ]
    ended = processes.run(
        ["-P", "-m", "tests.programs.several_real"], each=each, after_failure=15, timeout=900
    )
    first, second = processes.outputs_of(ended)
    assert str(tmp_path) in second.splitlines()[0]
    assert str(tmp_path) not in first.splitlines()[0]
    lines = [re.findall(r"^trained: .*$", text, re.MULTILINE) for text in (first, second)]
    assert len(lines[0]) == 20
    assert lines[0] == lines[1]


def launched(directory: object, kills: int, epochs: int) -> str:
    arguments = ["--processes", "2", "--devices", "2", "--cpu", "--restarts", str(kills)]
    program = str(fresh.PROGRAMS / "several_killed.py")
    path = os.pathsep.join(filter(None, [fresh.INHERITED.get("PYTHONPATH"), str(fresh.ROOT)]))
    command = [sys.executable, "-m", "mirror", "launch", *arguments, program]
    done = subprocess.run(
        [*command, str(directory), str(kills), str(epochs)],
        env={**fresh.INHERITED, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("kills", [2, 20])
def test_kills_at_random_moments_do_not_change_a_bit(kills, tmp_path):
    """Of the chief and the other process, in turn, during a save and at any moment."""
    epochs = 20 + 4 * kills  # more steps of 10 ms than can be trained before the last kill
    disturbed = launched(tmp_path / "killed", kills, epochs)
    killed = re.findall(r"process (\d) ended first, by SIG(KILL|ABRT)", disturbed)
    assert len(killed) == kills, disturbed
    dying = re.findall(r"\[(\d)\] dies (in a save|at a random moment)", disturbed)
    assert len(dying) == kills
    assert len(set(dying)) == min(kills, 4), "each process, in and outside saves"
    steps = [int(step) for step in re.findall(r"\[0\] resumes at (\d+)", disturbed)]
    assert steps == sorted(steps), "a restart has lost a checkpoint"
    undisturbed = launched(tmp_path / "undisturbed", 0, epochs)
    pattern = r"ended at (\d+) (\w+)"
    wanted = re.findall(pattern, undisturbed)
    assert len(wanted) == 2
    assert len(set(wanted)) == 1
    assert re.findall(pattern, disturbed) == wanted
    assert mirror.load_checkpoint(tmp_path / "killed").position["step"] == int(wanted[0][0])
