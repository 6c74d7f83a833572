"""The progress of a fit in log files, in terminals of any width, and in notebooks."""

import collections
import functools
import io
import re
import sys
import threading
import time
import types

import jax
import nbformat
import numpy as np
import optax
import pytest
from flax import nnx
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient
from rich.live import Live

import mirror
from mirror import callbacks
from tests.support import terminal
from tests.support.messages import assert_message
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_slow
from tests.support.waiting import wait_until

STEPS, SIZE = 10, 4
ROWS = STEPS * SIZE


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(x)[:, 0]


def loss_fn(model, batch):
    error = model(batch["x"]) - batch["y"]
    return error**2, {"error": abs(error)}


def data() -> mirror.data.ArrayDataset:
    x = np.random.RandomState(0).randn(ROWS, 3).astype(np.float32)
    return mirror.data.from_arrays({"x": x, "y": x.sum(1)}, SIZE)


def another_trainer() -> mirror.Trainer:
    with cpu_strategy(1).scope():
        return mirror.Trainer(Model(nnx.Rngs(0)), optax.sgd(0.05), loss_fn)


@functools.cache
def compiled() -> tuple[mirror.Trainer, dict]:
    trainer = another_trainer()
    return trainer, jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(trainer.model)))


def trainer() -> mirror.Trainer:
    """Returns an untrained trainer, which is compiled once for all tests."""
    trainer, weights = compiled()
    nnx.update(trainer.model, weights)
    return trainer


def fit(epochs=2, *others, of=None, anew=True, batches=None, **options) -> mirror.History:
    begin = {"initial_epoch": 0} if anew else {}
    batches = data() if batches is None else batches
    return (of or trainer()).fit(batches, epochs, callbacks=others, **begin, **options)


class Adds(callbacks.Callback):
    """Adds values of the test to the metrics of the epochs."""

    def __init__(self, *values, name="val_loss"):
        self.values, self.name = values, name

    def on_epoch_end(self, fit, logs):
        logs[self.name] = float(self.values[fit.history.epochs[-1]])


class At(callbacks.Callback):
    """Calls a function at a step of an epoch."""

    def __init__(self, epoch: int, step: int, function):
        self.where, self.function = (epoch, step), function

    def on_step(self, fit):
        if (fit.position.epoch + 1, fit.position.epoch_step) == self.where:
            self.function()


def fail(error=LookupError):
    raise error("of the test")


class Clock:
    """A clock that a test moves on; it advances a little each time that it is read."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def advance(self, secs: float = 1.0) -> None:
        self.now += secs


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


SCREENS: list[terminal.Screen] = []  # of `on_terminal`


def redrawn():
    """Waits until a thread has drawn the terminal twice, so once after the call."""
    for _ in range(2):
        before = len(SCREENS[-1].text)
        wait_until(lambda before=before: len(SCREENS[-1].text) > before)


def shows(text: str) -> bool:
    return text in SCREENS[-1].text


LINE = r"epoch %d/2( on \d replicas?)?: loss [0-9.e-]+, error [0-9.e-]+, [0-9]+\.[0-9] s"
LINES = rf"{LINE % 1}\n{LINE % 2}\n"

# Log files


def shown(epochs=2, *others, **options) -> str:
    file = io.StringIO()
    fit(epochs, callbacks.ProgressBar(file), *others, **options)
    return file.getvalue()


def test_progress_writes_one_line_per_epoch_to_a_file(subtests):
    for columns in ["", "40"]:
        with subtests.test(msg=str(columns)), pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("COLUMNS", columns)
            monkeypatch.setenv("FORCE_COLOR", "1")
            assert re.fullmatch(LINES, shown())


def test_fit_adds_a_progress_bar_by_default(capsys):
    fit()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(LINES, printed.err)
    shown()
    fit(progress=False)
    assert capsys.readouterr() == ("", "")


def test_progress_reports_resume_and_early_end(tmp_path):
    with pytest.raises(LookupError):
        shown(2, At(2, 3, fail))
    reported = shown(anew=False, of=compiled()[0])
    assert_message(reported.splitlines()[0], values=[2, 3 * SIZE])
    compiled()[0].save(tmp_path)
    compiled()[0].restore(tmp_path)
    (line,) = shown(anew=False, of=compiled()[0]).splitlines()
    assert_message(line, values=2, fix="epochs")
    reported = shown(9, Adds(7, 7, 7), callbacks.EarlyStopping(patience=1))
    assert_message(reported.splitlines()[-1], names="val_loss", values=[1, 7])


# Terminals


@pytest.fixture(autouse=True)
def a_terminal_with_controls(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def on_terminal(monkeypatch, columns=80, *others, epochs=2, error=None, **options):
    with terminal.terminal(columns) as (file, screen), monkeypatch.context() as patch:
        SCREENS[:] = [screen]
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "stderr", file)
        if error is None:
            fit(epochs, *others, **options)
        else:
            with pytest.raises(error):
                fit(epochs, *others, **options)
        assert (sys.stdout, sys.stderr) == (file, file)
    assert screen.shows_cursor
    return screen


def unwrapped(lines: list[str]) -> str:
    return "\n".join(lines).replace("\n  ", " ") + "\n"


_ITEMS = r"(, \d+ s(, loss [0-9.e-]+(, error [0-9.e-]+)?)?(, [0-9.e+]+ steps/s)?)?"
BAR = rf"epoch \d/2( +\d+%( \|[# ]+\|)? \d+/10{_ITEMS})?"
WAITING = r"epoch 1/2: loading and compiling( on \d replicas?)?, \d s"


@pytest.mark.parametrize("rows", mostly_slow([200, 80, 60, 40, 15, 5], 80, 15))
def test_bar_fits_any_width_and_leaves_the_lines_of_the_epochs(subtests, rows):
    for columns in rows:
        with subtests.test(msg=str(columns)), pytest.MonkeyPatch.context() as monkeypatch:
            screen = on_terminal(monkeypatch, columns, At(1, 1, redrawn), At(2, 10, redrawn))
            assert re.fullmatch(LINES, unwrapped(screen.lines))
            frames = [frame for frame in screen.frames if frame not in screen.lines]
            assert max(map(len, frames), default=0) < columns
            for frame in frames:
                assert re.fullmatch(f"{BAR}|{WAITING}", frame)
            if columns >= 40:
                assert any("%" in frame and "|" in frame for frame in frames)
                assert max(map(len, screen.lines)) <= columns
                assert all(re.search("(,| s)$", line) for line in screen.lines), (
                    "wrapped in a metric"
                )


def batches_after(wait):
    """Yields the batches of one pass, of unknown length, when a function has returned."""
    wait()
    yield from data()


def test_terminal_shows_that_the_first_step_is_on_its_way(monkeypatch, clock):
    def wait():
        wait_until(lambda: shows("epoch 1/1: loading and compiling on 1 replica, 0 s"))
        clock.advance()
        wait_until(lambda: shows("epoch 1/1: loading and compiling on 1 replica, 1 s"))

    screen = on_terminal(monkeypatch, 80, epochs=1, batches=batches_after(wait))
    (line,) = screen.lines
    assert re.fullmatch(r"epoch 1/1 on 1 replica: loss .*, error .* s", line)


def test_bar_shows_an_unknown_number_of_steps(monkeypatch):
    batches = batches_after(lambda: None)
    screen = on_terminal(monkeypatch, 80, At(1, 10, redrawn), epochs=1, batches=batches)
    assert any(re.match(r"epoch 1/1: \d+ steps, \d s, loss ", frame) for frame in screen.frames)


def test_bar_of_a_resumed_epoch_starts_where_it_resumes(monkeypatch):
    with pytest.raises(LookupError):
        shown(2, At(2, 3, fail))
    screen = on_terminal(monkeypatch, 80, At(2, 4, redrawn), of=compiled()[0], anew=False)
    assert_message(screen.lines[0], values=[2, 3 * SIZE])
    assert re.fullmatch(LINE % 2, screen.lines[1])
    assert any(re.match(r"epoch 2/2 +30% \|######", frame) for frame in screen.frames)


def test_what_callbacks_print_stays_above_the_bar(monkeypatch):
    def talk():
        print("a line of 0.123456")
        print("an error of 7", file=sys.stderr)
        print("a part", end="")
        redrawn()

    screen = on_terminal(monkeypatch, 80, At(1, 5, talk))
    first, *others = screen.lines
    assert first == "a line of 0.123456"
    assert others[:2] == ["an error of 7", "a part"] or "a part" in unwrapped(others)
    assert sum(line.startswith("epoch") for line in others) == 2
    assert not any("%" in line for line in screen.lines)


def test_bar_is_erased_after_errors(subtests):
    for error in [LookupError, KeyboardInterrupt]:
        with subtests.test(msg=str(error)), pytest.MonkeyPatch.context() as monkeypatch:
            stop = At(2, 5, functools.partial(fail, error))
            screen = on_terminal(monkeypatch, 80, stop, error=error)
            (line,) = screen.lines
            assert re.fullmatch(LINE % 1, line)


def test_two_fits_share_a_terminal(monkeypatch):
    other = threading.Thread(target=fit, args=(2,), kwargs={"of": another_trainer()})
    screen = on_terminal(monkeypatch, 80, At(1, 2, other.start), At(2, 9, other.join))
    counts = collections.Counter(line[:9] for line in screen.lines)
    assert counts == {"epoch 1/2": 2, "epoch 2/2": 2}
    again = on_terminal(monkeypatch, 80, At(1, 2, redrawn))
    assert any("%" in frame for frame in again.frames), "the terminal is free again"


def test_bar_leaves_the_line_to_a_debugger(monkeypatch):
    bars: list[Live] = []
    start = Live.start

    def recorded_start(bar, **options):
        bars.append(bar)
        start(bar, **options)

    def debug():
        code = "print('(Pdb)'); draw(); draw(); print('(end)')"
        exec(code, {"__name__": "bdb", "draw": bars[-1].refresh})

    monkeypatch.setattr(Live, "start", recorded_start)
    screen = on_terminal(monkeypatch, 80, At(1, 1, debug), At(1, 2, redrawn))
    _, shown, after = re.split(r"\(Pdb\)|\(end\)", screen.text)
    assert "epoch" not in shown
    assert shown.count("\n") == 1, "only the line of `print` was drawn"
    assert "epoch 1/2" in after
    assert "(Pdb)" in screen.lines


def test_a_terminal_without_controls_gets_lines_only(subtests):
    for name in ["dumb", "unknown"]:
        with subtests.test(msg=name), pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("TERM", name)
            screen = on_terminal(monkeypatch)
            assert re.fullmatch(LINES, screen.text.replace("\r\n", "\n"))


# Notebooks


class Notebook(DisplayPublisher):
    """The outputs of a cell, as a notebook stores them: by display id."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, dict[str, str]] = {}
        self.versions: list[dict[str, str]] = []

    def publish(self, data, *metadata, transient=None, update=False, **options):
        assert set(data) == {"text/plain", "text/html"}
        assert update == (transient["display_id"] in self.outputs)
        self.outputs[transient["display_id"]] = data
        self.versions.append(data)

    @property
    def html(self) -> str:
        (output,) = self.outputs.values()
        return output["text/html"]

    @property
    def text(self) -> str:
        (output,) = self.outputs.values()
        return output["text/plain"]


@pytest.fixture
def notebook(monkeypatch, capfd):
    """A cell that shows its outputs, and in which nothing is printed."""
    shell = types.SimpleNamespace(display_pub=Notebook(), execution_count=1)
    monkeypatch.setattr(InteractiveShell, "initialized", lambda: True)
    monkeypatch.setattr(InteractiveShell, "instance", lambda: shell)
    yield shell.display_pub
    assert capfd.readouterr() == ("", "")


def cells(text: str) -> list[list[str]]:
    rows = re.findall("<tr>(.*?)</tr>", text)
    return [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_notebook_shows_the_table_of_the_history(notebook):
    history = fit(3)
    assert cells(notebook.html) == [list(history.table.headings), *map(list, history.table.rows)]
    assert notebook.html == history.table._repr_html_()
    assert notebook.text == repr(history)


def test_notebook_shows_the_running_epoch(notebook, clock):
    fit(2, At(1, 9, clock.advance), At(2, 9, clock.advance))
    texts = [version["text/plain"] for version in notebook.versions]
    assert texts[0] == "epoch 1/2: loading data and compiling the step on 1 replica, 0 s"
    assert "<progress></progress>" in notebook.versions[0]["text/html"]
    assert re.search(
        r"^epoch 2/2: \d+/10 steps, loss [0-9.e-]+, error [0-9.e-]+, \d s$", texts[-2], re.M
    )
    version = notebook.versions[-2]["text/html"]
    assert re.search(r'<progress value="\d+" max="10"></progress> \d+/10 steps, loss', version)
    assert len(cells(version)) == 2
    assert "progress" not in notebook.html


def test_notebook_says_how_long_the_first_step_takes(notebook, clock):
    def texts():
        return [version["text/plain"] for version in notebook.versions]

    def wait():
        clock.advance()
        words = "epoch 1/1: loading data and compiling the step on 1 replica, 1 s"
        wait_until(lambda: words in texts())

    fit(1, batches=batches_after(wait))
    assert "compiling" not in notebook.text


def test_notebook_is_updated_at_most_five_times_per_second(notebook, clock):
    fit(20)
    assert len(notebook.versions) == 3, "the first, the first step, and the last"
    notebook.versions.clear()
    fit(2, *(At(epoch, step, lambda: clock.advance(0.1)) for epoch in (1, 2) for step in range(10)))
    assert 4 <= len(notebook.versions) <= 3 + 5 * 1.8


def test_notebook_table_is_bounded(notebook):
    history = fit(60)
    rows = cells(notebook.html)[1:]
    assert [row[0] for row in rows] == [*"12345", "...", *map(str, range(46, 61))]
    assert len(history.table.rows) == 60
    fit(21)
    numbers = [row[0] for row in cells(list(notebook.outputs.values())[-1]["text/html"])[1:]]
    assert numbers == [str(i + 1) for i in range(21)]


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_notebook_keeps_the_table_after_errors(notebook, error):
    with pytest.raises(error):
        fit(3, At(2, 5, functools.partial(fail, error)))
    assert [row[0] for row in cells(notebook.html)] == ["epoch", "1"]
    assert "progress" not in notebook.html
    assert_message(notebook.text.splitlines()[-1], values=[2, 5])
    assert notebook.text.splitlines()[-1] in notebook.html


def test_notebook_shows_resume_and_early_end(notebook):
    with pytest.raises(LookupError):
        shown(3, At(2, 5, fail))
    fit(3, of=compiled()[0], anew=False)
    assert [row[0] for row in cells(notebook.html)] == ["epoch", "2", "3"]
    assert_message(notebook.text.splitlines()[-1], values=[2, 5 * SIZE])
    notebook.outputs.clear()
    fit(9, Adds(7, 7, 7), callbacks.EarlyStopping(patience=1))
    assert [row[0] for row in cells(notebook.html)] == ["epoch", "1", "2"]
    assert "val_loss" in cells(notebook.html)[0]
    assert_message(notebook.text.splitlines()[-1], names="val_loss", values=7)


def test_two_fits_of_a_cell_have_two_tables(notebook):
    other = threading.Thread(target=fit, args=(3,), kwargs={"of": another_trainer()})
    fit(2, At(1, 2, other.start), At(2, 9, other.join))
    first, second = (output["text/html"] for output in notebook.outputs.values())
    assert (len(cells(first)), len(cells(second))) == (3, 4)


def test_notebook_shows_nothing_without_progress_or_with_a_file(notebook):
    fit(1, progress=False)
    assert re.fullmatch(LINES, shown())
    assert not notebook.outputs


def test_history_omits_the_table_that_its_cell_shows(notebook, monkeypatch):
    history = fit(3)
    assert "<table" not in history._repr_html_()
    assert "<svg" in history._repr_html_()
    monkeypatch.setattr(InteractiveShell.instance(), "execution_count", 2)
    assert history.table._repr_html_() in history._repr_html_()
    assert fit(1)._repr_html_().startswith("<table")  # nothing to show instead


def test_metrics_are_escaped(notebook, clock):
    fit(2, Adds(1, 2, name="<b>"), At(2, 9, clock.advance))
    assert not any("<b>" in version["text/html"] for version in notebook.versions)
    assert "&lt;b&gt;" in notebook.html


def test_a_shell_that_prints_is_no_notebook(monkeypatch, capsys):
    shell = types.SimpleNamespace(display_pub=DisplayPublisher(), execution_count=1)
    monkeypatch.setattr(InteractiveShell, "initialized", lambda: True)
    monkeypatch.setattr(InteractiveShell, "instance", lambda: shell)
    fit()
    assert re.fullmatch(LINES, capsys.readouterr().err)


CODE = """
import numpy as np, optax
from flax import nnx
import mirror

def loss_fn(model, batch):
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2

with mirror.MirroredStrategy().scope():
    trainer = mirror.Trainer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn)
x = np.ones((40, 3), np.float32)
trainer.fit(mirror.data.from_arrays({"x": x, "y": x[:, 0]}, 4), epochs=8)
"""


@pytest.mark.slow
def test_saved_notebook_shows_one_table(tmp_path, monkeypatch):
    """In a real kernel."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    progress, history = notebook.cells[0].outputs
    assert (progress.output_type, history.output_type) == ("display_data", "execute_result")
    assert len(cells(progress.data["text/html"])) == 9
    assert "progress" not in progress.data["text/html"]
    assert "<table" not in history.data["text/html"]
    nbformat.validate(notebook)
