"""`load_checkpoint`: reads a checkpoint into NumPy arrays."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mirror._src.base.errors import expected
from mirror._src.training.checkpoints import files, layout
from mirror._src.training.checkpoints.layout import in_short, in_words


class LoadedCheckpoint(NamedTuple):
    """The result of `load_checkpoint`.

    Attributes:
        step: Step of the checkpoint.
        arrays: NumPy arrays by name; PRNG keys as objects with `impl` and `data`.
        position: Position of the training, as JSON.
        metrics: Metrics of the epoch, if it was saved with some.
    """

    step: int
    arrays: dict[str, Any]
    position: dict[str, Any]
    metrics: dict[str, float]


def load_checkpoint(
    directory: str | os.PathLike[str], step: int | str = "last"
) -> LoadedCheckpoint:
    """Reads a whole checkpoint into NumPy arrays, without using any device.

    Args:
        directory: Directory that checkpoints were saved to.
        step: A step; `"last"` for the checkpoint written last; or `"best"`, by the metric that
            `Checkpoint(monitor=...)` named last.

    Raises:
        FileNotFoundError: If the directory or the checkpoint does not exist.
        NotADirectoryError: If `directory` is a file.
        TypeError: If `step` has the wrong type.
        ValueError: If the checkpoint is damaged, or no checkpoint is the best.

    >>> trainer.save("ckpt")
    >>> mirror.load_checkpoint("ckpt").arrays["model.kernel"].shape
    (2, 1)
    """
    found = find_checkpoint(directory, step)
    return LoadedCheckpoint(found.step, found.read(), found.position, found.metrics)


class FoundCheckpoint(NamedTuple):
    """A checkpoint whose arrays have not been read.

    Attributes:
        paths: Files of all checkpoints, by step.
        step: Step of this checkpoint.
        entries: Shape, dtype and checksum of every array, by name.
        position: Position of the training, as JSON.
        metrics: Metrics of the epoch, if it was saved with some.
    """

    paths: dict[int, Path]
    step: int
    entries: dict[str, Any]
    position: dict[str, Any]
    metrics: dict[str, float]

    def readable(self) -> contextlib.AbstractContextManager[None]:
        """Context manager that adds to an error which checkpoint is damaged."""
        return _readable(self.step, self.paths)

    def read(self) -> dict[str, Any]:
        """Reads the arrays, or raises a `ValueError` if they are damaged."""
        with self.readable():
            return files.read_arrays(self.paths[self.step], self.entries)


def find_checkpoint(directory: str | os.PathLike[str], step: int | str) -> FoundCheckpoint:
    """Finds a checkpoint; the arguments and errors are the same as for `load_checkpoint`."""
    directory = layout.absolute(directory)
    paths = layout.checkpoints_in(directory)
    if not paths:
        raise _error_without_checkpoints(directory)
    step = _chosen_step(directory, paths, step)
    about = _about(step, paths)
    return FoundCheckpoint(paths, step, about["arrays"], about["position"], about["metrics"])


def _error_without_checkpoints(directory: Path) -> OSError:
    fix = "Pass the directory that checkpoints were saved to."
    if not directory.exists():
        return FileNotFoundError(f"The directory {directory} does not exist. {fix}")
    if not directory.is_dir():
        step = layout.step_of(directory)
        if step is not None:
            fix = f"It is a checkpoint itself: pass {str(directory.parent)!r} and step={step}."
        return NotADirectoryError(f"{directory} is a file. {fix}")
    names = in_words(sorted(path.name for path in directory.iterdir() if path.name != layout.LOCK))
    return FileNotFoundError(
        f"No mirror checkpoint found in {directory} (it contains {names}). {fix}"
    )


def _chosen_step(directory: Path, paths: dict[int, Path], step: Any) -> int:
    if isinstance(step, str) and step == "last":
        return layout.in_order_of_writing(paths)[-1]
    if isinstance(step, str) and step == "best":
        return _best_step(directory, paths)
    if isinstance(step, bool) or not isinstance(step, int | np.integer):
        raise TypeError(expected("step", step, 'an integer, "last" or "best"'))
    if step not in paths:
        raise FileNotFoundError(
            f"No checkpoint for step {step} found in {directory}. Available steps: "
            f"{in_words(paths)}."
        )
    return int(step)


def _best_step(directory: Path, paths: dict[int, Path]) -> int:
    abouts = {step: _about(step, paths) for step in paths}
    rule = next((a["keep_best"] for a in reversed(abouts.values()) if a["keep_best"]), None)
    best = layout.best_of(abouts, rule) if rule else None
    if best is None:
        unmonitored = "they were saved without Checkpoint(monitor=...)"
        why = f"none has the metric {rule[0]!r}" if rule else unmonitored
        raise ValueError(
            f"Cannot tell which checkpoint in {directory} is the best: {why}. Available steps: "
            f"{in_words(paths)}."
        )
    return best


def _about(step: int, paths: dict[int, Path]) -> dict[str, Any]:
    with _readable(step, paths):
        return files.read_about(paths[step])


@contextlib.contextmanager
def _readable(step: int, paths: dict[int, Path]) -> Iterator[None]:
    """Adds to an error which checkpoint is damaged, and which others exist."""
    try:
        yield
    except Exception as error:
        others = [other for other in paths if other != step]
        raise ValueError(
            f"Could not read the checkpoint for step {step}, {paths[step]}: {in_short(error)}. "
            f"Other steps: {in_words(others)}."
        ) from error
