"""A training that a signal ends at any line, and that resumes, ends as an uninterrupted one.

The weights, the metrics of all epochs, and the calls that callbacks with a state have received.
"""

import contextlib
import copy
import os
import signal
import sys
from pathlib import Path

import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import callbacks
from tests.support.inside import checkpoint_state
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_nightly

EPOCHS = 3
X = np.random.RandomState(0).randn(10, 3).astype("float32")
DATA = (X, np.sin(X).sum(1, keepdims=True))
INT, TERM = signal.SIGINT, signal.SIGTERM
FOLDERS = tuple(str(Path(mirror.__file__).parent / "_src" / name) for name in ("data", "training"))

IN_HOOKS = ("_call", "on_step", "on_metrics")  # a callback misses a hook that is interrupted


class Calls(callbacks.Callback):
    """Its state is what it has received."""

    def __init__(self):
        self.steps, self.metrics, self.epochs = 0, [], []

    def on_step(self, fit):
        self.steps += 1

    def on_metrics(self, fit, step, logs):
        self.metrics.append((step, logs["loss"]))

    def on_epoch_end(self, fit, logs):
        self.epochs.append(logs["loss"])
        logs["number"] = float(len(self.epochs))

    def to_dict(self):
        return dict(self.__dict__)  # Python 3.13.0 may lose the values of a freed object's dict

    def from_dict(self, state):
        state["metrics"] = [tuple(each) for each in state["metrics"]]
        self.__dict__.update(copy.deepcopy(state))


class SignalAtLine:
    """Sends a signal to this process at a line of a training, or counts the lines."""

    def __init__(self, number: int = INT, line: int = 0, files: tuple[str, ...] = FOLDERS):
        self.number, self.line, self.files, self.count = number, line, files, 0

    def _of_call(self, frame, event, argument):
        code = frame.f_code
        is_traced = code.co_filename.startswith(self.files) and code.co_name not in IN_HOOKS
        return self._of_line if is_traced else None

    def _of_line(self, frame, event, argument):
        is_handled = signal.getsignal(self.number) is not signal.SIG_DFL  # else it ends the tests
        if event == "line" and is_handled:
            self.count += 1
            if self.count == self.line:
                signal.raise_signal(self.number)
        return self._of_line

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._of_call)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)


EMA = callbacks.EMA(DATA, batch_size=4, decay=0.9)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A trainer, and a function that makes it untrained."""
    with cpu_strategy(2).scope():
        net = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        trainer = mirror.Trainer(net, EMA.optimizer(net, optax.adam(0.1)), "mse")
    directory = tmp_path_factory.mktemp("begun")
    trainer.save(directory)
    return trainer, lambda: trainer.restore(directory)


def train(trainer, directory, *others, **options) -> None:
    stopping = callbacks.EarlyStopping("ema_loss", patience=2)
    checkpoint = callbacks.Checkpoint(directory, every_steps=2, monitor="ema_loss")
    added = [Calls(), EMA, stopping, *others, checkpoint]
    trainer.fit(
        DATA, EPOCHS, batch_size=4, callbacks=added, validation_data=DATA, progress=False, **options
    )


def ending(trainer) -> tuple[dict, dict]:
    """Returns the weights, and all of the position but durations."""
    arrays, position = checkpoint_state(trainer)
    position["history"] = {**position["history"], "seconds": None}
    del position["training"]  # random
    return {name: np.asarray(x).tobytes() for name, x in arrays.items()}, copy.deepcopy(position)


@pytest.fixture(scope="module")
def uninterrupted(begun, tmp_path_factory):
    """The end of a training that nothing interrupts, and its number of lines by signal."""
    trainer, restart = begun
    restart()
    train(trainer, tmp_path_factory.mktemp("compiles"))
    ends, counts = [], {}
    for number in (INT, TERM):
        restart()
        with SignalAtLine(number) as lines:
            train(trainer, tmp_path_factory.mktemp("whole"))
        counts[number] = lines.count
        ends.append(ending(trainer))
    assert ends[0] == ends[1]
    return ends[0], counts


def resume(trainer, restart, directory) -> None:
    """Restores the last checkpoint, or begins again without one, and trains to the end."""
    try:
        trainer.restore(directory)
    except FileNotFoundError:
        restart()
    train(trainer, directory)


PARTS = 400
POINTS = [(number, part) for number in (INT, TERM) for part in range(1, PARTS)]
QUICK = [(number, part) for number in (INT, TERM) for part in range(40, PARTS, 120)]


@pytest.mark.parametrize("points", mostly_nightly(POINTS, *QUICK))
def test_signal_at_any_line_changes_nothing(
    points, begun, uninterrupted, tmp_path_factory, subtests, capfd
):
    (trainer, restart), (end, counts) = begun, uninterrupted
    for number, part in points:
        directory = tmp_path_factory.mktemp("row")
        restart()
        line = counts[number] * part // PARTS
        with subtests.test(msg=f"{number!r} at line {line} of {counts[number]}"):
            with (
                SignalAtLine(number, line) as lines,
                pytest.raises(KeyboardInterrupt if number == INT else SystemExit),
            ):
                train(trainer, directory)
            assert lines.count >= line
            if number == TERM:
                resume(trainer, restart, directory)
            elif f"epoch {EPOCHS}" not in repr(trainer):  # else it is complete
                train(trainer, directory)
            assert ending(trainer) == end
            assert signal.getsignal(TERM) is signal.SIG_DFL
    capfd.readouterr()


class Ends(callbacks.Callback):
    """Ends the training at the end of an epoch, once."""

    def __init__(self, how, at: tuple[int, ...] = (0, 1)):
        self.how, self.at = how, list(at)

    def on_epoch_end(self, fit, logs):
        if self.how is not None and fit.history.epochs == self.at:
            self.how = self.how()


def fails():
    raise LookupError("of the test")


def sends(number: int):
    os.kill(os.getpid(), number)


ENDS = {
    "exception": (fails, LookupError),
    "Ctrl-C": (lambda: sends(INT), KeyboardInterrupt),
    "SIGTERM": (lambda: sends(TERM), SystemExit),
}


def test_callbacks_after_one_that_is_interrupted_receive_the_step(begun, subtests):
    """Both are called for each step once, in whichever of two hooks the signal arrives."""
    trainer, restart = begun

    def received(interrupted):
        class Interrupts(callbacks.Callback):
            def on_step(self, fit):
                if interrupted == ("on_step", fit.position.step):
                    signal.raise_signal(INT)

            def on_metrics(self, fit, step, logs):
                if interrupted == ("on_metrics", step):
                    signal.raise_signal(INT)

        restart()
        calls = Calls()
        options = {"batch_size": 4, "callbacks": [Interrupts(), calls], "progress": False}
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                trainer.fit(DATA, EPOCHS, **options)
            interrupted = None
        trainer.fit(DATA, EPOCHS, **options)
        return calls.to_dict()

    wanted = received(None)
    for hook in ("on_step", "on_metrics"):
        with subtests.test(msg=hook):
            assert received((hook, 2)) == wanted


def test_epoch_whose_end_fails_ends_when_training_resumes(
    begun, uninterrupted, tmp_path, subtests, capfd
):
    """In this process, and from a checkpoint; no callback misses it, or counts it twice."""
    (trainer, restart), (end, _) = begun, uninterrupted
    for name, (how, kind) in ENDS.items():
        with subtests.test(msg=name):
            restart()
            with pytest.raises(kind):
                train(trainer, tmp_path / name, Ends(how))
            train(trainer, tmp_path / name)
            assert ending(trainer) == end
            restart()
            with pytest.raises(kind):
                train(trainer, tmp_path / f"{name} again", Ends(how))
            resume(trainer, restart, tmp_path / f"{name} again")
            assert ending(trainer) == end
    capfd.readouterr()


def test_end_of_an_epoch_resumes_without_reading_it_again(begun):
    """Not even a generator, which has no second pass."""
    trainer, restart = begun
    restart()
    x, y = DATA
    batches = ((x[i : i + 4], y[i : i + 4]) for i in (0, 4))
    with pytest.raises(LookupError):
        trainer.fit(batches, 1, callbacks=Ends(fails, at=(0,)), progress=False)
    calls = Calls()
    history = trainer.fit(batches, 1, callbacks=calls, progress=False)
    assert history["loss"] == calls.epochs
    assert history.epochs == [0]
    assert calls.steps == 0


def test_interrupt_while_the_averages_are_set_keeps_the_weights(begun):
    """Else training would continue from the averages."""
    trainer, restart = begun
    restart()
    model, line = trainer.model, 0
    files = tuple(f"{FOLDERS[1]}/{name}.py" for name in ("trainer", "precision", "summary"))
    lines = SignalAtLine(INT, 1, files)
    while lines.count >= line:
        line += 1
        lines = SignalAtLine(INT, line, files)
        with contextlib.suppress(KeyboardInterrupt), lines, EMA.weights(trainer):
            pass
        assert trainer.model is model
    assert line > 5
