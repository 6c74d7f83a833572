"""The progress of a fit in a terminal, and in log files."""

import os
import sys
import threading
import time
from typing import Any, TextIO, final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from mirror._src.base.errors import counted
from mirror._src.base.terminal import wrap
from mirror._src.training.fit import TrainingRun
from mirror._src.training.meter import in_words

_REFRESHES_PER_SECOND = 4
_SECONDS_BETWEEN_UPDATES = 0.2
_BAR_WIDTHS = (20, 10)
_DEBUGGERS = {"bdb", "cmd", "code"}

_last_line = threading.Lock()
"""Held by the fit whose bar is in the last line of the terminal; another fit prints lines only."""


def is_terminal(file: TextIO) -> bool:
    """Whether the file is a terminal that can erase a line."""
    return file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def replicas_in_words(strategy: Any) -> str:
    """Returns the replicas that train, and their devices if there are fewer or more."""
    replicas = strategy.num_replicas_in_sync
    words = counted(replicas, "replica")
    devices = len(set(getattr(strategy, "devices", ()))) or replicas
    return words if devices == replicas else f"{words}, {counted(devices, 'device')}"


class LogProgress:
    """Prints one line per epoch, the first with the number of replicas."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._has_printed = False

    def begin_epoch(self, fit: TrainingRun) -> None:
        """Prints nothing."""

    def after_step(self, fit: TrainingRun) -> None:
        """Prints nothing."""

    def update(self, fit: TrainingRun, done: int) -> None:
        """Prints nothing."""

    def end_epoch(self, fit: TrainingRun, logs: dict[str, float]) -> None:
        """Prints the metrics and the duration."""
        seconds = fit.history.epoch_secs[-1]
        # Wrapped lines break between two metrics only.
        items = [item.replace(" ", "\N{NO-BREAK SPACE}") for item in in_words(logs).split(", ")]
        title = f"epoch\N{NO-BREAK SPACE}{fit.position.epoch}/{fit.epochs}"
        if not self._has_printed:
            self._has_printed = True
            where = replicas_in_words(fit.trainer.strategy).replace(" ", "\N{NO-BREAK SPACE}")
            title += f"\N{NO-BREAK SPACE}on\N{NO-BREAK SPACE}{where}"
        self.note(f"{title}: {', '.join(items)}, {seconds:.1f}\N{NO-BREAK SPACE}s")

    def note(self, text: str) -> None:
        """Prints a line."""
        print(text.replace("\N{NO-BREAK SPACE}", " "), file=self._file, flush=True)

    def close(self, fit: TrainingRun) -> None:
        """Prints nothing."""


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

    def begin_epoch(self, fit: TrainingRun) -> None:
        """Opens a new bar."""
        title = f"epoch {fit.position.epoch + 1}/{fit.epochs}"
        where = replicas_in_words(fit.trainer.strategy)
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

    def after_step(self, fit: TrainingRun) -> None:  # noqa: ARG002
        """Replaces the words of the first step by the bar."""
        self._is_compiled = True
        if self._line is not None:
            self._line.begin_steps()

    def update(self, fit: TrainingRun, done: int) -> None:
        """Advances the bar, which the thread draws."""
        if self._line is None:
            return
        self._line.done = done
        now = time.perf_counter()
        if now - self._updated >= _SECONDS_BETWEEN_UPDATES:
            self._updated = now
            self._line.items = in_words(fit.logs).split(", ")

    def end_epoch(self, fit: TrainingRun, logs: dict[str, float]) -> None:
        """Replaces the bar by a line with the metrics."""
        self._line = None
        super().end_epoch(fit, logs)

    def note(self, text: str) -> None:
        """Prints a line above the bar, wrapped at spaces."""
        lines = wrap(text, self._console.width, indent="  ")
        if self._live is None:
            super().note(lines)
        else:
            self._console.print(lines, soft_wrap=True)

    def close(self, fit: TrainingRun) -> None:  # noqa: ARG002
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
