"""`CheckpointStore`: writes checkpoints to a directory, one per step, and deletes old ones.

It does not depend on models. `files` writes and reads one checkpoint; `layout` defines the
directory.
"""

import contextlib
import json
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, final

import numpy as np

from mirror._src.base.closing import closing
from mirror._src.base.errors import require_int
from mirror._src.training.checkpoints import durable, files, layout
from mirror._src.training.checkpoints.host_copies import KeyData, on_host
from mirror._src.training.checkpoints.layout import Best
from mirror._src.training.checkpoints.messages import in_short, in_words
from mirror._src.training.checkpoints.writer_lock import WriterLock

_SECS_TO_SAY = 0.5


@final
class CheckpointStore:
    """A directory to which checkpoints are written, one per step.

    When a save is complete, it is on the disk, and survives a power failure. Only one process may
    write to a directory at a time; `load_checkpoint` may read concurrently. Unfinished files of an
    interrupted store are deleted.

    Args:
        directory: Path of the directory, which is created if necessary; `~` is expanded.
        keep_last: Number of checkpoints to keep, including the one just written. None keeps all.
        keep_best: Name of a metric, and whether its best value is the `"min"` or the `"max"`. The
            best checkpoint is kept as well, and can be loaded as `"best"`.
        asynchronous: Whether to write files in the background, one checkpoint at a time.

    Raises:
        BlockingIOError: If another process writes to the directory; the message names it.
        OSError: If the directory is not writable.
        TypeError: If `keep_last` is not an integer or None.
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_best: Best | None = None,
        asynchronous: bool = True,
    ) -> None:
        _check_options(keep_last, keep_best)
        self.directory = layout.absolute(directory)
        self._keep_last, self._keep_best, self._asynchronous = keep_last, keep_best, asynchronous
        self._writing: _Write | None = None
        self._closed = False
        self._lock = _make_ready(self.directory)
        self._release = weakref.finalize(self, self._lock.release)

    def save(
        self,
        step: int,
        arrays: Mapping[str, Any],
        position: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Copies the arrays to the host, and writes them as the checkpoint for a step.

        An existing checkpoint for the step is replaced; at any moment, one of the two can be
        loaded. If the arrays are the same and `metrics` is None, the existing metrics are kept.

        Args:
            step: The step, at least 0.
            arrays: Arrays by name: `jax.Array`, of which one replica is read, NumPy arrays, numbers
                and PRNG keys.
            position: A dict of JSON values.
            metrics: Metrics by name, for `keep_best`.

        Raises:
            OSError: If this checkpoint could not be written or, with `asynchronous`, the previous
                one. In the second case this one is not written; the next call tries again.
            RuntimeError: If the store is closed.
            TypeError: If an argument has the wrong type.
            ValueError: If `step`, a name or `metrics` is invalid.
        """
        if self._closed:
            raise RuntimeError(
                f"save({step}) was called after close(). Open a new CheckpointStore."
            )
        self.wait()
        self._check_step(step)
        about = {
            "format": layout.FORMAT,
            "position": _as_json("position", position),
            "metrics": self._checked_metrics(metrics),
            "keep_best": self._keep_best,
        }
        copies = on_host(arrays)
        self._writing = _Write(int(step), lambda: self._write(int(step), copies, about))
        self._writing.start()
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits for pending writes; raises `OSError` if they failed.

        Ctrl-C, or another exception of a signal handler, is raised when the write is complete.
        """
        writing = self._writing  # two threads may wait
        if writing is None:
            return
        step, interrupt, error = writing.step, writing.complete(), writing.error
        self._writing = None
        failure = error and OSError(
            f"Could not write the checkpoint for step {step} to {self.directory}: "
            f"{in_short(error)}. Existing checkpoints are intact: {in_words(self.steps())}. "
            "Free disk space, or save to another directory."
        )
        if interrupt is not None:
            if failure is not None:
                interrupt.add_note(str(failure))
            raise interrupt
        if failure is not None:
            raise failure from error

    def close(self) -> None:
        """Waits for pending writes, and rejects further calls of `save`."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        closing("closing the CheckpointStore", self.close).__exit__(kind, error, trace)

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of all complete checkpoints, in order."""
        return tuple(layout.checkpoints_in(self.directory))

    def latest(self) -> int | None:
        """Returns the step that was written last, or None."""
        paths = layout.checkpoints_in(self.directory)
        return next(reversed(layout.in_order_of_writing(paths)), None)

    def best(self) -> int | None:
        """Returns the step that `keep_best` keeps, or None if no checkpoint has the metric."""
        if self._keep_best is None:
            return None
        abouts = {}
        for step, path in layout.checkpoints_in(self.directory).items():
            with contextlib.suppress(Exception):  # a damaged checkpoint is never the best
                abouts[step] = layout.read_about(path)
        return layout.best_of(abouts, self._keep_best)

    def _check_step(self, step: int) -> None:
        require_int("step", step, 0)
        path = self.directory / str(step)
        if path.exists() and not (path / layout.ABOUT).is_file():
            raise FileExistsError(
                f"{path} already exists and is not a mirror checkpoint. Move it away, or save to "
                "another directory."
            )

    def _checked_metrics(self, metrics: Mapping[str, float] | None) -> dict[str, float]:
        if metrics is not None and self._keep_best and self._keep_best[0] not in metrics:
            raise ValueError(
                f"keep_best={self._keep_best} requires the metric {self._keep_best[0]!r}, got "
                f"{sorted(metrics)}. Pass this metric, or no metrics."
            )
        return {name: float(value) for name, value in (metrics or {}).items()}

    def _write(self, step: int, arrays: dict[str, np.ndarray | KeyData], about: dict) -> None:
        with self._lock.mutex:
            files.write(self.directory / str(step), arrays, about)
            if self._keep_last is None:
                return
            paths = layout.checkpoints_in(self.directory)
            kept = {step, self.best(), *layout.in_order_of_writing(paths)[-self._keep_last :]}
            for other in paths.keys() - kept:
                layout.remove(paths[other])


@final
class _Write(threading.Thread):
    """Writes one checkpoint in the background.

    A daemon, and so are the threads that Orbax starts in it: in a process that ends, Orbax fails,
    and its threads wait 10 minutes for each other.
    """

    def __init__(self, step: int, write: Callable[[], None]) -> None:
        super().__init__(name="mirror checkpoint", daemon=True)
        self.step = step
        self.error: BaseException | None = None
        self._write = write
        self._is_done = threading.Event()

    def run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.error = error
        finally:
            self._is_done.set()

    def complete(self) -> BaseException | None:
        """Waits for the end; returns the first exception that a signal handler raised meanwhile."""
        interrupt, has_said = None, False
        while self.is_alive():
            try:
                limit = None if interrupt is None or has_said else _SECS_TO_SAY
                if self._is_done.wait(limit):
                    self.join()
                elif not has_said:
                    has_said = True
                    self._say()
            except BaseException as error:
                interrupt = interrupt or error
        return interrupt

    def _say(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed, or a broken pipe
            print(
                f"\nInterrupted: completing the checkpoint for step {self.step}. Press Ctrl-\\ to "
                "end the process without it.",
                file=sys.stderr,
                flush=True,
            )


def _check_options(keep_last: Any, keep_best: Any) -> None:
    if keep_last is not None:
        require_int("keep_last", keep_last, fix="None keeps all checkpoints.")
    if keep_best is None:
        return
    pair = isinstance(keep_best, tuple) and len(keep_best) == 2
    if not pair or not isinstance(keep_best[0], str) or keep_best[1] not in ("min", "max"):
        raise ValueError(
            f'`keep_best` must be a metric with "min" or "max", got {keep_best!r}. For example: '
            'keep_best=("loss", "min").'
        )


def _make_ready(directory: Path) -> WriterLock:
    """Creates and locks the directory, and cleans up after interrupted stores."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
        lock = WriterLock.acquire(directory)
    except BlockingIOError:
        raise
    except OSError as error:
        raise OSError(
            f"Could not write checkpoints to {directory}: {in_short(error)}. Pass a directory that "
            "can be created and is writable."
        ) from error
    with lock.mutex:  # files that another store of this process is writing are not leftovers
        for path in list(directory.iterdir()):
            if layout.LEFTOVER.fullmatch(path.name):
                durable.delete(path)
        for path in layout.checkpoints_in(directory).values():
            if path.suffix == layout.REPLACES:
                layout.put_in_place(path)
    return lock


def _as_json(name: str, value: Any) -> Any:
    """Returns the value as it will be read: tuples become lists, and keys strings."""
    try:
        return json.loads(json.dumps(dict(value)))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` cannot be converted to JSON: {error}. Use a dict of numbers, strings, lists "
            "and None."
        ) from error
