"""Callbacks: the order of their hooks, their effects and their errors."""

import csv
import functools
import itertools
import math
import re
import sys
import threading

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import callbacks
from tests.support import inside
from tests.support.checkpoints import steps_in
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_slow
from tests.support.tensorboard_events import events

ROWS, SIZE, STEPS = 40, 4, 10  # examples, in batches, of an epoch
BEGINNING = "fit_begin", "epoch_begin", "step"
HOOKS = [*BEGINNING, "metrics", "epoch_end", "fit_end"]


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(x)[:, 0]


def loss_fn(model, batch):
    error = model(batch["x"]) - batch["y"]
    return error**2, {"error": abs(error)}


def arrays() -> dict[str, np.ndarray]:
    x = np.random.RandomState(0).randn(ROWS, 3).astype(np.float32)
    return {"x": x, "y": x.sum(1)}


DATA = mirror.data.from_arrays(arrays(), SIZE)


def a_trainer(n: int, tx=None, **options) -> mirror.Trainer:
    with cpu_strategy(n).scope():
        return mirror.Trainer(Model(nnx.Rngs(0)), tx or optax.sgd(0.05), loss_fn, **options)


@functools.cache
def compiled(n: int, **options) -> tuple[mirror.Trainer, dict]:
    trainer = a_trainer(n, **options)
    return trainer, jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(trainer.model)))


def new_trainer(n: int = 2, **options) -> mirror.Trainer:
    """Returns an untrained trainer, which is compiled once for all tests."""
    trainer, weights = compiled(n, **options)
    nnx.update(trainer.model, weights)
    return trainer


def fit(trainer, epochs=2, *others, anew=True, data=DATA, **options) -> mirror.History:
    """Fits from the start, or from the current position."""
    begin = {"initial_epoch": 0} if anew else {}
    return trainer.fit(data, epochs, callbacks=others, progress=False, **begin, **options)


class Recorder(callbacks.Callback):
    """Records every call, and checks that it is on the main thread."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.logs: list[dict] = []

    def note(self, hook, number, logs=None) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert inside.open_scope() is None
        if logs is not None:
            assert {type(value) for value in logs.values()} == {float}
            self.logs.append(dict(logs))
        self.calls.append((hook, number))

    def on_fit_begin(self, fit):
        self.note("fit_begin", fit.position.step)

    def on_epoch_begin(self, fit):
        self.note("epoch_begin", fit.position.epoch)

    def on_step(self, fit):
        self.note("step", fit.position.epoch_step)

    def on_metrics(self, fit, step, logs):
        self.note("metrics", step - (fit.position.step - fit.position.epoch_step), logs)

    def on_epoch_end(self, fit, logs):
        self.note("epoch_end", fit.position.epoch, logs)

    def on_fit_end(self, fit):
        self.note("fit_end", 0)

    @property
    def hooks(self) -> list[str]:
        return [hook for hook, _ in self.calls]


class Says(callbacks.Callback):
    """Adds numbers of the test to the metrics of the epochs."""

    def __init__(self, *values, name="val_loss"):
        self.values, self.name = values, name

    def on_epoch_end(self, fit, logs):
        logs[self.name] = float(self.values[fit.history.epochs[-1]])


class Raises(callbacks.Callback):
    """Raises once, in one of the hooks."""

    def __init__(self, hook: str, at_step: int = 0):
        self.left, self.at_step = 1, at_step
        setattr(self, f"on_{hook}", self.fail)

    def fail(self, fit, *_):
        if self.left and fit.position.step >= self.at_step:
            self.left -= 1
            raise LookupError("of the test")


# Hooks


def expected_calls(epochs: int, k: int) -> list[tuple]:
    """The order that `Callback` promises: metrics come 8 launches later, or at the epoch's end."""
    ends = [min(first + k, STEPS) for first in range(0, STEPS, k)]
    calls: list[tuple] = []
    for epoch in range(epochs):
        calls.append(("epoch_begin", epoch))
        for i, end in enumerate(ends):
            calls.append(("step", end))
            calls += [("metrics", ends[i - 8])] if i >= 8 else []
        calls += [("metrics", end) for end in ends[-8:]]
        calls.append(("epoch_end", epoch + 1))
    return calls


@pytest.mark.parametrize("rows", mostly_slow([1, 3], 3))
def test_hooks_run_once_on_the_host_for_any_number_of_replicas(subtests, rows):
    for k in rows:
        with subtests.test(msg=str(k)):
            recorders = {n: Recorder() for n in (1, 8)}
            for n, recorder in recorders.items():
                history = fit(new_trainer(n, steps_per_execution=k), 2, recorder)
                begin = ("fit_begin", recorder.calls[0][1])
                assert recorder.calls == [begin, *expected_calls(2, k), ("fit_end", 0)]
                ends = [recorder.logs[i] for i, (hook, _) in enumerate(with_logs(recorder)) if hook]
                assert ends == [{name: history[name][i] for name in history} for i in range(2)]
            one, eight = recorders[1].logs, recorders[8].logs
            assert [list(logs) for logs in one] == [list(logs) for logs in eight]
            flat = [[x for logs in found for x in logs.values()] for found in (one, eight)]
            np.testing.assert_allclose(*flat, rtol=1e-5)


def with_logs(recorder) -> list[tuple]:
    """Whether each call with logs was at the end of an epoch."""
    return [(hook == "epoch_end", n) for hook, n in recorder.calls if hook in HOOKS[3:5]]


def test_history_contains_metrics_added_by_a_callback():
    history = fit(new_trainer(), 2, Says(3, 4, name="mine"))
    assert history["mine"] == [3, 4]
    assert list(history) == ["loss", "error", "mine"]


def test_fit_reraises_callback_errors(subtests):
    for hook in HOOKS:
        with subtests.test(msg=hook):
            before, after, raiser = Recorder(), Recorder(), Raises(hook)
            trainer = new_trainer()
            with pytest.raises(LookupError, match="of the test"):
                fit(trainer, 2, before, raiser, after)
            for recorder in (before, after):
                began = recorder is before or hook != "fit_begin"
                assert recorder.hooks.count("fit_end") == recorder.hooks.count("fit_begin") == began
                assert recorder.hooks[-1:] == ["fit_end"] * began
            history = fit(trainer, 2, before, raiser, after, anew=False)
            assert history.epochs == [0, 1]
            assert before.hooks.count("fit_end") == 2


def wider(at: int):
    """Batches of which one has other features."""
    for number, batch in enumerate(DATA):
        yield batch if number != at else {**batch, "x": np.ones((SIZE, 7), np.float32)}


def broken(at: int):
    for number, batch in enumerate(DATA):
        if number == at:
            raise LookupError("of the source")
        yield batch


def test_callbacks_end_after_an_error_in_a_step_or_the_data(subtests):
    for source in [wider, broken]:
        with subtests.test(msg=source.__name__):
            recorder, trainer = Recorder(), new_trainer()
            with pytest.raises(Exception, match=r"of the source|shape|dot_general"):
                fit(trainer, 2, recorder, data=source(5))
            assert recorder.hooks[-1] == "fit_end"
            assert recorder.hooks.count("fit_end") == 1
            assert fit(trainer, 2).epochs == [0, 1]


def test_stop_ends_training_at_any_hook():
    class Stops(callbacks.Callback):
        def on_step(self, fit):
            if fit.position.epoch_step == 4:
                fit.stop("enough")
                fit.stop("more than enough")

        def on_fit_end(self, fit):
            assert fit.stopped == "enough"

    recorder = Recorder()
    assert fit(new_trainer(), 2, Stops(), recorder).epochs == []
    assert recorder.hooks == [*BEGINNING[:2], *["step"] * 4, *["metrics"] * 4, "fit_end"]

    class Refuses(callbacks.Callback):
        def on_fit_begin(self, fit):
            fit.stop("no")

    recorder = Recorder()
    assert fit(new_trainer(), 2, Refuses(), recorder).epochs == []
    assert recorder.hooks == ["fit_begin", "fit_end"]


TWICE = Recorder()
NO_CALLBACKS: dict[str, tuple] = {
    "class": ([Recorder], TypeError, {"names": "Recorder", "fix": "Recorder(...)"}),
    "function": ([print], TypeError, {"values": repr(print), "fix": "mirror.callbacks.Callback"}),
    "twice": ([TWICE, TWICE], ValueError, {"names": "callbacks"}),
}


def test_fit_rejects_non_callbacks(subtests):
    for case, (given, error, said) in NO_CALLBACKS.items():
        with subtests.test(msg=case), raises(error, **said):
            fit(new_trainer(), 1, *given)


MODES = ["'min'", "'max'"]
BAD_ARGUMENTS = {  # the call, the name of the parameter, and values in the message
    "every_epochs": (lambda d: callbacks.Checkpoint(d, every_epochs=-1), "every_epochs", [-1]),
    "every_steps": (lambda d: callbacks.Checkpoint(d, every_steps=-1), "every_steps", [-1]),
    "keep": (lambda d: callbacks.Checkpoint(d, keep=0), "keep", [0, None]),
    "mode": (lambda d: callbacks.Checkpoint(d, mode="low"), "mode", ["'low'", *MODES]),
    "stopping": (lambda d: callbacks.EarlyStopping(mode=None), "mode", [None, *MODES]),
    "patience": (lambda d: callbacks.EarlyStopping(patience=-1), "patience", [-1]),
    "min_delta": (lambda d: callbacks.EarlyStopping(min_delta=-1), "min_delta", [-1]),
    "NaN": (lambda d: callbacks.EarlyStopping(min_delta=math.nan), "min_delta", ["nan"]),
    "TensorBoard": (lambda d: callbacks.TensorBoard(d, every_steps=-2), "every_steps", [-2]),
    "Profiler": (lambda d: callbacks.Profiler(d, (5, 5)), "steps", [(5, 5)]),
}


def test_callbacks_reject_bad_arguments(subtests, tmp_path_factory):
    for case, (make, name, values) in BAD_ARGUMENTS.items():
        with subtests.test(msg=case):
            tmp_path = tmp_path_factory.mktemp("row")
            with raises(ValueError, names=name, values=values):
                make(tmp_path)


def test_min_delta_must_be_a_number():
    with raises(TypeError, names="min_delta", values="'a'"):
        callbacks.EarlyStopping(min_delta="a")


MONITORS = {
    "EarlyStopping": lambda d, name: callbacks.EarlyStopping(name),
    "Checkpoint": lambda d, name: callbacks.Checkpoint(d, monitor=name),
    "NaNGuard": lambda d, name: callbacks.NaNGuard(name),
}


def test_validation_metrics_without_validation_are_rejected_before_the_first_step(
    subtests, tmp_path_factory
):
    for name in MONITORS:
        with subtests.test(msg=name):
            tmp_path = tmp_path_factory.mktemp("row")
            trainer = new_trainer()
            before = trainer._position.step
            fix = "Monitor 'loss'" if name == "NaNGuard" else "validation_data=..."
            with raises(ValueError, names=[name, "'val_loss'", "'loss'"], fix=fix) as caught:
                fit(trainer, 1, MONITORS[name](tmp_path, "val_loss"))
            assert not hasattr(caught.value, "__notes__"), "the callback cannot end"
            assert trainer._position.step == before


def test_unknown_metrics_are_rejected_after_the_first_step(subtests, tmp_path_factory):
    """With the nearest name, and without waiting for its numbers."""
    for name in MONITORS:
        with subtests.test(msg=name):
            tmp_path = tmp_path_factory.mktemp("row")
            trainer = new_trainer()
            before = trainer._position.step
            names = [name, "'errors'", "'loss'", "'error'"]
            with raises(ValueError, names=names, fix="Did you mean 'error'?"):
                fit(trainer, 9, MONITORS[name](tmp_path, "errors"))
            assert trainer._position.step == before + 1


@pytest.mark.parametrize("rows", mostly_slow(["EarlyStopping", "Checkpoint"], "Checkpoint"))
def test_other_callbacks_may_add_the_monitored_metric(subtests, tmp_path_factory, rows):
    for name in rows:
        with subtests.test(msg=name):
            tmp_path = tmp_path_factory.mktemp("row")
            check_other_callbacks_may_add_the_monitored_metric(tmp_path, name)


def check_other_callbacks_may_add_the_monitored_metric(tmp_path, name):
    class F1(callbacks.Callback):
        def on_epoch_end(self, fit, logs):
            logs["val_f1"] = logs["f1"] = 0.5

    for metric in ("f1", "val_f1"):
        monitor = MONITORS[name](tmp_path / metric, metric)
        assert fit(new_trainer(), 1, F1(), monitor)["f1"] == [0.5]
    rate = callbacks.LearningRate(optax.constant_schedule(0.5))
    monitor = MONITORS[name](tmp_path / "rate", "learning_rate")
    assert fit(new_trainer(), 1, rate, monitor)["learning_rate"] == [0.5]


# Packages


def test_callbacks_name_missing_packages(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    fix = 'pip install ".[train]"'
    with raises(ModuleNotFoundError, names="tensorboardX", fix=fix):
        callbacks.TensorBoard(tmp_path)


def test_import_error_inside_a_package_is_not_masked(tmp_path, monkeypatch):
    (tmp_path / "tensorboardX.py").write_text("import another_of_the_test")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorboardX")
    with pytest.raises(ModuleNotFoundError, match="No module named 'another_of_the_test'"):
        callbacks.TensorBoard(tmp_path)


# Checkpoints, in epochs of 10 steps

CHECKPOINTS: dict[str, tuple] = {  # options, steps in a launch, the steps that are left
    "default": ({}, 1, [20, 30, 40]),
    "all": ({"keep": None}, 1, [10, 20, 30, 40]),
    "third": ({"every_epochs": 3}, 1, [30, 40]),
    "steps": ({"every_epochs": 0, "every_steps": 7, "keep": None}, 1, [7, 14, 21, 28, 35]),
    "launches": ({"every_epochs": 0, "every_steps": 7, "keep": None}, 3, [9, 16, 23, 30, 39]),
    "both": ({"every_steps": 15, "keep": None}, 1, [10, 20, 30, 40]),
    "more": ({"every_steps": 6, "keep": None}, 1, [6, 10, 16, 20, 26, 30, 36, 40]),
    "none": ({"every_epochs": 0}, 1, []),
    "best": ({"keep": 1, "monitor": "val_loss"}, 1, [20, 40]),
    "most": ({"keep": 1, "monitor": "val_loss", "mode": "max"}, 1, [10, 40]),
}


SAVED = [*((case, True) for case in CHECKPOINTS), ("more", False), ("best", False)]


@pytest.mark.parametrize("rows", mostly_slow(SAVED, ("default", True), ("best", False)))
def test_checkpoint_keeps_the_last_and_the_best(subtests, tmp_path_factory, rows):
    for case, asynchronous in rows:
        with subtests.test(msg=f"{case}, {'' if asynchronous else 'not '}asynchronous"):
            options, k, left = CHECKPOINTS[case]
            tmp_path = tmp_path_factory.mktemp("row")
            trainer = new_trainer(steps_per_execution=k)
            begin = trainer._position.step
            checkpoint = callbacks.Checkpoint(tmp_path, asynchronous=asynchronous, **options)
            fit(trainer, 4, checkpoint, Says(3, 1, 2, 2))  # the order does not matter
            assert [step - begin for step in steps_in(tmp_path)] == left
            if "monitor" in options:
                assert mirror.load_checkpoint(tmp_path, "best").step == begin + left[0]


def test_checkpoint_contains_metrics_of_later_callbacks(tmp_path):
    stopping = callbacks.EarlyStopping(patience=2)
    others = callbacks.Checkpoint(tmp_path, every_epochs=5, keep=None), Says(1, 2, 2), stopping
    history = fit(new_trainer(), 9, *others)
    found = mirror.load_checkpoint(tmp_path)
    assert found.position["epoch"] == 3  # the last one, because of the next callback
    assert found.position["callbacks"]["EarlyStopping(val_loss) 1"] == stopping.to_dict()
    assert found.position["history"]["metrics"]["val_loss"] == history["val_loss"] == [1, 2, 2]


def test_checkpoint_reports_write_errors(tmp_path):
    (tmp_path / "file").touch()
    recorder = Recorder()
    with raises(OSError, values=tmp_path / "file") as caught:
        fit(new_trainer(), 1, recorder, callbacks.Checkpoint(tmp_path / "file"))
    assert not hasattr(caught.value, "__notes__"), "the callback cannot end"
    assert recorder.hooks == ["fit_begin", "fit_end"]


# Ending early

nan = float("nan")
STOPPING: dict[str, tuple] = {  # metrics of the epochs, options, number of epochs, best one
    "better": ([4, 3, 2, 1], {"patience": 1}, 4, 3),
    "at once": ([2, 3, 1, 1], {}, 2, 0),
    "0 is 1": ([2, 3, 1, 1], {"patience": 1}, 2, 0),
    "equal does not improve": ([2, 2, 1, 1], {"patience": 1}, 2, 0),
    "in a row": ([5, 6, 4, 6, 6, 1], {"patience": 2}, 5, 2),
    "better than the best": ([5, 9, 8, 7, 1], {"patience": 3}, 4, 0),
    "min_delta": ([5, 4.5, 4, 4], {"patience": 2, "min_delta": 0.5}, 4, 2),
    "max": ([1, 2, 3, 1, 1, 9], {"patience": 2, "mode": "max"}, 5, 2),
    "max and min_delta": ([1, 3, 4, 5], {"patience": 1, "mode": "max", "min_delta": 1}, 3, 1),
    "NaN does not improve": ([1, nan, nan, 0], {"patience": 2}, 3, 0),
    "NaN at first": ([nan, 5, 6, 6, 6], {"patience": 2}, 4, 1),
    "NaN only": ([nan, nan, nan, nan], {"patience": 3}, 3, None),
}


def test_early_stopping_stops_without_improvement(subtests):
    for case, (values, options, epochs, best) in STOPPING.items():
        with subtests.test(msg=case):
            stopping = callbacks.EarlyStopping(**options)
            for _ in range(2):  # the second training starts over
                history = fit(new_trainer(), len(values), Says(*values), stopping)
                assert len(history.epochs) == epochs
                assert stopping.best_epoch == best
                assert stopping.best == (None if best is None else values[best])


def test_early_stopping_forgets_its_best_in_a_new_training():
    stopping = callbacks.EarlyStopping(patience=1)
    others = Says(1, 2, 5, 4), stopping
    fit(new_trainer(), 4, *others)
    options = {"callbacks": others, "progress": False, "initial_epoch": 2}
    assert new_trainer().fit(DATA, 4, **options).epochs == [2, 3]


def test_early_stopping_does_not_depend_on_the_number_of_replicas():
    ends = set()
    for n in (1, 2, 8):
        stopping = callbacks.EarlyStopping("loss", patience=2, min_delta=0.02)
        ends.add((len(fit(new_trainer(n), 30, stopping).epochs), stopping.best_epoch))
    assert len(ends) == 1
    assert 3 < ends.pop()[0] < 30


def test_early_stopping_does_not_compare_with_the_best_of_another_mode(tmp_path):
    others = [Says(3, 2, 4), callbacks.EarlyStopping(patience=3)]
    with pytest.raises(LookupError):
        fit(new_trainer(), 9, callbacks.Checkpoint(tmp_path), *others, Stops(2))
    trainer = new_trainer()
    trainer.restore(tmp_path)
    with pytest.raises(ValueError, match=r"mode='max' has another best value.*initial_epoch"):
        fit(trainer, 9, Says(3, 2, 4), callbacks.EarlyStopping(mode="max"), anew=False)


@pytest.mark.parametrize("rows", mostly_slow(range(1, 5), 3))
def test_early_stopping_survives_a_restore(subtests, tmp_path_factory, rows):
    for at in rows:
        with subtests.test(msg=str(at)):
            tmp_path = tmp_path_factory.mktemp("row")
            says = Says(3, 2, 4, 2, 2)
            others = [says, callbacks.EarlyStopping(patience=3)]
            with pytest.raises(LookupError):
                fit(new_trainer(), 9, callbacks.Checkpoint(tmp_path), *others, Stops(at))
            trainer = new_trainer()
            trainer.restore(tmp_path)
            stopping = callbacks.EarlyStopping(patience=3)
            for _ in range(2):  # the second has ended already
                assert fit(trainer, 9, says, stopping, anew=False).epochs == [0, 1, 2, 3, 4]
                assert (stopping.best, stopping.best_epoch) == (2, 1)
                trainer._resumes = True


def test_early_stopping_survives_an_interrupt_in_the_same_process(tmp_path):
    says, trainer = Says(3, 2, 4, 2, 2), new_trainer()
    checkpoint = callbacks.Checkpoint(tmp_path / "early", every_epochs=2)
    with pytest.raises(LookupError):
        fit(trainer, 9, checkpoint, says, callbacks.EarlyStopping(patience=3), Stops(3))
    trainer.save(tmp_path / "late")
    for _ in range(2):
        history = fit(trainer, 9, says, callbacks.EarlyStopping(patience=3), anew=False)
        assert history.epochs == [0, 1, 2, 3, 4]
        trainer.restore(tmp_path / "late")


class Stops(callbacks.Callback):
    """Raises after this number of epochs."""

    def __init__(self, at: int):
        self.at = at

    def on_epoch_begin(self, fit):
        if fit.position.epoch == self.at:
            raise LookupError("of the test")


def bad_rows(**bad) -> list[dict]:
    """The data with NaN in the fourth batch."""
    rows = [dict(batch) for batch in DATA]
    rows[3] |= {name: np.full_like(rows[3][name], value) for name, value in bad.items()}
    return rows


def test_nan_guard_stops_at_the_first_nan(subtests):
    for monitor, value in itertools.product([None, "loss", "error"], [np.nan, np.inf]):
        with subtests.test(msg=f"{monitor} {value}"):
            trainer, recorder = new_trainer(), Recorder()
            step = trainer._position.step + 4
            with raises(FloatingPointError, names=monitor or "loss", values=[step, 1]) as caught:
                fit(trainer, 2, recorder, callbacks.NaNGuard(monitor), data=bad_rows(y=value))
            assert re.search(r"\b(nan|inf)\b", str(caught.value))
            assert recorder.hooks[-1] == "fit_end"


def test_nan_guard_checks_another_metric():
    says = Says(nan, nan, name="mine")  # of an epoch, not of a step
    assert fit(new_trainer(), 2, says, callbacks.NaNGuard("error")).epochs == [0, 1]


# Logs


def lines_of(path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_csv_logger_writes_one_line_per_epoch(tmp_path):
    path = tmp_path / "new" / "log.csv"
    history = fit(new_trainer(), 3, callbacks.CSVLogger(path))
    head, *lines = lines_of(path)
    assert head == ["epoch", "loss", "error"]
    assert [line[0] for line in lines] == ["1", "2", "3"]
    for i, name in enumerate(head[1:], 1):
        assert [float(line[i]) for line in lines] == history[name]  # to the last bit


def test_csv_logger_appends_on_request(subtests, tmp_path_factory):
    for append in [True, False]:
        with subtests.test(msg=str(append)):
            tmp_path = tmp_path_factory.mktemp("row")
            for _ in range(2):
                fit(new_trainer(), 2, callbacks.CSVLogger(tmp_path / "log.csv", append=append))
            numbers = [line[0] for line in lines_of(tmp_path / "log.csv")]
            assert numbers == ["epoch", "1", "2", *(["1", "2"] if append else [])]


@pytest.mark.parametrize(
    "rows",
    mostly_slow(
        [("4,0.1", True), ("", True), ("4", True), ("", False), ("4,0.1", False)], ("4,0.1", True)
    ),
)
def test_csv_logger_continues_after_a_restore(subtests, tmp_path_factory, rows):
    """The killed training was ahead of its checkpoint, perhaps within a line."""
    for torn, append in rows:
        with subtests.test(msg=f"{torn} {append}"):
            tmp_path = tmp_path_factory.mktemp("row")
            path = tmp_path / "log.csv"
            logger = callbacks.CSVLogger(path, append=append)
            if append:
                fit(new_trainer(), 2, logger)
            trainer = new_trainer()
            fit(
                trainer, 3, logger, callbacks.Checkpoint(tmp_path / "at", every_epochs=2, keep=None)
            )
            with open(path, "a") as file:
                file.write(torn)
            trainer.restore(tmp_path / "at", trainer._position.step - STEPS)
            fit(trainer, 4, callbacks.CSVLogger(path, append=append), anew=False)
            numbers = [line[0] for line in lines_of(path)]
            assert numbers == ["epoch", *(["1", "2"] if append else []), "1", "2", "3", "4"]


def test_csv_logger_rejects_other_columns(tmp_path):
    path = tmp_path / "log.csv"
    fit(new_trainer(), 1, callbacks.CSVLogger(path))
    logger = callbacks.CSVLogger(path, append=True)
    names = [str(path), "epoch, loss, error", "epoch, loss, error, mine"]
    with raises(ValueError, names=names):
        fit(new_trainer(), 1, Says(1, name="mine"), logger)
    assert len(lines_of(path)) == 2


def test_tensorboard_writes_epochs_steps_and_the_program(tmp_path):
    trainer, recorder = new_trainer(), Recorder()
    begin = trainer._position.step
    board = callbacks.TensorBoard(tmp_path, every_steps=4, program=True)
    history = fit(trainer, 2, board, recorder)
    (step, tag, program), *scalars = events(tmp_path)
    assert (step, tag) == (begin + 1, "program/text_summary")
    assert program.startswith("```\nmodule @jit_train_step")
    assert program.endswith("\n```")
    epochs = [(step, tag) for step, tag, _ in scalars if not tag.startswith("step_")]
    assert epochs == [(1, "loss"), (1, "error"), (2, "loss"), (2, "error")]
    steps = [(step - begin, tag) for step, tag, _ in scalars if tag.startswith("step_")]
    assert steps == [(s, f"step_{name}") for s in (4, 8, 12, 16, 20) for name in history]
    values = {(step, tag): value for step, tag, value in scalars}
    for name in history:
        written = [values[step, name] for step in (1, 2)]
        np.testing.assert_array_equal(np.float32(history[name]), np.float32(written))
    logs = [logs for logs, (is_end, _) in zip(recorder.logs, with_logs(recorder), strict=True)]
    assert np.float32(values[begin + 4, "step_loss"]) == np.float32(logs[3]["loss"])


def test_tensorboard_writes_epochs_only(tmp_path):
    board = callbacks.TensorBoard(tmp_path)
    for _ in range(2):
        fit(new_trainer(), 1, board)
    assert [tag for _, tag, _ in events(tmp_path)] == ["loss", "error"] * 2


def test_lowered_text_is_unavailable_before_the_first_step():
    with raises(RuntimeError, fix="program"):
        inside.lowered_text(new_trainer())


SCHEDULE = optax.linear_schedule(0.1, 0.0, 100)
RATES = {  # the optimizer that has the rate, and the rate of the last update of two epochs
    "schedule": (lambda: optax.sgd(SCHEDULE), SCHEDULE, [0.091, 0.081]),
    "injected": (lambda: optax.inject_hyperparams(optax.sgd)(0.05), None, [0.05, 0.05]),
    "both": (lambda: optax.inject_hyperparams(optax.sgd)(SCHEDULE), None, [0.091, 0.081]),
    "in several steps": (
        lambda: optax.MultiSteps(optax.sgd(SCHEDULE), 5).gradient_transformation(),
        SCHEDULE,
        [0.099, 0.097],
    ),
}


@pytest.mark.parametrize("rows", mostly_slow(RATES, "schedule"))
def test_learning_rate_follows_its_schedule(subtests, rows):
    for case in rows:
        with subtests.test(msg=case):
            tx, schedule, rates = RATES[case]
            history = fit(a_trainer(1, tx()), 2, callbacks.LearningRate(schedule))
            np.testing.assert_allclose(history["learning_rate"], rates, rtol=1e-6)


def test_learning_rate_counts_the_updates_of_the_optimizer(two):
    """Those of earlier trainers too, and not the steps that a loss scale skips."""
    data = [(np.ones((4, 4), np.float32), np.ones((4, 1), np.float32))] * 10
    scaled = {"precision": "float16", "loss_scale": mirror.LossScale(2.0**30)}
    for options in {}, scaled:
        model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(SCHEDULE), wrt=nnx.Param)
        for _ in range(2):
            trainer = mirror.Trainer(model, optimizer, "mse", strategy=two, **options)
            history = fit(trainer, 1, callbacks.LearningRate(SCHEDULE), data=data)
        count = int(np.asarray(optimizer.step[...]))
        assert 0 < count < 20 if options else count == 20
        np.testing.assert_allclose(history["learning_rate"], [SCHEDULE(count - 1)], rtol=1e-6)


def test_learning_rate_requires_injected_hyperparameters():
    fix = ["LearningRate(schedule)", "optax.inject_hyperparams"]
    with raises(ValueError, names="learning_rate", fix=fix):
        fit(new_trainer(), 1, callbacks.LearningRate())


# Profiles

PROFILES = {  # steps to profile, steps per launch, and what ends the training
    "some": ((2, 4), 1, None),
    "all": ((0, 99), 1, None),
    "launches": ((1, 5), 3, None),
    "fewer": ((5, 99), 1, None),
    "error": ((2, 8), 1, lambda step: Raises("step", step)),
    "NaN": ((2, 99), 1, lambda step: callbacks.NaNGuard()),
    "board": ((2, 99), 1, lambda step: Raises("step", step)),
}


@pytest.mark.parametrize("rows", mostly_slow(PROFILES, "some"))
def test_profiler_writes_the_profile_of_its_steps(subtests, tmp_path_factory, rows):
    for name in rows:
        with subtests.test(msg=name):
            tmp_path = tmp_path_factory.mktemp("row")
            steps, k, other = PROFILES[name]
            trainer = new_trainer(steps_per_execution=k)
            others = [] if other is None else [other(trainer._position.step + 5)]
            if name == "board":  # which is closed first
                others.append(callbacks.TensorBoard(tmp_path / "board", every_steps=1))
            for turn in ("one", "two"):
                data = bad_rows(y=np.nan) if name == "NaN" and turn == "one" else DATA
                profiler = callbacks.Profiler(tmp_path / turn, steps)
                if other is not None and turn == "one":
                    with pytest.raises((LookupError, FloatingPointError)):
                        fit(trainer, 1, profiler, *others, data=data)
                else:
                    fit(new_trainer(steps_per_execution=k), 1, profiler, data=data)
                (profile,) = (tmp_path / turn).rglob("*.xplane.pb")
                assert b"jit_train_step" in profile.read_bytes()


def test_profiler_writes_nothing_when_training_ends_early(tmp_path):
    fit(new_trainer(), 1, callbacks.Profiler(tmp_path / "at", (50, 60)))
    assert not (tmp_path / "at").exists()


# Functions of experiment trackers


class Run:
    """Has methods with the signatures of `wandb.log` and `mlflow.log_metrics`."""

    def __init__(self):
        self.calls = []

    def wandb_log(self, data, step=None, commit=None):
        self.calls.append((step, data))

    def mlflow_log_metrics(
        self, metrics, step=None, synchronous=None, run_id=None, timestamp=None, model_id=None
    ):
        self.calls.append((step, metrics))


def test_log_calls_a_function_of_a_tracker(subtests):
    for method in ["wandb_log", "mlflow_log_metrics"]:
        with subtests.test(msg=method):
            run, trainer = Run(), new_trainer()
            begin = trainer._position.step
            log = callbacks.Log(getattr(run, method), every_steps=4)
            history = fit(trainer, 2, log)
            assert [step - begin for step, _ in run.calls] == [4, 8, 10, 12, 16, 20, 20]
            assert [step for step, _ in run.calls] == sorted(step for step, _ in run.calls)
            of_epochs = [logs for _, logs in run.calls if "loss" in logs]
            assert [logs["loss"] for logs in of_epochs] == history["loss"]
            of_steps = [logs for _, logs in run.calls if "loss" not in logs]
            assert {tuple(logs) for logs in of_steps} == {("step_loss", "step_error")}
            assert all(type(value) is float for _, logs in run.calls for value in logs.values())


def test_log_only_of_epochs():
    run = Run()
    fit(new_trainer(), 2, callbacks.Log(run.wandb_log))
    assert len(run.calls) == 2


def test_log_requires_a_function_of_two_arguments(subtests):
    for fn in [3, "wandb", None, lambda metrics: None]:
        with subtests.test(msg=repr(fn)):
            with raises(TypeError, names="fn", fix=["Log(lambda metrics, step"]):
                callbacks.Log(fn)
            with raises(ValueError, names="every_steps", values=-1):
                callbacks.Log(print, every_steps=-1)


NOT_NUMBERS = ("good", None, np.arange(3), [])


def test_added_metric_must_be_a_number(subtests):
    """The epoch has not ended then, and ends when the callback is repaired."""
    for value in NOT_NUMBERS:
        trainer, adds = a_trainer(1), callbacks.Callback()
        adds.on_epoch_end = lambda fit, logs, value=value: logs.update(note=value)
        with subtests.test(msg=repr(value)):
            with raises(TypeError, names="logs['note']", fix="metrics are numbers"):
                trainer.fit(DATA, 1, callbacks=adds, progress=False)
            assert trainer.fit(DATA, 1, progress=False).epochs == [0]
            assert trainer.optimizer.step[...] == STEPS


def test_state_that_cannot_be_restored_is_not_saved(tmp_path, subtests):
    """Or no checkpoint of the training could be restored."""
    for state in ([1], {"array": np.arange(3)}, {"set": {1}}):
        odd = callbacks.Callback()
        odd.to_dict = lambda state=state: state
        with subtests.test(msg=repr(state)):
            added = [odd, callbacks.Checkpoint(tmp_path)]
            with raises(TypeError, names="Callback 1", values=repr(state), fix="Return a dict"):
                a_trainer(1).fit(DATA, 1, callbacks=added, progress=False)
            assert not list(tmp_path.glob("step-*"))
