"""`Tracker`: configuration, metrics, files and resumed runs, in the libraries themselves."""

import contextlib
import io
import json
import os
import pathlib
import struct
import sys
import types
from collections import defaultdict

import numpy as np
import optax
import pytest
import tensorboardX  # noqa: F401 - sets CRC32C_SW_MODE
from flax import nnx

import mirror
from mirror import callbacks
from tests.support.messages import assert_message, raises
from tests.support.packages import optional
from tests.support.tensorboard_events import events
from tests.support.waiting import wait_until

optional("wandb")  # sets environment variables
X = np.random.RandomState(0).randn(12, 3).astype("float32")
FIT = {"batch_size": 4, "progress": False}  # 3 steps per epoch
NAMES = {"loss", "step_loss"}
CONFIG = {"rate": 0.1, "layers": 2}


def new_trainer() -> mirror.Trainer:
    with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
        return mirror.Trainer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), "mse")


def fit(trainer, epochs, *calls, **options) -> mirror.History:
    return trainer.fit((X, X[:, :1]), epochs, callbacks=calls, **FIT, **options)


def records_of(file):
    """Yields the records of an offline run, whose file has the format of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = file.read_bytes(), 7, b""  # after the header
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # the rest of a block is empty
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        if place + 7 + size > len(data):
            return  # it is being written
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def of_wandb(tmp_path, known) -> tuple:
    config, metrics, files = {}, defaultdict(dict), set()
    for file in sorted(tmp_path.glob(f"**/run-{known}.wandb")):
        # Its service writes the file, perhaps after `finish`.
        wait_until(lambda: any(record.HasField("exit") for record in records_of(file)))
        for record in records_of(file):
            for item in record.run.config.update:
                config[item.key] = json.loads(item.value_json)
            items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            for name in items.keys() & NAMES:
                metrics[name][int(items["_step"])] = json.loads(items[name])
            files |= {record.request.log_artifact.artifact.name, record.artifact.name} - {""}
    return {name: config[name] for name in CONFIG}, dict(metrics), files


def of_mlflow(tmp_path, known) -> tuple:
    import mlflow

    client = mlflow.MlflowClient()
    run = client.get_run(known)
    assert run.info.status == "FINISHED"
    histories = {name: client.get_metric_history(known, name) for name in run.data.metrics}
    metrics = {name: {m.step: m.value for m in each} for name, each in histories.items()}
    config = {name: json.loads(value) for name, value in run.data.params.items()}
    return config, metrics, {file.path for file in client.list_artifacts(known)}


def of_trackio(tmp_path, known) -> tuple:
    from trackio.sqlite_storage import SQLiteStorage

    metrics = defaultdict(dict)
    for log in SQLiteStorage.get_logs("digits", known):
        for name in log.keys() & NAMES:
            metrics[name][log["step"]] = log[name]
    config = SQLiteStorage.get_run_config("digits", known)
    files = {artifact["name"] for artifact in SQLiteStorage.list_artifacts("digits")}
    return {name: config[name] for name in CONFIG}, dict(metrics), files


def of_aim(tmp_path, known) -> tuple:
    import aim

    run = aim.Run(known, repo=str(tmp_path), system_tracking_interval=None)
    metrics = {}
    for metric in run.metrics():
        steps, (values, *_) = metric.data.items_list()
        metrics[metric.name] = dict(zip(steps, values, strict=True))
    config, files = run["config"], {name.partition("/")[0] for name in run.artifacts}
    run.close()
    return config, metrics, files


OPTIONS = {
    "wandb": lambda tmp_path: {"project": "digits", "mode": "offline", "dir": os.getcwd()},
    "mlflow": lambda tmp_path: {"run_name": "first"},
    "trackio": lambda tmp_path: {"project": "digits", "embed": False},
    "aim": lambda tmp_path: {"repo": str(tmp_path), "system_tracking_interval": None},
}
READ = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio, "aim": of_aim}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns a folder in which the libraries store everything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlflow")
    environment = dict(os.environ)
    yield tmp_path
    for name in os.environ.keys() - environment.keys():  # those that the libraries set
        del os.environ[name]
    os.environ.update(environment)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.dev(n), id=n) for n in READ])
def test_run_has_configuration_metrics_and_files_also_of_a_resumed_training(
    name, folder, monkeypatch
):
    if name == "trackio":  # reads the variable when it is imported
        import trackio.sqlite_storage
        import trackio.utils

        monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", folder / "trackio")
        monkeypatch.setattr(trackio.sqlite_storage, "TRACKIO_DIR", folder / "trackio")

    def tracker() -> callbacks.Tracker:
        return callbacks.Tracker(name, config=CONFIG, every_steps=2, **OPTIONS[name](folder))

    first = tracker()
    (folder / "again").mkdir()
    fit(new_trainer(), 2, first, callbacks.Checkpoint("ckpt"))
    again = new_trainer()
    again.restore("ckpt")
    monkeypatch.chdir(folder / "again")  # two offline runs of Weights & Biases in one second
    resumed = tracker()
    history = fit(again, 3, resumed)
    assert resumed.to_dict() == first.to_dict()
    again.export("model.jax", X[:1])
    resumed.log_artifact("model.jax", "../ckpt")
    config, metrics, files = READ[name](folder, first.to_dict()["run"])
    assert config == CONFIG
    assert metrics["loss"] == dict(zip([3, 6, 9], history["loss"], strict=True))
    assert metrics["step_loss"].keys() == {2, 4, 6, 8}
    assert files == {"model.jax", "ckpt"}


UNREACHABLE = {"wandb": "No API key configured", "mlflow": "API request to http://127.0.0.1:9"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.dev(n), id=n) for n in UNREACHABLE]
)
def test_training_continues_without_login_or_network(name, folder, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # nobody can be asked
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = callbacks.Tracker(name)
    with pytest.warns(UserWarning, match=f"{name} failed: .*{UNREACHABLE[name]}"):
        assert len(fit(new_trainer(), 2, tracker)["loss"]) == 2
    assert tracker.to_dict() == {}


def test_tensorboard_is_a_tracker_without_files(tmp_path):
    tracker = callbacks.Tracker("tensorboard", config=CONFIG, logdir=str(tmp_path))
    history = fit(new_trainer(), 2, tracker)
    (step, tag, text), *scalars = events(tmp_path)
    assert (step, tag) == (0, "config/text_summary")
    assert str(CONFIG) in text
    assert [(step, tag) for step, tag, _ in scalars] == [(3, "loss"), (6, "loss")]
    assert np.array_equal([value for *_, value in scalars], np.float32(history["loss"]))
    with pytest.warns(UserWarning, match="tensorboard failed: TensorBoard does not store files"):
        tracker.log_artifact(tmp_path)


class Library(types.ModuleType):
    """A tracker without network, which has the functions of Weights & Biases."""

    def __init__(self, fails: set[str]) -> None:
        super().__init__("wandb")
        self.fails, self.calls, self.id = fails, [], "r1"

    def note(self, call, *arguments) -> None:
        self.calls.append((call, *arguments))
        if call in self.fails:
            raise ConnectionError("no route\n to the host")

    def init(self, project=None, config=None, id=None, resume=None) -> "Library":
        self.note("init", project, config, id, resume)
        return self

    def log(self, metrics, step) -> None:
        self.note("log", step)

    def log_artifact(self, path, name, type) -> None:
        self.note("file", pathlib.Path(path).read_text(), name)

    def finish(self, exit_code) -> None:
        self.note("finish", exit_code)


FAULTS = {  # what fails, and the calls of the library with two epochs and a file
    "": ["init", "log", "log", "finish", "init", "file", "finish"],
    "init": ["init"],
    "log": ["init", "log", "finish", "init", "file", "finish"],
    "file": ["init", "log", "log", "finish", "init", "file", "finish"],
    "finish": ["init", "log", "log", "finish", "finish", "init", "file", "finish", "finish"],
}


def test_training_continues_without_a_tracker_that_fails(subtests, tmp_path, monkeypatch):
    (tmp_path / "a").write_text("weights")
    expected = fit(new_trainer(), 2)["loss"]
    for fault, calls in FAULTS.items():
        with subtests.test(msg=fault):
            library = Library({fault})
            monkeypatch.setitem(sys.modules, "wandb", library)
            tracker = callbacks.Tracker("wandb", project="p")
            with pytest.warns() if fault else contextlib.nullcontext() as caught:
                assert fit(new_trainer(), 2, tracker)["loss"] == expected
                if fault != "init":
                    tracker.log_artifact(tmp_path / "a")
            assert [name for name, *_ in library.calls] == calls
            for warning in caught or ():
                values = ["no route to the host", "Training continues"]
                assert_message(warning.message, names="wandb", values=values)
                assert warning.filename == __file__


def test_run_is_continued_only_by_a_training_that_resumes(tmp_path, monkeypatch):
    library = Library(set())
    monkeypatch.setitem(sys.modules, "wandb", library)
    tracker, trainer = callbacks.Tracker("wandb", project="p", config=CONFIG), new_trainer()

    class Stops(callbacks.Callback):
        def on_step(self, fit):
            if fit.position.step == 4:
                raise LookupError

    with pytest.raises(LookupError):
        fit(trainer, 2, tracker, Stops())
    assert library.calls[-1] == ("finish", 1)
    fit(trainer, 2, tracker)  # resumes
    fit(trainer, 2, tracker)  # another training
    begun = [call for call in library.calls if call[0] == "init"]
    new, same = ("init", "p", CONFIG, None, None), ("init", "p", CONFIG, "r1", "allow")
    assert begun == [new, same, new]
    assert library.calls[-1] == ("finish", 0)


def test_bad_arguments_are_named(tmp_path, monkeypatch):
    with raises(ValueError, names="library", values="'wandv'", fix="'wandb'"):
        callbacks.Tracker("wandv")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", Library(set()))
        with raises(TypeError, names="wandb.init", values="'projectname'"):
            callbacks.Tracker("wandb", projectname="digits")
    with raises(TypeError, names="every_steps"):
        callbacks.Tracker("tensorboard", logdir=str(tmp_path), every_steps=1.5)
    with raises(TypeError, names="config", values="[1]"):
        callbacks.Tracker("tensorboard", logdir=str(tmp_path), config=[1])
    monkeypatch.setitem(sys.modules, "aim", None)
    with raises(ModuleNotFoundError, names="aim", fix="pip install aim"):
        callbacks.Tracker("aim")
    tracker = callbacks.Tracker("tensorboard", logdir=str(tmp_path))
    with raises(FileNotFoundError, names="missing"):
        tracker.log_artifact(tmp_path / "missing")
    with raises(RuntimeError, names="tensorboard", fix="callbacks=tracker"):
        tracker.log_artifact(tmp_path)
