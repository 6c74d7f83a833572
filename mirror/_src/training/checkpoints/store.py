"""`CheckpointStore`: a directory of checkpoints, one for each step; which ones are kept.

This layer knows nothing of models. How one checkpoint is written and read is in `files`; what the
directory looks like, in `layout`.
"""

import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, final
from weakref import WeakSet

import numpy as np

from mirror._src.training.checkpoints import files, layout
from mirror._src.training.checkpoints.host_copies import KeyData, on_host
from mirror._src.training.checkpoints.layout import Best
from mirror._src.training.checkpoints.messages import in_short, in_words
from mirror._src.utils.errors import describe

_opening = threading.Lock()
_stores: "WeakSet[CheckpointStore]" = WeakSet()


@final
class CheckpointStore:
    """A directory that checkpoints are written to, one for each step.

    One process writes to a directory at a time; `load_checkpoint` may read meanwhile. What an
    interrupted store left there unfinished is deleted.

    Args:
        directory: is made if it is not there; `~` is the home directory.
        keep_last: how many checkpoints to keep; the one just written is always kept. `None`: all.
        keep_best: the name of a metric, and whether its best value is the `"min"` or the `"max"`:
            the best checkpoint is kept too, and is the one that is loaded as `"best"`.
        asynchronous: files are written while the caller goes on, one checkpoint at a time.

    Raises:
        OSError: nothing can be written there.
        ValueError: an argument is out of its range.
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
        self._writing: tuple[int, ThreadPoolExecutor, Future[None]] | None = None
        self._closed = False
        with _opening:
            for store in _stores:  # what it is writing must not be taken for left over
                if store.directory == self.directory and store._writing is not None:
                    futures.wait([store._writing[2]])
            _make_ready(self.directory)
            _stores.add(self)

    def save(
        self,
        step: int,
        arrays: Mapping[str, Any],
        position: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Copies the arrays to the host, and writes them as the checkpoint of a step.

        A checkpoint of the same step is replaced: at every moment one of the two can be loaded. If
        its arrays are the same and this call has no metrics, it keeps those it had.

        Args:
            step: at least 0.
            arrays: `jax.Array`, of which one replica is read, NumPy arrays, numbers, PRNG keys.
            position: what JSON can hold.
            metrics: for `keep_best`.

        Raises:
            OSError: this checkpoint could not be written or, when `asynchronous`, the one before;
                then this one is not written either, and the next call tries again.
            RuntimeError: the store is closed.
            TypeError: what cannot be saved.
            ValueError: a step, a name or metrics that cannot be.
        """
        if self._closed:
            raise RuntimeError(f"save({step}) after close(). Make a new CheckpointStore.")
        self.wait()
        self._check_step(step)
        about = {
            "format": layout.FORMAT,
            "position": _as_json("position", position),
            "metrics": self._checked_metrics(metrics),
            "keep_best": self._keep_best,
        }
        copies = on_host(arrays)
        pool = ThreadPoolExecutor(1, thread_name_prefix="mirror checkpoint")
        self._writing = step, pool, pool.submit(self._write, int(step), copies, about)
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits for what is being written; raises `OSError` where it could not be."""
        if self._writing is None:
            return
        step, pool, future = self._writing
        pool.shutdown()
        self._writing = None
        error = future.exception()
        if error is not None:
            raise OSError(
                f"The checkpoint of step {step} was not written to {self.directory}: "
                f"{in_short(error)}. The checkpoints there are whole: "
                f"{in_words(self.steps())}. Make room there, or save to another directory."
            ) from error

    def close(self) -> None:
        """Waits, and takes no more."""
        self._closed = True
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self.close()
        except OSError as lost:
            if error is None:
                raise
            error.add_note(str(lost))  # the first error is the one to see

    def steps(self) -> tuple[int, ...]:
        """The steps whose checkpoints are complete, in order."""
        return tuple(layout.found_in(self.directory))

    def latest(self) -> int | None:
        """The step that was written last."""
        return next(reversed(layout.in_order_of_writing(layout.found_in(self.directory))), None)

    def best(self) -> int | None:
        """The step that `keep_best` keeps; `None` where no checkpoint has the metric."""
        if self._keep_best is None:
            return None
        abouts = {}
        for step, path in layout.found_in(self.directory).items():
            with contextlib.suppress(Exception):  # one that cannot be read is not the best
                abouts[step] = layout.read_about(path)
        return layout.best_of(abouts, self._keep_best)

    def _check_step(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int | np.integer):
            raise TypeError(f"step={describe(step)} is no number. Count steps from 0.")
        if step < 0:
            raise ValueError(f"step={step} is below 0. Count steps from 0.")
        path = self.directory / str(step)
        if path.exists() and not (path / layout.ABOUT).is_file():
            raise FileExistsError(
                f"{path} is there and is not a checkpoint of mirror, which would take its place. "
                "Move it away, or save to another directory."
            )

    def _checked_metrics(self, metrics: Mapping[str, float] | None) -> dict[str, float]:
        if metrics is not None and self._keep_best and self._keep_best[0] not in metrics:
            raise ValueError(
                f"keep_best={self._keep_best} and metrics of {sorted(metrics)}. Save the metric "
                "that keep_best names, or no metrics."
            )
        return {name: float(value) for name, value in (metrics or {}).items()}

    def _write(self, step: int, arrays: dict[str, np.ndarray | KeyData], about: dict) -> None:
        files.write(self.directory / str(step), arrays, about)
        if self._keep_last is None:
            return
        found = layout.found_in(self.directory)
        kept = {self.best(), *layout.in_order_of_writing(found)[-self._keep_last :]}
        for other in found.keys() - kept:
            layout.remove(found[other])


def _check_options(keep_last: Any, keep_best: Any) -> None:
    if keep_last is not None and (not isinstance(keep_last, int) or keep_last < 1):
        raise ValueError(f"keep_last={describe(keep_last)}: give a number from 1 on, or None.")
    if keep_best is None:
        return
    pair = isinstance(keep_best, tuple) and len(keep_best) == 2
    if not pair or not isinstance(keep_best[0], str) or keep_best[1] not in ("min", "max"):
        raise ValueError(
            f'keep_best={keep_best!r}: give a metric and "min" or "max", as in ("loss", "min").'
        )


def _make_ready(directory: Path) -> None:
    """Makes the directory, sees that it can be written to, and finishes what was interrupted."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise OSError(
            f"Checkpoints cannot be written to {directory}: {in_short(error)}. Give a "
            "directory that can be made and written to."
        ) from error
    for path in list(directory.iterdir()):
        if layout.LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    for path in layout.found_in(directory).values():
        if path.suffix == layout.REPLACES:
            layout.put_in_place(path)


def _as_json(name: str, value: Any) -> Any:
    """As it will be read: tuples are lists, and keys are text."""
    try:
        return json.loads(json.dumps(dict(value)))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} is not JSON: {error}. Use a dictionary of numbers, text, lists and None."
        ) from error
