"""`ProgressBar`: a bar in terminals, a table in notebooks, one line per epoch in log files."""

import contextvars
import html
import os
import sys
import threading
import time
from typing import Any, ClassVar, TextIO, final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from mirror._src.base.errors import counted
from mirror._src.base.public_names import set_module
from mirror._src.base.terminal import folded_table, in_notebook, wrap
from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.loop import FitLoop
from mirror._src.training.progress import format_metrics

_REFRESHES_PER_SECOND = 4
_SECONDS_BETWEEN_UPDATES = 0.2
_BAR_WIDTHS = (20, 10)
_DEBUGGERS = {"bdb", "cmd", "code"}

_last_line = threading.Lock()
"""Held by the fit whose bar is in the last line of the terminal; another fit prints lines only."""


def is_terminal(file: TextIO) -> bool:
    """Whether the file is a terminal that can erase a line."""
    return file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def format_replicas(strategy: Any) -> str:
    """Returns the replicas that train, and their devices if there are fewer or more."""
    replicas = strategy.num_replicas_in_sync
    words = counted(replicas, "replica")
    devices = len(set(getattr(strategy, "devices", ()))) or replicas
    return words if devices == replicas else f"{words}, {counted(devices, 'device')}"


def _done(fit: FitLoop, step: int) -> int:
    """Returns the number of steps of the epoch up to `step`, which are those with metrics."""
    return fit.position.epoch_step - (fit.position.step - step)


class Display(Callback):
    """A display that shows nothing."""

    def note(self, text: str) -> None:
        """Shows a line of text."""


class LogProgress(Display):
    """Prints one line per epoch, the first with the number of replicas."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._has_printed = False

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:
        """Prints the metrics and the duration."""
        title = f"epoch {fit.position.epoch}/{fit.epochs}"
        if not self._has_printed:
            self._has_printed = True
            title += f" on {format_replicas(fit.trainer.strategy)}"
        items = [*format_metrics(logs).split(", "), f"{fit.history.epoch_secs[-1]:.1f} s"]
        # Wrapped lines break between two metrics only.
        title, *items = (each.replace(" ", "\N{NO-BREAK SPACE}") for each in (title, *items))
        self.note(f"{title}: {', '.join(items)}")

    def note(self, text: str) -> None:
        """Prints a line."""
        print(text.replace("\N{NO-BREAK SPACE}", " "), file=self._file, flush=True)


@final
class TerminalProgress(LogProgress):
    """Draws a bar in the last line, and prints one line per epoch above it.

    rich redraws and erases the line, from a thread, so that the time moves on while a step is
    compiled; it also prints what the user prints above the bar. Its progress columns are not used:
    in a narrow terminal, they cut numbers.
    """

    def __init__(self, file: TextIO) -> None:
        super().__init__(file)
        self._console = Console(
            file=file, force_jupyter=False, markup=False, emoji=False, highlight=False
        )
        self._live: Live | None = None
        self._line: _Line | None = None
        self._is_compiled = False
        self._updated = 0.0

    def on_epoch_begin(self, fit: FitLoop) -> None:
        """Opens a new bar."""
        title = f"epoch {fit.position.epoch + 1}/{fit.epochs}"
        where = format_replicas(fit.trainer.strategy)
        self._line = _Line(title, where, fit.position.epoch_step, fit.steps_per_epoch)
        if self._is_compiled:
            self._line.begin_steps()
        self._updated = 0.0
        if self._live is None and _last_line.acquire(blocking=False):
            self._live = _PausableLive(
                self,
                console=self._console,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
                redirect_stdout=self._is_redirected(sys.stdout),
                redirect_stderr=self._is_redirected(sys.stderr),
            )
            self._live.start(refresh=True)
            self._console.show_cursor(True)  # a process that is killed cannot show it again

    def on_step(self, fit: FitLoop) -> None:  # noqa: ARG002
        """Replaces the words of the first step by the bar."""
        self._is_compiled = True
        if self._line is not None:
            self._line.begin_steps()

    def on_metrics(self, fit: FitLoop, step: int, logs: dict[str, float]) -> None:  # noqa: ARG002
        """Advances the bar, which the thread draws."""
        if self._line is None:
            return
        self._line.done = _done(fit, step)
        now = time.perf_counter()
        if now - self._updated >= _SECONDS_BETWEEN_UPDATES:
            self._updated = now
            self._line.items = format_metrics(fit.logs).split(", ")

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:
        """Replaces the bar by a line with the metrics."""
        self._line = None
        super().on_epoch_end(fit, logs)

    def note(self, text: str) -> None:
        """Prints a line above the bar, wrapped at spaces."""
        lines = wrap(text, self._console.width, indent="  ")
        if self._live is None:
            super().note(lines)
        else:
            self._console.print(lines, soft_wrap=True)

    def on_fit_end(self, fit: FitLoop) -> None:  # noqa: ARG002
        """Erases the bar."""
        self._line = None
        live, self._live = self._live, None
        if live is not None:
            try:
                sys.stdout.flush()  # the redirected files keep an incomplete line
                sys.stderr.flush()
                live.stop()
            finally:
                _last_line.release()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the last line; empty between two epochs, and in a debugger."""
        line = None if _is_debugging() else self._line
        yield Text("" if line is None else line.draw(console.width - 1), no_wrap=True)

    def _is_redirected(self, file: TextIO) -> bool:
        """Whether a standard file writes to the terminal of the bar and may be replaced."""
        if threading.current_thread() is not threading.main_thread():
            return False
        try:
            return os.ttyname(file.fileno()) == os.ttyname(self._file.fileno())
        except (OSError, ValueError, AttributeError):
            return False


class _Line:
    """The bar of the running epoch."""

    def __init__(self, title: str, where: str, done: int, total: int | None) -> None:
        self.title, self.where, self.done, self.total = title, where, done, total
        self.items: list[str] = []
        self.is_waiting = True
        self._started = time.perf_counter()
        self._stepping_since, self._first = self._started, done

    def begin_steps(self) -> None:
        """Starts to measure the rate."""
        if self.is_waiting:
            self.is_waiting = False
            self._stepping_since = time.perf_counter()

    def draw(self, width: int) -> str:
        """Returns the line in at most `width` columns: a shorter bar, then fewer metrics."""
        now = time.perf_counter()
        secs = f"{now - self._started:.0f} s"
        if self.is_waiting:
            doing = f"{self.title}: loading and compiling"
            shorter = (f"{doing} on {self.where}, {secs}", f"{doing}, {secs}", self.title, "")
            return next(line for line in shorter if len(line) <= width)
        items = [secs, *self.items]
        if self.done > self._first:
            items.append(f"{(self.done - self._first) / (now - self._stepping_since):.3g} steps/s")
        lines = [self._text(bar, items) for bar in _BAR_WIDTHS]
        lines += [self._text(_BAR_WIDTHS[-1], items[:n]) for n in range(len(items) - 1, -1, -1)]
        lines += [self._text(0, []), self.title, ""]
        return next(line for line in lines if len(line) <= width)

    def _text(self, bar: int, items: list[str]) -> str:
        """Returns the line with a bar of a given width."""
        if self.total is None:
            return f"{self.title}: {', '.join([f'{self.done} steps', *items])}"
        share = min(self.done / self.total, 1)
        drawn = f" |{'#' * round(share * bar):<{bar}}|" if bar else ""
        texts = [f"{self.done}/{self.total}", *items]
        return f"{self.title} {share:4.0%}{drawn} {', '.join(texts)}"


class _PausableLive(Live):
    """Live display that leaves the line to a debugger."""

    def refresh(self) -> None:
        """Draws the line."""
        if not (self.is_started and _is_debugging()):
            super().refresh()


def _is_debugging() -> bool:
    """Whether the main thread waits in a debugger, as after `breakpoint()` in the loss."""
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


_FIRST, _LAST = 5, 15  # epochs that the table of a long training shows
_SECONDS_BETWEEN_TICKS = 1.0


@final
class NotebookProgress(Display):
    """Shows a table with one row per epoch, and below it a bar; leaves the table.

    The bar is an HTML `<progress>` element. It follows the theme of the notebook, moves on its own
    while the number of steps is unknown, and needs no widgets, so that a saved notebook shows the
    table in every viewer.

    Args:
        fit: The fit; only its epochs are shown, not those before it was resumed.
    """

    def __init__(self, fit: FitLoop) -> None:
        self._first = len(fit.history.epochs)
        self._is_running = False
        self._is_compiled = threading.Event()
        self._lock = threading.Lock()
        self._started = self._updated = 0.0
        self._notes: list[str] = []
        self._handle: Any = None

    def on_epoch_begin(self, fit: FitLoop) -> None:
        """Shows the bar of a new epoch."""
        self._is_running = True
        self._started = time.perf_counter()
        self._update(fit, fit.position.epoch_step)
        if not self._is_compiled.is_set():
            # The context of this thread says to which cell a display belongs.
            run = contextvars.copy_context().run
            threading.Thread(
                target=run, args=(self._tick, fit), name="mirror progress", daemon=True
            ).start()

    def on_step(self, fit: FitLoop) -> None:
        """Shows that the first step is compiled."""
        if not self._is_compiled.is_set():
            self._is_compiled.set()
            self._publish(fit, fit.position.epoch_step)

    def _tick(self, fit: FitLoop) -> None:
        """Shows each second how long the first step has taken."""
        while not self._is_compiled.wait(_SECONDS_BETWEEN_TICKS):
            self._publish(fit, fit.position.epoch_step)

    def on_metrics(self, fit: FitLoop, step: int, logs: dict[str, float]) -> None:  # noqa: ARG002
        """Advances the bar, at most 5 times per second."""
        self._update(fit, _done(fit, step))

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:  # noqa: ARG002
        """Ends the bar; the row appears with the next update."""
        self._is_running = False

    def note(self, text: str) -> None:
        """Adds a line below the table."""
        self._notes.append(text)

    def on_fit_end(self, fit: FitLoop) -> None:
        """Removes the bar."""
        if self._is_running and not fit.stopped:
            steps = counted(fit.position.epoch_step, "step")
            self.note(f"interrupted in epoch {fit.position.epoch + 1} after {steps}")
        self._is_running = False
        self._is_compiled.set()  # ends the thread
        self._publish(fit, 0)
        if not self._first and len(fit.history.epochs) <= _FIRST + _LAST + 1:
            fit.history._mark_as_shown()

    def _update(self, fit: FitLoop, done: int) -> None:
        if time.perf_counter() - self._updated >= _SECONDS_BETWEEN_UPDATES:
            self._publish(fit, done)

    def _publish(self, fit: FitLoop, done: int) -> None:
        """Displays the table and the bar, or replaces what this fit displayed before."""
        from IPython.display import display

        with self._lock:
            bundle = self._bundle(fit, done)
            if self._handle is None:
                self._handle = display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)
            self._updated = time.perf_counter()

    def _bundle(self, fit: FitLoop, done: int) -> dict[str, str]:
        history = fit.history
        epochs = range(self._first, len(history.epochs))
        table = folded_table(history._headings, epochs, history._row, _FIRST, _LAST)
        bar = self._bar(fit, done) if self._is_running else ("", "")
        texts = [repr(table) if table.rows else "", bar[0], *self._notes]
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self._notes)
        return {
            "text/plain": "\n".join(filter(None, texts)),
            "text/html": (table._repr_html_() if table.rows else "") + bar[1] + notes,
        }

    def _bar(self, fit: FitLoop, done: int) -> tuple[str, str]:
        """Returns the running epoch as text and as HTML."""
        title, total = f"epoch {fit.position.epoch + 1}/{fit.epochs}", fit.steps_per_epoch
        secs = f"{time.perf_counter() - self._started:.0f} s"
        is_compiled = self._is_compiled.is_set()
        if is_compiled:
            steps = f"{done}/{total} steps" if total else counted(done, "step")
            text = ", ".join(filter(None, (steps, format_metrics(fit.logs), secs)))
        else:
            where = format_replicas(fit.trainer.strategy)
            text = f"loading data and compiling the step on {where}, {secs}"
        extent = f' value="{done}" max="{total}"' if total and is_compiled else ""
        bar = f"<progress{extent}></progress>"
        return f"{title}: {text}", f"<div>{title} {bar} {html.escape(text)}</div>"


@set_module("mirror.callbacks")
@final
class ProgressBar(Callback):
    """Shows the progress and the metrics of an epoch, and prints a line with them at its end.

    `fit` adds one automatically. In a notebook, it shows a table with one row per epoch instead. If
    the output is neither a terminal nor a notebook, only the lines are printed.

    Args:
        file: File to write to, also in a notebook. Defaults to the output of the notebook, or to
            `sys.stderr`, looked up when `fit` begins.

    >>> import sys
    >>> history = trainer.fit(data, epochs=2, callbacks=ProgressBar(sys.stdout))
    epoch 1/2 on 2 replicas: loss ..., ... s
    epoch 2/2: loss ..., ... s
    """

    runs_on_chief_only: ClassVar[bool] = True

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._display = Display()

    def on_fit_begin(self, fit: FitLoop) -> None:
        """Reports where a training resumes, or that there is nothing to do."""
        self._display = self._new_display(fit)
        position = fit.position
        if position.epoch >= fit.epochs:
            words = f"nothing to do: training is complete ({counted(fit.epochs, 'epoch')})"
            self._display.note(words)
        elif position.samples:
            words = f"resuming epoch {position.epoch + 1} after {position.samples} examples"
            self._display.note(words)

    def on_epoch_begin(self, fit: FitLoop) -> None:
        """Opens a new bar."""
        self._display.on_epoch_begin(fit)

    def on_step(self, fit: FitLoop) -> None:
        """Shows the bar once the first step is compiled."""
        self._display.on_step(fit)

    def on_metrics(self, fit: FitLoop, step: int, logs: dict[str, float]) -> None:
        """Advances the bar."""
        self._display.on_metrics(fit, step, logs)

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:
        """Replaces the bar by a line with the metrics."""
        self._display.on_epoch_end(fit, logs)

    def on_fit_end(self, fit: FitLoop) -> None:
        """Reports why a callback stopped the training, if one did."""
        display, self._display = self._display, Display()
        if fit.stopped:
            display.note(f"stopped: {fit.stopped}")
        display.on_fit_end(fit)

    def _new_display(self, fit: FitLoop) -> Display:
        if self._file is None and in_notebook():
            return NotebookProgress(fit)
        # A service, such as a daemon, may have no standard error.
        file: TextIO | None = sys.stderr if self._file is None else self._file
        if file is None or (self._file is None and file.closed):
            return Display()
        return TerminalProgress(file) if is_terminal(file) else LogProgress(file)
