"""Disks that are full, read-only or gone, and odd names: nothing is lost, and errors name paths."""

import contextlib
import errno
import gc
import os
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import load_checkpoint as load
from tests.support import inside
from tests.support.checkpoints import in_a_process, same, steps_in
from tests.support.messages import assert_message, raises
from tests.support.tables import mostly_slow
from tests.support.waiting import wait_until

CheckpointStore = inside.checkpoint_store()
MIB = 2**20


def arrays_of(step: int) -> dict[str, np.ndarray]:
    """Returns arrays that encode their step, and that cannot be compressed."""
    noise = np.random.default_rng(step).integers(0, 2**32, MIB // 8, np.uint32)
    return {f"w{number}": noise + np.uint32(number) for number in range(2)}


def save(store, step: int) -> None:
    store.save(step, arrays_of(step), {"step": step})
    store.wait()


def assert_whole(directory: Path, *steps: int) -> None:
    for step in steps:
        found = load(directory, step)
        assert found.position == {"step": step}
        wanted = arrays_of(step)
        assert found.arrays.keys() == wanted.keys()
        assert all(same(value, found.arrays[name]) for name, value in wanted.items())


# Faults


@contextlib.contextmanager
def disk(place: Path) -> Iterator[Path]:
    """Yields a disk of 8 MiB with few inodes, in memory."""
    options = f"size={8 * MIB},nr_inodes=200"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        unmount(place)


def unmount(place: Path) -> None:
    """Unmounts a disk once nothing uses it: threads may close files after they answer."""

    def is_unmounted() -> bool:
        gc.collect()  # a file that only an exception's frames hold is open until then
        done = subprocess.run(["umount", place], capture_output=True, text=True)
        failed[:] = [done.stderr.strip()] * bool(done.returncode)
        return not failed

    failed: list[str] = []
    with contextlib.suppress(AssertionError):
        wait_until(is_unmounted)
    if not failed:
        return
    held = [
        (str(link.parent.parent.name), os.readlink(link))
        for link in Path("/proc").glob("[0-9]*/fd/*")
        if os.path.islink(link) and str(place) in os.readlink(link)
    ]
    subprocess.run(["umount", "--lazy", place], check=True)
    raise AssertionError(f"{failed[0]}: open are {held}")


def fill(directory: Path, spare: int = 0) -> Callable[[], object]:
    """Fills the disk of a directory; returns how to free it."""
    filler = directory.parent / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(filler, max(filler.stat().st_size - spare, 0))
    return filler.unlink


def use_all_inodes(directory: Path) -> Callable[[], object]:
    many = directory.parent / "many"
    many.mkdir()
    with contextlib.suppress(OSError):
        for number in range(1000):
            (many / str(number)).touch()
    return lambda: shutil.rmtree(many)


def make_read_only(directory: Path) -> Callable[[], object]:
    """Covers the disk with a read-only view of itself: its own files are open."""
    for options in (["--bind", directory.parent], ["-o", "remount,bind,ro"]):
        subprocess.run(["mount", *options, directory.parent], check=True)
    return lambda: subprocess.run(["umount", directory.parent], check=True)


def move_away(directory: Path, put: Callable[[Path], object]) -> Callable[[], object]:
    """Moves the directory, and puts something in its place; returns how to undo it."""
    aside = directory.with_name("aside")
    directory.rename(aside)
    put(directory)

    def undo() -> None:
        delete(directory)
        aside.rename(directory)

    return undo


def delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


FAULTS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "full": fill,
    "full in the middle": lambda directory: fill(directory, spare=MIB // 2),
    "without inodes": use_all_inodes,
    "read-only": make_read_only,
    "gone": lambda directory: move_away(directory, lambda _: None),
    "replaced by a directory": lambda directory: move_away(directory, Path.mkdir),
    "replaced by a file": lambda directory: move_away(directory, Path.touch),
    "replaced by a fifo": lambda directory: move_away(directory, os.mkfifo),
    "replaced by a broken link": lambda directory: move_away(
        directory, lambda path: path.symlink_to("nowhere")
    ),
    "replaced by a link to itself": lambda directory: move_away(
        directory, lambda path: path.symlink_to(path)
    ),
}


def assert_error(error: OSError, directory: Path, step: int) -> None:
    """Checks that an error names the directory and, if it comes from a save, what is intact."""
    assert_message(error, values=directory)
    if "intact" in str(error):
        assert_message(error, values=step, fix="save to another directory")


# All faults of a store that waits, and three of one that writes in the background.
ROWS = [*((fault, False) for fault in FAULTS), ("full", True), ("gone", True), ("read-only", True)]
QUICK = [("full", False), ("gone", True), ("replaced by a file", False)]


@pytest.mark.parametrize("rows", mostly_slow(ROWS, *QUICK))
def test_disk_fails_between_saves(tmp_path_factory, rows, subtests):
    for fault, asynchronous in rows:
        with (
            subtests.test(msg=f"{fault}, {asynchronous}"),
            disk(tmp_path_factory.mktemp("disk")) as place,
        ):
            check_fault_between_saves(place, fault, asynchronous)


def check_fault_between_saves(disk, fault, asynchronous):
    directory = disk / "runs"
    with CheckpointStore(directory, keep_last=2, asynchronous=asynchronous) as store:
        save(store, 1)
        undo = FAULTS[fault](directory)
        try:
            save(store, 2)
        except OSError as error:
            assert_error(error, directory, 2)
        else:
            assert "replaced" in fault or fault == "gone"  # it is made again
            assert_whole(directory, 2)
        store.steps()
        undo()
        assert_whole(directory, 1)
        save(store, 3)
        assert_whole(directory, 1, 3)
        assert not [name for name in os.listdir(directory) if "unfinished" in name]


@pytest.mark.parametrize("rows", mostly_slow(ROWS, *QUICK))
def test_disk_fails_in_the_middle_of_a_save(tmp_path_factory, rows, subtests):
    """When the file of the checkpoint is written, and before it has its name."""
    for fault, asynchronous in rows:
        with (
            subtests.test(msg=f"{fault}, {asynchronous}"),
            disk(tmp_path_factory.mktemp("disk")) as place,
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            check_fault_in_a_save(place, monkeypatch, fault, asynchronous)


def check_fault_in_a_save(disk, monkeypatch, fault, asynchronous):
    directory = disk / "runs"
    undo: list[Callable[[], object]] = []

    def failing_sync(descriptor: int) -> None:
        monkeypatch.undo()
        undo.append(FAULTS[fault](directory))
        os.fsync(descriptor)

    with CheckpointStore(directory, asynchronous=asynchronous) as store:
        save(store, 1)
        monkeypatch.setattr(os, "fsync", failing_sync)
        try:
            save(store, 1)  # replaces it
            save(store, 2)
        except OSError as error:
            assert_error(error, directory, 1)
        (heal,) = undo
        heal()
        assert_whole(directory, 1)
        save(store, 3)
        assert_whole(directory, 1, 3)


def test_file_systems_that_cannot_sync_directories_have_checkpoints(tmp_path, monkeypatch):
    fsync = os.fsync
    failure = errno.EINVAL

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(failure, os.strerror(failure))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    with CheckpointStore(tmp_path) as store:
        save(store, 1)
        failure = errno.EIO  # the disk has an error
        with raises(OSError, values=tmp_path, fix="save to another directory"):
            save(store, 2)
    assert_whole(tmp_path, 1)


@pytest.mark.parametrize("rows", mostly_slow(FAULTS, "full", "replaced by a fifo"))
def test_store_is_opened_on_a_disk_that_fails(tmp_path_factory, rows, subtests):
    for fault in rows:
        with subtests.test(msg=fault), disk(tmp_path_factory.mktemp("disk")) as place:
            check_store_is_opened(place, fault)


def check_store_is_opened(disk, fault):
    directory = disk / "runs"
    with CheckpointStore(directory) as store:
        save(store, 1)
    undo = FAULTS[fault](directory)
    try:
        with CheckpointStore(directory) as store:
            save(store, 2)
    except OSError as error:
        assert_message(error, values=directory)
    else:
        assert "replaced" in fault or fault == "gone"
    undo()
    assert_whole(directory, 1)
    with CheckpointStore(directory) as store:
        save(store, 3)
    assert_whole(directory, 1, 3)


@pytest.mark.parametrize("fault", ["full", pytest.param("read-only", marks=pytest.mark.slow)])
def test_training_continues_after_a_disk_has_failed(tmp_path, fault):
    """`fit` raises, the model is at the end of a step, and the next `fit` trains and saves."""
    with disk(tmp_path) as place:
        check_training_continues(place, fault)


def check_training_continues(disk, fault):
    directory = disk / "runs"

    def loss_fn(model, batch):
        return optax.squared_error(model(batch["x"]), batch["y"])[:, 0]

    arrays = {"x": np.ones((6, 2), "float32"), "y": np.ones((6, 1), "float32")}
    with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
        trainer = mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.adam(0.1), loss_fn)
    data = mirror.data.from_arrays(arrays, batch_size=2)
    undo: list[Callable[[], object]] = []

    class Fails(mirror.callbacks.Callback):
        def on_step(self, fit):
            if fit.position.step == 4 and not undo:
                undo.append(FAULTS[fault](directory))

    checkpoint = mirror.callbacks.Checkpoint(directory, asynchronous=False)
    with raises(OSError, values=directory):
        trainer.fit(data, epochs=4, callbacks=[Fails(), checkpoint], progress=False)
    assert trainer._position.step == 6
    undo[0]()
    assert load(directory).step == 3
    trainer.fit(data, epochs=4, callbacks=checkpoint, progress=False)
    assert load(directory).step == trainer._position.step == 12


def write_without_permission(directory: Path) -> None:
    assert_whole(directory, 1)  # imports what loading needs: the other user may not read packages
    if os.geteuid() == 0:
        os.seteuid(65534)  # root can write anywhere
    with raises(OSError, values=directory, fix="writable"):
        CheckpointStore(directory)
    assert_whole(directory, 1)


@pytest.mark.slow
def test_directory_of_another_user_can_be_read_only():
    """A user without permission to write is told so, and can load.

    Not below `tmp_path`: each start of pytest forbids other users to read its parent.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        _check_read_only(Path(folder) / "runs")


def _check_read_only(directory):
    with CheckpointStore(directory) as store:
        save(store, 1)
    directory.chmod(0o555)
    in_a_process(write_without_permission, directory)
    assert_whole(directory, 1)


# Names

NAMES = {
    "spaces": " a  b ",
    "unicode": "Größe 学習 🙂",
    "combining characters": "Gro\u0308\u00dfe",
    "newline": "a\nb",
    "control characters": "a\x01\x7fb",
    "option": "-rf",
    "pattern": "*?{a,b}",
    "variable": "$HOME ${x} %d %s",
    "quotes": "a'b\"c`d`",
    "shell": "; true | cat > x &",
    "dots": "...",
    "digits": "7",
    "name of a leftover": "step-7.safetensors.unfinished",
    "name of a checkpoint": "step-7.safetensors",
    "pattern of Orbax": "runs[1]",
    "backslash": "a\\b",
    "longest": "x" * 255,
    "deep": "/".join(["d" * 50] * 20),
    "not UTF-8": os.fsdecode(b"\xff\xfe"),
    "home": "~",
    "up and down": "a/../b",
}


def test_directory_with_an_odd_name(subtests, tmp_path_factory):
    """It works, or the error names the path; nothing is written elsewhere."""
    for name in NAMES:
        with subtests.test(msg=name):
            tmp_path = tmp_path_factory.mktemp("row")
            directory = tmp_path / "in" / NAMES[name]
            try:
                with CheckpointStore(directory) as store:
                    save(store, 1)
            except (OSError, ValueError) as error:
                assert_message(error, values=repr(str(directory))[1:-1])
            else:
                assert_whole(directory, 1)
            assert os.listdir(tmp_path) in (["in"], [])
            assert len(list(tmp_path.glob("in/*"))) <= 1


def test_directory_whose_name_is_impossible_is_rejected(subtests, tmp_path_factory):
    for name in ["x" * 256, "/".join(["d" * 250] * 20), "a\0b"]:
        with subtests.test(msg=repr(name[:20])):
            tmp_path = tmp_path_factory.mktemp("row")
            with pytest.raises((OSError, ValueError)) as caught:
                CheckpointStore(tmp_path / name)
            assert name[:50].split("\0")[0] in str(caught.value)
            assert not list(tmp_path.iterdir()) or not list(tmp_path.rglob("step-*"))


TRAVERSALS = [
    "../x",
    "../../../x",
    "/x",
    "a/../../../x",
    "..",
    ".",
    "a//b",
    "",
    "x\0y",
    "__metadata__",
    "~/x",
    "C:\\x",
]


def test_name_of_an_array_cannot_leave_the_directory(subtests, tmp_path_factory):
    for name in TRAVERSALS:
        with subtests.test(msg=repr(name)):
            tmp_path = tmp_path_factory.mktemp("row")
            directory = tmp_path / "in" / "runs"
            value = np.arange(5.0)
            with CheckpointStore(directory) as store:
                try:
                    store.save(1, {name: value, "w": value}, {})
                    store.wait()
                except (OSError, ValueError) as error:
                    assert_message(error, values=repr(name))
                else:
                    assert same(load(directory).arrays[name], value)
            assert os.listdir(tmp_path) == ["in"]
            assert os.listdir(tmp_path / "in") == ["runs"]
            assert steps_in(directory) in ([], [1])


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        before = os.getcwd()
        os.chdir(path.parent)  # the path of a socket must be short
        try:
            made.bind(path.name)
        finally:
            os.chdir(before)


IN_THE_WAY: dict[str, Callable[[Path], object]] = {
    "file": Path.touch,
    "directory": Path.mkdir,
    "full directory": lambda path: (path / "thesis").mkdir(parents=True),
    "fifo": os.mkfifo,
    "socket": make_socket,
    "broken link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path),
    "link to a file": lambda path: path.symlink_to(path.parent.parent / "precious"),
}


CHECKPOINT, LEFTOVER = "step-2.safetensors", "step-2.safetensors.unfinished"
NAMED = [(kind, CHECKPOINT) for kind in IN_THE_WAY]
NAMED += [
    (kind, name)
    for kind in ("file", "full directory", "link to a file", "fifo")
    for name in (LEFTOVER, ".mirror.lock")
]


@pytest.mark.parametrize(
    "rows", mostly_slow(NAMED, ("link to a file", LEFTOVER), ("fifo", CHECKPOINT))
)
def test_something_else_has_the_name_of_a_checkpoint(rows, subtests, tmp_path_factory):
    """It is replaced, ignored or named in the error, and older checkpoints are whole."""
    for kind, name in rows:
        with subtests.test(msg=f"{kind} {name}"):
            tmp_path = tmp_path_factory.mktemp("row")
            directory = tmp_path / "runs"
            with CheckpointStore(directory) as store:
                save(store, 1)
            precious = tmp_path / "precious"
            precious.write_text("mine")
            IN_THE_WAY[kind](directory / name)
            try:
                with CheckpointStore(directory) as store:
                    save(store, 2)
            except OSError as error:
                assert_message(error, values=directory)
                delete(directory / name)
                with CheckpointStore(directory) as store:
                    save(store, 2)
            assert_whole(directory, 1, 2)
            assert load(directory).step == 2
            assert precious.read_text() == "mine"


def test_directory_is_a_link(subtests, tmp_path_factory):
    """The checkpoints are where it points to."""
    for target in ["directory", "link", "nothing"]:
        with subtests.test(msg=target):
            tmp_path = tmp_path_factory.mktemp("row")
            place = tmp_path / "elsewhere"
            if target == "directory":
                place.mkdir()
            elif target == "link":
                (tmp_path / "far").mkdir()
                place.symlink_to(tmp_path / "far")
            (tmp_path / "runs").symlink_to(place)
            with CheckpointStore(tmp_path / "runs") as store:
                save(store, 1)
            assert (tmp_path / "runs").is_symlink()
            assert_whole(place, 1)
