"""Checkpoints survive power failures, clocks, other writers, links, and files made on purpose."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import load_checkpoint as load
from tests.support import inside
from tests.support.checkpoints import START, path_of, same, steps_in
from tests.support.messages import assert_message, raises
from tests.support.tables import mostly_slow, rows

CheckpointStore = inside.checkpoint_store()
LOWEST = ("loss", "min")


def arrays_of(step: int) -> dict[str, np.ndarray]:
    return {f"w{i}": np.full((32, 32), step + i, np.float32) for i in range(8)}


def save(directory, *steps: int, **options) -> None:
    """Saves checkpoints with a metric that improves with each step."""
    with CheckpointStore(directory, **options) as store:
        for step in steps:
            store.save(step, arrays_of(step), {"step": step}, {"loss": -float(step)})
            store.wait()


def assert_whole(directory, step: int | str = "last") -> int:
    """Loads a checkpoint, and checks that all of it belongs to its step."""
    found = load(directory, step)
    assert found.position == {"step": found.step}
    wanted = arrays_of(found.step)
    assert found.arrays.keys() == wanted.keys()
    assert all(same(value, found.arrays[name]) for name, value in wanted.items())
    return found.step


# Power failure

POLICIES = {
    "all": {},
    "last": {"keep_last": 1},
    "three": {"keep_last": 3},
    "best": {"keep_last": 1, "keep_best": LOWEST},
    "in the background": {"keep_last": 1, "asynchronous": True},
}


def test_file_gets_its_name_when_it_is_on_the_disk(subtests, tmp_path_factory):
    """It is synced before the rename, and the rename before anything is deleted."""
    for policy in POLICIES:
        with subtests.test(msg=policy), pytest.MonkeyPatch.context() as monkeypatch:
            tmp_path = tmp_path_factory.mktemp("row")
            check_file_gets_its_name_when_it_is_on_the_disk(tmp_path, monkeypatch, policy)


def check_file_gets_its_name_when_it_is_on_the_disk(tmp_path, monkeypatch, policy):
    synced: dict[str, int] = {}  # sizes
    events: list[str] = []
    fsync, replace, unlink = os.fsync, pathlib.Path.replace, pathlib.Path.unlink

    def recording_fsync(descriptor):
        fsync(descriptor)
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    def recording_replace(path, target):
        assert synced.get(str(path)) == path.stat().st_size > 8 * 4096, "not on the disk"
        events.append(f"named {target.name}")
        synced.pop(str(path.parent), None)
        return replace(path, target)

    def recording_unlink(path, missing_ok=False):
        if path.exists() and path.suffix == ".safetensors":
            assert str(path.parent) in synced, f"{path} is deleted before the rename is on the disk"
            events.append(f"deleted {path.name}")
        unlink(path, missing_ok)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(pathlib.Path, "replace", recording_replace)
    monkeypatch.setattr(pathlib.Path, "unlink", recording_unlink)
    save(tmp_path, 1, 2, 2, **POLICIES[policy])
    assert str(tmp_path) in synced, "the last rename is not on the disk"
    deleted = ["deleted step-1.safetensors"] * (POLICIES[policy].get("keep_last") == 1)
    one, two = "named step-1.safetensors", "named step-2.safetensors"
    assert events == [one, two, *deleted, two]
    monkeypatch.undo()
    assert assert_whole(tmp_path) == 2


@contextlib.contextmanager
def mounted(image: pathlib.Path, place: pathlib.Path):
    """Mounts the image of a file system; skips the test where that is not allowed."""
    place.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-o", "loop", image, place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount an image here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount an image")
@pytest.mark.skipif(not shutil.which("mkfs.ext4"), reason="mkfs.ext4 is not installed")
def test_saved_checkpoint_survives_a_power_failure(tmp_path_factory, subtests):
    """The image of a mounted file system is what its disk has got: a copy is a power failure.

    At once, and when the system has also written what was not synced.
    """
    for policy in POLICIES:
        with subtests.test(msg=policy):
            check_power_failure(tmp_path_factory.mktemp("row"), policy)


def check_power_failure(tmp_path, policy):
    image, copies = tmp_path / "disk", [tmp_path / "at once", tmp_path / "later"]
    with image.open("wb") as file:
        file.truncate(64 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    with mounted(image, tmp_path / "mounted") as place:
        save(place / "runs", 1, 2, 3, **POLICIES[policy])
        shutil.copyfile(image, copies[0])
        subprocess.run(["sync", "--file-system", place], check=True)
        shutil.copyfile(image, copies[1])
    for copy in copies:
        with mounted(copy, tmp_path / "after") as place:
            assert assert_whole(place / "runs") == 3
            (place / "runs" / ".mirror.lock").unlink(missing_ok=True)  # which nothing syncs
            kept = steps_in(place / "runs")
            assert [assert_whole(place / "runs", step) for step in kept] == kept


# Clocks

HOUR, YEAR = 3600 * 10**9, 3600 * 24 * 365 * 10**9


JUMPS = [  # of the clock, the argument, and the steps that are kept
    (-HOUR, 3, (4, 5, 6)),
    (-HOUR, 1, (6,)),
    (-HOUR, None, tuple(range(1, 7))),
    (10 * YEAR, 3, (4, 5, 6)),
    (-10 * YEAR, 3, (4, 5, 6)),
    (0, 3, (4, 5, 6)),
]


@pytest.mark.parametrize("rows", mostly_slow(JUMPS, JUMPS[0]))
def test_order_does_not_depend_on_the_clock(tmp_path_factory, rows, subtests):
    for jump, keep_last, kept in rows:
        with subtests.test(msg=f"{jump}, {keep_last}"), pytest.MonkeyPatch.context() as patch:
            check_order_does_not_depend_on_the_clock(
                tmp_path_factory.mktemp("row"), patch, jump, keep_last, kept
            )


def check_order_does_not_depend_on_the_clock(tmp_path, monkeypatch, jump, keep_last, kept):
    save(tmp_path, 1, 2, 3, keep_last=keep_last)
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + jump)  # and it stands still
    save(tmp_path, 4, 5, keep_last=keep_last)
    monkeypatch.undo()
    save(tmp_path, 6, keep_last=keep_last)
    with CheckpointStore(tmp_path) as store:
        assert store.steps() == kept
        assert store.latest() == 6
    assert assert_whole(tmp_path) == 6


# Several writers


def test_checkpoint_that_is_deleted_while_another_process_reads_is_skipped(tmp_path, monkeypatch):
    """A `FileNotFoundError` would mean that there is no checkpoint: training would begin again."""
    save(tmp_path, 1, 2, 3)
    files = inside.checkpoint_files()
    read = files.read_metadata

    def after_it_is_deleted(path):
        path_of(tmp_path, 1).unlink(missing_ok=True)
        return read(path)

    monkeypatch.setattr(files, "read_metadata", after_it_is_deleted)
    assert assert_whole(tmp_path) == 3


def test_two_stores_of_one_process_do_not_disturb_each_other(tmp_path):
    with CheckpointStore(tmp_path / "a") as a, CheckpointStore(tmp_path / "b") as b:
        for step in range(12):
            for store in (a, b):
                store.save(step, arrays_of(step), {"step": step})
    for name in "ab":
        assert [assert_whole(tmp_path / name, step) for step in range(12)] == list(range(12))


@pytest.mark.slow
def test_stores_in_threads_do_not_disturb_each_other(tmp_path):
    """Also where two of them write to one directory."""
    failed = []

    def work(name: str, steps: range) -> None:
        try:
            save(tmp_path / name, *steps, asynchronous=False)
        except BaseException as error:
            failed.append(error)

    rows = [("a", range(6)), ("b", range(6)), ("c", range(0, 6)), ("c", range(6, 12))]
    threads = [threading.Thread(target=work, args=row) for row in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for name, count in (("a", 6), ("b", 6), ("c", 12)):
        assert [assert_whole(tmp_path / name, step) for step in range(count)] == list(range(count))
        assert ".mirror.lock" not in os.listdir(tmp_path / name)


def test_two_checkpoint_callbacks_work_in_one_fit(tmp_path):
    trainer, data = small_trainer()
    Checkpoint = mirror.callbacks.Checkpoint
    callbacks = [Checkpoint(tmp_path / "best", monitor="loss"), Checkpoint(tmp_path / "last")]
    trainer.fit(data, epochs=8, callbacks=callbacks, progress=False)
    assert load(tmp_path / "best").step == load(tmp_path / "last").step == trainer._position.step


class AtStep(mirror.callbacks.Callback):
    def __init__(self, step: int, call: Callable[[Any], object]):
        self.step, self.call = step, call

    def on_step(self, fit):
        if fit.position.step == self.step:
            self.call(fit)


def train(directory, trainer=None, at=(0, None), epochs=4, **options) -> mirror.Trainer:
    """Trains for 3 steps an epoch, and calls a function after one of them."""
    trainer = trainer or small_trainer()[0]
    checkpoint = mirror.callbacks.Checkpoint(directory, every_steps=1, **options)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit(small_trainer()[1], epochs, callbacks=[checkpoint, AtStep(*at)], progress=False)
    return trainer


def interrupt(_) -> None:
    raise KeyboardInterrupt


def interrupted(directory, trainer=None) -> mirror.Trainer:
    return train(directory, trainer, (4, interrupt))


def saved_by_two(directory) -> None:
    first, second = (train(directory / name, epochs=1) for name in "ab")
    for trainer in (first, second, first):
        trainer.save(directory)


OTHER_TRAININGS = {
    "same step": lambda d: train(d, at=(5, lambda _: train(d, keep=None)), keep=None),
    "deleted by keep": lambda d: train(d, at=(11, lambda _: train(d, epochs=1)), keep=1),
    "restored from it": lambda d: train(d, at=(5, lambda _: train(d, restored(d)))),
    "before it resumes": lambda d: train(d, [interrupted(d), train(d)][0]),
    "save": saved_by_two,
}


@rows("train_both", OTHER_TRAININGS)
def test_checkpoints_of_another_training_are_not_lost(train_both, tmp_path_factory):
    """Neither replaced nor deleted, if it has written them since this training began."""
    directory = tmp_path_factory.mktemp("row")
    with raises(OSError, names="another training", values=[directory, "step-"], fix="directory"):
        train_both(directory)


def restored(directory) -> mirror.Trainer:
    trainer = small_trainer()[0]
    trainer.restore(directory)
    return trainer


def emptied(directory, *, restores: bool) -> None:
    """A directory that is away for a while, as that of a disk that fails."""
    away = directory.with_name(f"{directory.name}-away")

    def leave(_: Any) -> None:
        shutil.copytree(directory, away)
        for path in directory.glob("step-*"):
            path.unlink()

    def come_back(_: Any) -> None:
        shutil.copytree(away, directory, dirs_exist_ok=True)

    train(directory, epochs=2)
    trainer = restored(directory) if restores else None
    first = 6 if restores else 0
    at = AtStep(first + 2, leave), AtStep(first + 5, come_back)
    checkpoint = mirror.callbacks.Checkpoint(directory, every_steps=1, asynchronous=False)
    (trainer or small_trainer()[0]).fit(
        small_trainer()[1], 6, callbacks=[*at, checkpoint], progress=False
    )


SAME_TRAINING = {
    "one after the other": lambda d: [train(d), train(d)],
    "resumed": lambda d: train(d, interrupted(d)),
    "restored": lambda d: [interrupted(d), train(d, restored(d)), train(d, restored(d), epochs=5)],
    "restored by the same": lambda d: [(t := interrupted(d)), train(d), t.restore(d), train(d, t)],
    "again": lambda d: train(d, train(d)),
    "again after another": lambda d: [(t := train(d)), train(d), train(d, t)],
    "saved in a callback": lambda d: train(d, at=(4, lambda fit: fit.trainer.save(d)), keep=1),
    "saved afterwards": lambda d: train(d, keep=1).save(d),
    "the best": lambda d: [train(d, monitor="loss"), train(d, monitor="loss", keep=1)],
    "other steps": lambda d: train(d, at=(11, lambda _: train(d, epochs=1)), keep=None),
    "emptied": lambda d: emptied(d, restores=False),
    "emptied and restored": lambda d: emptied(d, restores=True),
}


@rows("train_twice", SAME_TRAINING)
def test_checkpoints_of_the_same_training_are_replaced(train_twice, tmp_path_factory):
    """Also those that a training has found when it began."""
    train_twice(tmp_path_factory.mktemp("row"))


def test_two_checkpoint_callbacks_work_in_one_directory(tmp_path):
    trainer, data = small_trainer()
    Checkpoint = mirror.callbacks.Checkpoint
    callbacks = [Checkpoint(tmp_path, monitor="loss"), Checkpoint(tmp_path, every_steps=2, keep=1)]
    trainer.fit(data, epochs=4, callbacks=callbacks, progress=False)
    assert load(tmp_path).step == trainer._position.step


def write_until_killed(directory, said) -> None:
    jax.config.update("jax_platforms", "cpu")
    store = CheckpointStore(directory, asynchronous=False)
    store.save(1, arrays_of(1), {"step": 1})
    said.send(os.getpid())
    threading.Event().wait(60)


def try_to_write(directory, said) -> None:
    try:
        CheckpointStore(directory)
    except OSError as error:
        said.send(f"{type(error).__name__}: {error}")
    else:
        said.send("opened")


def told_by(target, *arguments) -> tuple[object, object]:
    """Starts a process; returns it, and the first thing that it sends."""
    listens, says = START.Pipe(duplex=False)
    process = START.Process(target=target, args=(*arguments, says))
    process.start()
    says.close()
    assert listens.poll(60), "the process is silent"
    with listens:
        return process, listens.recv()


@pytest.mark.slow
def test_second_process_is_refused_until_the_first_has_ended(tmp_path):
    writer, pid = told_by(write_until_killed, tmp_path)
    try:
        with raises(BlockingIOError, values=[tmp_path, pid], fix="another directory"):
            CheckpointStore(tmp_path)
        assert assert_whole(tmp_path) == 1  # reading is allowed
    finally:
        writer.kill()
        writer.join()
    save(tmp_path, 2)
    assert assert_whole(tmp_path) == 2
    assert steps_in(tmp_path) == [1, 2]


def test_other_process_is_refused_while_this_one_writes(tmp_path):
    """Until the last of this process's stores is closed or dropped."""
    first, second = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    first.close()
    process, said = told_by(try_to_write, tmp_path)
    process.join()
    assert_message(said, names="BlockingIOError", values=[os.getpid(), tmp_path])
    del second
    process, said = told_by(try_to_write, tmp_path)
    process.join()
    assert said == "opened"


def test_directory_without_locks_is_written_to(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    save(tmp_path, 1)
    assert assert_whole(tmp_path) == 1


# Directories and links


def test_directory_that_disappears_is_reported_and_made_again(tmp_path):
    with CheckpointStore(tmp_path / "runs", asynchronous=False) as store:
        store.save(1, arrays_of(1), {"step": 1})
        shutil.rmtree(tmp_path / "runs")
        assert store.steps() == ()
        assert store.latest() is store.best() is None
        (tmp_path / "runs").write_text("a file")
        with raises(OSError, values=[tmp_path / "runs", 2, "none"]):
            store.save(2, arrays_of(2), {"step": 2})
        assert store.steps() == ()


def test_link_in_the_place_of_a_leftover_is_deleted_and_its_target_kept(subtests, tmp_path_factory):
    for kind, step in itertools.product(["directory", "file", "nothing"], [1, 2, 7]):
        name = f"{path_of('', step)}.unfinished"
        with subtests.test(msg=f"{kind} {name}"):
            tmp_path = tmp_path_factory.mktemp("row")
            target = tmp_path / "precious"
            if kind == "directory":
                target.mkdir()
                (target / "thesis").write_text("mine")
            elif kind == "file":
                target.write_text("mine")
            with CheckpointStore(tmp_path / "runs", asynchronous=False, keep_last=1) as store:
                store.save(1, arrays_of(1), {"step": 1})
                (tmp_path / "runs" / name).symlink_to(target)
                store.save(2, arrays_of(2), {"step": 2})
                store.save(2, arrays_of(2), {"step": 2})
            with CheckpointStore(tmp_path / "runs"):
                pass
            assert steps_in(tmp_path / "runs") == [2]
            assert assert_whole(tmp_path / "runs") == 2
            assert target.exists() == (kind != "nothing")
            assert kind != "directory" or (target / "thesis").read_text() == "mine"


def test_linked_checkpoint_is_removed_and_its_target_kept(tmp_path):
    save(tmp_path / "archive", 1)
    (tmp_path / "runs").mkdir()
    for step in (1, 2):
        path_of(tmp_path / "runs", step).symlink_to(path_of(tmp_path / "archive", 1))
    save(tmp_path / "runs", 2, keep_last=1)
    assert steps_in(tmp_path / "runs") == [2]
    assert assert_whole(tmp_path / "runs") == 2
    assert assert_whole(tmp_path / "archive") == 1


# Restoring is all or nothing


def small_trainer() -> tuple[mirror.Trainer, mirror.data.ArrayDataset]:
    def loss_fn(model, batch):
        return optax.squared_error(model(batch["x"]), batch["y"])[:, 0]

    arrays = {"x": np.ones((5, 2), "float32"), "y": np.ones((5, 1), "float32")}
    with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
        trainer = mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.adam(0.1), loss_fn)
    return trainer, mirror.data.from_arrays(arrays, batch_size=2)


def forge(path: pathlib.Path, change) -> None:
    """Changes the JSON of a checkpoint, with a right checksum."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    about = json.loads(header["__metadata__"]["mirror"])
    change(about)
    text = json.dumps(about)
    header["__metadata__"] = {"mirror": text, "checksum": str(zlib.crc32(text.encode()))}
    forged = json.dumps(header).encode()
    path.write_bytes(len(forged).to_bytes(8, "little") + forged + content[end:])


def set_position(name, value):
    return lambda about: about["position"].update({name: value})


FORGED = {
    **{
        f"{name} {value!r}": set_position(name, value)
        for name in ("step", "epoch", "epoch_step", "passes", "samples")
        for value in (-1, 1.5, "7", None, True, 2**70, [])
    },
    "no position": lambda about: about.pop("position"),
    "empty position": lambda about: about.update(position={}),
    "list as position": lambda about: about.update(position=[1]),
    "no step": lambda about: about["position"].pop("step"),
    "other meter": set_position("meter", {"sums": 1}),
    "text in meter": set_position("meter", {"totals": {"loss": "x"}, "count": 0, "weights": {}}),
    "list as meter": set_position("meter", []),
    "other history": set_position("history", {"epochs": [0]}),
    "ragged history": set_position("history", {"epochs": [0], "seconds": [], "metrics": {}}),
    "list as callbacks": set_position("callbacks", [1]),
    "text as state": set_position("callbacks", {"Checkpoint 1": "x"}),
    "no arrays": lambda about: about.pop("arrays"),
    "no metrics": lambda about: about.pop("metrics"),
    "text as entry": lambda about: about["arrays"].update({"model.kernel": "x"}),
    "negative shape": lambda about: about["arrays"]["model.kernel"].update(shape=[-2, 1]),
    "objects": lambda about: about["arrays"]["model.kernel"].update(dtype="object"),
    "unknown dtype": lambda about: about["arrays"]["model.kernel"].update(dtype="int512"),
    "other dtype": lambda about: about["arrays"]["model.kernel"].update(dtype="float64"),
    "terabytes": lambda about: about["arrays"]["model.kernel"].update(shape=[2**20, 2**30]),
    "missing array": lambda about: about["arrays"].pop("model.kernel"),
    "added array": lambda about: about["arrays"].update(x=about["arrays"]["model.kernel"]),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    trainer, data = small_trainer()
    trainer.fit(data, epochs=1, progress=False)
    directory = tmp_path_factory.mktemp("saved")
    trainer.save(directory)
    return trainer, directory


def test_restore_changes_everything_or_nothing(subtests, saved, tmp_path_factory):
    for forged in FORGED:
        with subtests.test(msg=forged):
            tmp_path = tmp_path_factory.mktemp("row")
            trainer, whole = saved
            shutil.copytree(whole, tmp_path / "runs")
            (path,) = (tmp_path / "runs").iterdir()
            before = inside.checkpoint_state(trainer)
            forge(path, FORGED[forged])
            with pytest.raises(ValueError, match="heckpoint") as caught:
                trainer.restore(tmp_path / "runs")
            assert "Error(" not in str(caught.value) or "invalid" in str(caught.value)
            arrays, position = inside.checkpoint_state(trainer)
            assert position == before[1]
            assert all(same(value, arrays[name]) for name, value in before[0].items())
            trainer.restore(whole)


def test_foreign_state_of_a_callback_is_refused_before_training(saved, tmp_path):
    _, whole = saved
    shutil.copytree(whole, tmp_path / "runs")
    (path,) = (tmp_path / "runs").iterdir()
    forge(path, set_position("callbacks", {"EarlyStopping(loss) 1": {"patience": 3}}))
    trainer, data = small_trainer()
    trainer.restore(tmp_path / "runs")
    before = trainer._position.step
    with raises(ValueError, names="EarlyStopping", values="{'patience': 3}", fix="callbacks"):
        trainer.fit(
            data, epochs=3, callbacks=mirror.callbacks.EarlyStopping("loss"), progress=False
        )
    assert trainer._position.step == before


# Checkpoints of strangers


def test_arrays_larger_than_memory_are_refused(tmp_path):
    """Zeros need no room on a disk."""
    save(tmp_path, 1)
    path = path_of(tmp_path, 1)
    forge(path, lambda about: about["arrays"]["w0"].update(shape=[2**20, 2**20]))
    with contextlib.suppress(OSError):  # some file systems have no files of this size
        os.truncate(path, 2**43)
    with raises(ValueError, values=[1, path, "4096.0 GiB"]):
        load(tmp_path)


def change_header(path: pathlib.Path, size: bytes = b"", text: bytes = b"") -> None:
    """Replaces the beginning of a header, and its size."""
    with path.open("r+b") as file:
        file.write(size or file.read(8))
        file.seek(8)
        file.write(text)


def set_entry(**changes):
    """Changes the entry of the last array, which moves no other one."""
    return lambda path: forge(path, lambda about: about["arrays"]["w7"].update(changes))


CHANGED = {
    "longer": set_entry(shape=[2**15, 2**12]),
    "shorter": set_entry(shape=[2, 2]),
    "smaller items": set_entry(dtype="int8"),
    "objects": set_entry(dtype="object"),
    "references": set_entry(dtype="O,i4"),
    "same place": lambda path: forge(path, lambda it: it["arrays"].update(w7=it["arrays"]["w6"])),
    "endless header": lambda path: change_header(path, size=b"\xff" * 8),
    "large header": lambda path: change_header(path, size=(10**12).to_bytes(8, "little")),
    "nested header": lambda path: change_header(path, text=b"[" * 1000),
    "no header": lambda path: change_header(path, size=bytes(8)),
    "nothing": lambda path: path.write_bytes(b""),
}


def test_arrays_that_differ_from_their_entries_are_refused(subtests, tmp_path_factory):
    for case, change in CHANGED.items():
        with subtests.test(msg=case):
            tmp_path = tmp_path_factory.mktemp("row")
            save(tmp_path, 1, 2)
            change(path_of(tmp_path, 1))
            with raises(ValueError, values=[1, path_of(tmp_path, 1), 2]) as caught:
                load(tmp_path, 1)
            if case in ("longer", "shorter", "smaller items", "same place"):
                assert_message(caught.value, names="w7")
            assert assert_whole(tmp_path, 2) == 2


def test_restore_compares_the_model_before_it_reads(saved, tmp_path, monkeypatch):
    trainer, _ = saved
    save(tmp_path, 1)
    forge(path_of(tmp_path, 1), lambda about: about.update(position=trainer._position.to_dict()))
    monkeypatch.setattr(
        inside.checkpoint_files(), "read_arrays", lambda *_: pytest.fail("was read")
    )
    with raises(ValueError, names=["model.kernel", "w0"], fix="mirror.load_checkpoint"):
        trainer.restore(tmp_path)
