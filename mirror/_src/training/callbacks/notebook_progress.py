"""The progress of a fit in a notebook: a table that is updated in place."""

import contextvars
import html
import threading
import time
from typing import Any, final

from mirror._src.base.errors import counted
from mirror._src.base.tables import folded_table
from mirror._src.training.callbacks.terminal_progress import replicas_in_words
from mirror._src.training.fit import TrainingRun
from mirror._src.training.meter import in_words

_FIRST, _LAST = 5, 15  # epochs that the table of a long training shows
_SECONDS_BETWEEN_UPDATES = 0.2
_SECONDS_BETWEEN_TICKS = 1.0


@final
class NotebookProgress:
    """Shows a table with one row per epoch, and below it a bar; leaves the table.

    The bar is an HTML `<progress>` element. It follows the theme of the notebook, moves on its own
    while the number of steps is unknown, and needs no widgets, so that a saved notebook shows the
    table in every viewer.

    Args:
        fit: The fit; only its epochs are shown, not those before it was resumed.
    """

    def __init__(self, fit: TrainingRun) -> None:
        self._first = len(fit.history.epochs)
        self._is_running = self._is_compiled = False
        self._has_waited = threading.Event()
        self._lock = threading.Lock()
        self._started = self._updated = 0.0
        self._notes: list[str] = []
        self._handle: Any = None

    def begin_epoch(self, fit: TrainingRun) -> None:
        """Shows the bar of a new epoch."""
        self._is_running = True
        self._started = time.perf_counter()
        self._update(fit, fit.position.epoch_step)
        if not self._is_compiled:
            # The context of this thread says to which cell a display belongs.
            run = contextvars.copy_context().run
            threading.Thread(
                target=run, args=(self._tick, fit), name="mirror progress", daemon=True
            ).start()

    def after_step(self, fit: TrainingRun) -> None:
        """Shows that the first step is compiled."""
        if not self._is_compiled:
            self._is_compiled = True
            self._has_waited.set()
            self._publish(fit, fit.position.epoch_step)

    def _tick(self, fit: TrainingRun) -> None:
        """Shows each second how long the first step has taken."""
        while not self._has_waited.wait(_SECONDS_BETWEEN_TICKS):
            self._publish(fit, fit.position.epoch_step)

    def update(self, fit: TrainingRun, done: int) -> None:
        """Advances the bar, at most 5 times per second."""
        self._update(fit, done)

    def end_epoch(self, fit: TrainingRun, logs: dict[str, float]) -> None:  # noqa: ARG002
        """Ends the bar; the row appears with the next update."""
        self._is_running = False

    def note(self, text: str) -> None:
        """Adds a line below the table."""
        self._notes.append(text)

    def close(self, fit: TrainingRun) -> None:
        """Removes the bar."""
        if self._is_running and not fit.stopped:
            steps = counted(fit.position.epoch_step, "step")
            self.note(f"interrupted in epoch {fit.position.epoch + 1} after {steps}")
        self._is_running = False
        self._has_waited.set()
        self._publish(fit, 0)
        if not self._first and len(fit.history.epochs) <= _FIRST + _LAST + 1:
            fit.history._mark_as_shown()

    def _update(self, fit: TrainingRun, done: int) -> None:
        if time.perf_counter() - self._updated >= _SECONDS_BETWEEN_UPDATES:
            self._publish(fit, done)

    def _publish(self, fit: TrainingRun, done: int) -> None:
        """Displays the table and the bar, or replaces what this fit displayed before."""
        from IPython.display import display

        with self._lock:
            bundle = self._bundle(fit, done)
            if self._handle is None:
                self._handle = display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)
            self._updated = time.perf_counter()

    def _bundle(self, fit: TrainingRun, done: int) -> dict[str, str]:
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

    def _bar(self, fit: TrainingRun, done: int) -> tuple[str, str]:
        """Returns the running epoch as text and as HTML."""
        title, total = f"epoch {fit.position.epoch + 1}/{fit.epochs}", fit.steps_per_epoch
        secs = f"{time.perf_counter() - self._started:.0f} s"
        if self._is_compiled:
            steps = f"{done}/{total} steps" if total else counted(done, "step")
            text = ", ".join(filter(None, (steps, in_words(fit.logs), secs)))
        else:
            where = replicas_in_words(fit.trainer.strategy)
            text = f"loading data and compiling the step on {where}, {secs}"
        extent = f' value="{done}" max="{total}"' if total and self._is_compiled else ""
        bar = f"<progress{extent}></progress>"
        return f"{title}: {text}", f"<div>{title} {bar} {html.escape(text)}</div>"
