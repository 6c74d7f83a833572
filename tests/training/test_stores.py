"""Object stores: checkpoints, logs and exported programs at URLs, and stores that fail."""

import csv
import io
import pathlib
import sys
import uuid

import jax
import numpy as np
import optax
import pytest
import tensorboardX  # noqa: F401 - sets CRC32C_SW_MODE
import upath
from flax import nnx
from fsspec.implementations.memory import MemoryFileSystem

import mirror
from mirror import callbacks
from tests.support import inside
from tests.support.messages import assert_message, raises
from tests.support.packages import is_installed

CheckpointStore = inside.checkpoint_store()
X = np.random.RandomState(0).randn(12, 3).astype("float32")
DATA = {"x": X, "y": X.sum(1)}
FIT = {"batch_size": 4, "progress": False}  # 3 steps per epoch


@pytest.fixture
def run():
    """Returns a new directory in the memory of this process."""
    path = upath.UPath(f"memory://bucket/{uuid.uuid4()}")
    yield path
    if path.exists():
        path.fs.rm(path.path, recursive=True)


@pytest.fixture
def s3(monkeypatch):
    """Returns a new directory in a server of this process that answers like S3."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            monkeypatch.setenv(name, "us-east-1")
        path = upath.UPath(f"s3://bucket/{uuid.uuid4()}", use_listings_cache=False)
        path.fs.makedirs("bucket", exist_ok=True)
        yield path
    finally:
        server.stop()
        if "s3fs" in sys.modules:  # of this server
            sys.modules["s3fs"].S3FileSystem.clear_instance_cache()


def loss_fn(model, batch):
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2


def new_trainer() -> mirror.Trainer:
    with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
        return mirror.Trainer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.adam(0.1), loss_fn)


def weights(trainer) -> list:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(trainer.model))]


def names_in(path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def saved(*steps) -> list[str]:
    return [f"step-{step}.safetensors" for step in steps]


def train_save_and_resume(path) -> None:
    """Trains with all that writes, and compares with a training that was not interrupted."""
    url, monitored = str(path), {"keep": 1, "monitor": "loss", "mode": "max"}

    def written():
        return [
            callbacks.CSVLogger(f"{url}/log.csv"),
            callbacks.Checkpoint(f"{url}/ckpt", **monitored),
            callbacks.TensorBoard(f"{url}/board"),
            callbacks.Profiler(f"{url}/profile", (0, 2)),
        ]

    first, whole = new_trainer(), new_trainer()
    first.fit(DATA, 3, callbacks=written(), **FIT)
    assert names_in(path / "ckpt") == saved(3, 9)  # the worst and the last
    assert mirror.load_checkpoint(f"{url}/ckpt", "best").step == 3
    again = new_trainer()
    again.restore(f"{url}/ckpt")
    history = again.fit(DATA, 4, callbacks=written(), **FIT)
    assert history["loss"] == whole.fit(DATA, 4, **FIT)["loss"]
    assert all(map(np.array_equal, weights(again), weights(whole)))
    assert names_in(path / "ckpt") == saved(12, 3)
    rows = list(csv.reader(io.StringIO((path / "log.csv").read_text())))
    assert [row[0] for row in rows] == ["epoch", "1", "2", "3", "4"]
    assert [float(row[1]) for row in rows[1:]] == history["loss"]
    logs = names_in(path / "board")
    assert len(logs) == 2
    assert all(name.startswith("events.out.tfevents") for name in logs)
    assert any(name.endswith(".xplane.pb") for name in map(str, path.glob("profile/**/*")))
    again.save(f"{url}/ckpt/")
    assert names_in(path / "ckpt") == saved(12, 3)
    again.export(f"{url}/model.jax", X[:1], lambda model, x: model(x))
    program = jax.export.deserialize(bytearray((path / "model.jax").read_bytes()))
    expected = again.predict(X, lambda model, x: model(x), batch_size=4)
    np.testing.assert_allclose(program.call(X), expected, rtol=1e-5)


def test_training_is_written_to_and_resumed_from_memory(run):
    train_save_and_resume(run)


def test_paths_of_universal_pathlib_are_paths(run):
    callbacks_of = [callbacks.Checkpoint(run / "ckpt"), callbacks.CSVLogger(run / "log.csv")]
    trainer = new_trainer()
    trainer.fit(DATA, callbacks=callbacks_of, **FIT)
    new_trainer().restore(run / "ckpt")
    assert mirror.load_checkpoint(run / "ckpt").step == 3
    assert (run / "log.csv").exists()


@pytest.mark.dev("moto", "s3fs", "flask")
@pytest.mark.filterwarnings("ignore")  # of botocore, moto and Flask
def test_training_is_written_to_and_resumed_from_s3(s3):
    train_save_and_resume(s3)
    large = {"w": np.arange(15_000_000, dtype=np.float32)}  # 60 MB: more than one part
    with CheckpointStore(f"{s3}/large") as store:
        store.save(1, large, {})
    assert np.array_equal(mirror.load_checkpoint(f"{s3}/large").arrays["w"], large["w"])


@pytest.mark.dev("moto", "s3fs", "flask")
@pytest.mark.filterwarnings("ignore")
def test_buckets_that_do_not_exist_are_named(s3):
    with raises(OSError, names="s3://nothing/run", values="bucket"):
        new_trainer().save("s3://nothing/run")
    with raises(FileNotFoundError, names="s3://nothing/run"):
        mirror.load_checkpoint("s3://nothing/run")


def test_checkpoint_appears_whole_and_replaces_an_earlier_one(run, monkeypatch):
    put, during = MemoryFileSystem.pipe_file, []

    def pipe_file(fs, path, value, **options):
        during.append((path.rpartition("/")[2], names_in(run)))
        put(fs, path, value, **options)

    with CheckpointStore(str(run)) as store:
        store.save(1, {"w": np.zeros(3)}, {})
        store.wait()
        monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
        store.save(2, {"w": np.zeros(3)}, {})
        store.wait()
        store.save(2, {"w": np.ones(3)}, {})
    assert during == [(*saved(2), saved(1)), (*saved(2), saved(1, 2))]
    assert mirror.load_checkpoint(str(run)).arrays["w"].tolist() == [1, 1, 1]


class Fails:
    """Lets writes of some checkpoints fail."""

    def __init__(self, monkeypatch, *names):
        self.names, self.put = names, MemoryFileSystem.pipe_file
        monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda *a, **k: self.pipe_file(*a, **k))

    def pipe_file(self, fs, path, value, **options):
        if path.rpartition("/")[2] in self.names:
            raise RuntimeError("the connection was lost")
        self.put(fs, path, value, **options)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_training_continues_without_a_checkpoint_that_fails(run, monkeypatch, asynchronous):
    Fails(monkeypatch, *saved(6))
    trainer, straight = new_trainer(), new_trainer()
    checkpoint = callbacks.Checkpoint(str(run), keep=None, asynchronous=asynchronous)
    with pytest.warns(UserWarning, match="Training continues") as caught:
        trainer.fit(DATA, 4, callbacks=checkpoint, **FIT)
    (warning,) = caught
    values = ["step 6", "the connection was lost", "intact: 3", "Training continues"]
    assert_message(warning.message, names=str(run), values=values)
    assert warning.filename == __file__
    assert names_in(run) == sorted(saved(3, 9, 12))
    straight.fit(DATA, 4, **FIT)
    assert all(map(np.array_equal, weights(trainer), weights(straight)))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_last_checkpoint_that_fails_is_an_error(run, monkeypatch, asynchronous):
    Fails(monkeypatch, *saved(6))
    checkpoint = callbacks.Checkpoint(str(run), asynchronous=asynchronous)
    with raises(OSError, names=str(run), values=["step 6", "the connection was lost", "intact: 3"]):
        new_trainer().fit(DATA, 2, callbacks=checkpoint, **FIT)
    again = new_trainer()
    again.restore(str(run))
    assert names_in(run) == saved(3)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_checkpoint_of_another_training_ends_this_one(run, asynchronous):
    """Otherwise each step would warn, because no store locks a directory."""

    class Other(callbacks.Callback):
        def on_epoch_end(self, fit, logs):
            if fit.position.step == 3:
                new_trainer().fit(DATA, 2, callbacks=callbacks.Checkpoint(str(run)), **FIT)

    checkpoint = callbacks.Checkpoint(str(run), asynchronous=asynchronous)
    with raises(OSError, names=str(run), values=["step 3", "another training", "intact: 3, 6"]):
        new_trainer().fit(DATA, 4, callbacks=[checkpoint, Other()], **FIT)
    assert names_in(run) == saved(3, 6)


def test_training_continues_without_a_log_that_fails(run, monkeypatch):
    failing = Fails(monkeypatch, "log.csv")
    with pytest.warns(UserWarning, match="log.csv: the connection was lost. Training continues"):
        new_trainer().fit(DATA, 2, callbacks=callbacks.CSVLogger(f"{run}/log.csv"), **FIT)
    failing.names = ()
    new_trainer().fit(DATA, 2, callbacks=callbacks.CSVLogger(f"{run}/log.csv"), **FIT)
    assert names_in(run) == ["log.csv"]


def test_store_that_fails_at_any_moment_of_reading_is_named(run, monkeypatch):
    """The model is unchanged, and no older checkpoint takes the place of the last one."""
    new_trainer().fit(DATA, 3, callbacks=callbacks.Checkpoint(str(run)), **FIT)
    calls, most = [0], [0]

    def failing(method):
        def call(fs, *args, **options):
            calls[0] += 1
            if calls[0] == most[0]:
                raise TimeoutError("the connection was lost")
            return method(fs, *args, **options)

        return call

    for name in ("ls", "info", "_open"):
        monkeypatch.setattr(MemoryFileSystem, name, failing(getattr(MemoryFileSystem, name)))
    failures, unchanged = [], []
    for number in range(1, 20):
        trainer, calls[0], most[0] = new_trainer(), 0, number
        before = weights(trainer)
        try:
            trainer.restore(str(run))
        except (OSError, ValueError) as error:
            failures.append(str(error))
            unchanged.append(all(map(np.array_equal, weights(trainer), before)))
        else:
            assert trainer.fit(DATA, 4, **FIT).epochs == [0, 1, 2, 3]
    assert len(failures) > 2
    assert all(str(run) in failure for failure in failures)
    assert all(unchanged)


def test_program_that_a_store_does_not_take_is_named(run, monkeypatch):
    Fails(monkeypatch, "model.jax")
    with raises(OSError, names=str(run), values="the connection was lost"):
        new_trainer().export(run / "model.jax", X[:1], lambda model, x: model(x))


def test_stores_that_cannot_be_reached_are_named(run, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no route to the host")

    with CheckpointStore(str(run)) as store:
        store.save(1, {"w": np.zeros(3)}, {})
        store.wait()
        for method in ("pipe_file", "ls"):
            monkeypatch.setattr(MemoryFileSystem, method, fails)
        with raises(OSError, names=str(run), values=["step 2", "no route to the host", "intact"]):
            store.save(2, {"w": np.zeros(3)}, {})
            store.wait()
    with raises(OSError, names=str(run), values="no route to the host"):
        mirror.load_checkpoint(str(run))
    with raises(OSError, names=str(run), values="no route to the host"):
        new_trainer().fit(DATA, callbacks=callbacks.Checkpoint(str(run)), **FIT)


WRITERS = {
    "checkpoint": lambda path: new_trainer().save(path),
    "load": mirror.load_checkpoint,
    "CSV": callbacks.CSVLogger,
    "TensorBoard": callbacks.TensorBoard,
    "profile": callbacks.Profiler,
    "export": lambda path: new_trainer().export(path, X[:1], lambda model, x: model(x)),
}


def test_paths_are_rejected_in_one_sentence(subtests, monkeypatch):
    for name, write in WRITERS.items():
        for path in ["ftp://bucket/run", "s3://", "", "a\0b", 3]:
            with (
                subtests.test(msg=f"{name} {path!r}"),
                raises(ValueError, values=repr(path), fix="gs://"),
            ):
                write(path)
        with subtests.test(msg=f"{name} pathlib"), raises(ValueError, values="s3:/bucket"):
            write(pathlib.Path("s3://bucket/run"))
        for package in ("gcsfs", "upath"):
            with subtests.test(msg=f"{name} without {package}"), monkeypatch.context() as patch:
                patch.setitem(sys.modules, package, None)
                if package == "upath" and not is_installed("gcsfs"):
                    patch.setitem(sys.modules, "gcsfs", upath)
                with raises(ModuleNotFoundError, names=package, fix='pip install ".[stores]"'):
                    write("gs://bucket/run")
