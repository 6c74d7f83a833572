"""A directory of checkpoints: names of files, their order, the best one, and reading one.

The checkpoint for step 120 is the file `step-120.safetensors`, which gets this name when it is
complete and on the disk. After an interrupt or a power failure at any point, every file with such a
name can be loaded. In an object store, it is an object, which appears when it is complete.
"""

import contextlib
import errno
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from mirror._src.base.errors import expected
from mirror._src.training.checkpoints import files
from mirror._src.training.paths import is_remote, named_errors, path_of_argument, shorten

Best: TypeAlias = tuple[str, Literal["min", "max"]]

LOCK = ".mirror.lock"
_NAME = re.compile(r"step-(0|[1-9][0-9]*)\.safetensors")
_LEFTOVER = re.compile(_NAME.pattern + re.escape(files.UNFINISHED))
_MOST_SHOWN = 12


def absolute(directory: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a directory."""
    path = path_of_argument("directory", directory)
    try:
        return path if is_remote(path) else path.resolve()
    except RuntimeError:  # in Python 3.11 and 3.12, for a link to itself; opening it fails
        return path.absolute()


def path_of(directory: Path, step: int) -> Path:
    """Returns the path of the checkpoint for a step."""
    return directory / f"step-{step}.safetensors"


def step_of(path: Path) -> int | None:
    """Returns the step of a checkpoint by its name, or None for another file."""
    match = _NAME.fullmatch(path.name)
    # A store that fails would say that it is not a file, and training resume from an older one.
    return int(match[1]) if match and (is_remote(path) or path.is_file()) else None


def checkpoints_in(directory: Path) -> dict[int, Path]:
    """Returns the checkpoints by step, in order. A directory that does not exist has none."""
    try:
        with named_errors("list", directory):
            paths = {step_of(path): path for path in directory.iterdir()}
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        if is_missing or error.errno == errno.ELOOP:  # a link to itself
            return {}
        raise
    return {step: paths[step] for step in sorted(step for step in paths if step is not None)}


def remove_leftovers(directory: Path) -> None:
    """Deletes the files of interrupted saves."""
    for path in list(directory.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            with contextlib.suppress(OSError):  # such as a directory of the user
                path.unlink()


def in_order_of_writing(paths: Mapping[int, Path]) -> list[int]:
    """Returns the steps in order of writing: a second training may restart at step 0."""
    return sorted(paths, key=lambda step: _written(paths[step]))


def next_written(directory: Path) -> int:
    """Returns the `written` of a new checkpoint, which is greater than all others'.

    It is the time in nanoseconds, except after the clock was set back.
    """
    others = map(_written, checkpoints_in(directory).values())
    return max(time.time_ns(), max(others, default=0) + 1)


def _written(path: Path) -> int:
    try:
        return int(files.read_metadata(path)["written"])
    except FileNotFoundError:  # the process that writes has deleted it, because it is not the last
        return -1
    except Exception:  # loading the checkpoint reports that it is damaged
        return path.stat().st_mtime_ns


def best_of(headers: Mapping[int, Mapping[str, Any]], rule: Best) -> int | None:
    """Returns the step with the best value of the metric: the last of equals, and never NaN."""
    metric, mode = rule
    sign = -1 if mode == "min" else 1
    values = {step: metadata["metrics"].get(metric, math.nan) for step, metadata in headers.items()}
    ranked = [(sign * value, step) for step, value in values.items() if not math.isnan(value)]
    return max(ranked)[1] if ranked else None


def format_list(names: Iterable[Any]) -> str:
    """Returns a list such as `1, 2, 3`, with the last twelve names at most."""
    texts = [str(name) for name in names]
    shown = ", ".join(texts[-_MOST_SHOWN:])
    if len(texts) > _MOST_SHOWN:
        return f"{len(texts) - _MOST_SHOWN} others, {shown}"
    return shown or "none"


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
        directory: Directory that checkpoints were saved to, also `s3://` and `gs://`.
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


class CheckpointHandle(NamedTuple):
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
            files.require_memory(self.entries)
        return dict(self.arrays())

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yields the arrays with their names; raises as `read`."""
        with self.readable():
            yield from files.read_arrays(self.paths[self.step], self.entries)


def find_checkpoint(directory: str | os.PathLike[str], step: int | str) -> CheckpointHandle:
    """Finds a checkpoint; the arguments and errors are the same as for `load_checkpoint`."""
    directory = absolute(directory)
    paths = checkpoints_in(directory)
    if not paths:
        raise _error_without_checkpoints(directory)
    with named_errors("read", directory):
        step = _chosen_step(directory, paths, step)
    metadata = _metadata_of(step, paths)
    return CheckpointHandle(
        paths, step, metadata["arrays"], metadata["position"], metadata["metrics"]
    )


def _error_without_checkpoints(directory: Path) -> OSError:
    fix = "Pass the directory that checkpoints were saved to."
    if not directory.exists():
        return FileNotFoundError(f"The directory {directory} does not exist. {fix}")
    if not directory.is_dir():
        step = step_of(directory)
        if step is not None:
            fix = f"It is a checkpoint itself: pass {str(directory.parent)!r} and step={step}."
        return NotADirectoryError(f"{directory} is a file. {fix}")
    names = format_list(sorted(path.name for path in directory.iterdir() if path.name != LOCK))
    return FileNotFoundError(
        f"No mirror checkpoint found in {directory} (it contains {names}). {fix}"
    )


def _chosen_step(directory: Path, paths: dict[int, Path], step: Any) -> int:
    if isinstance(step, str) and step == "last":
        return in_order_of_writing(paths)[-1]
    if isinstance(step, str) and step == "best":
        return _best_step(directory, paths)
    if isinstance(step, bool) or not isinstance(step, int | np.integer):
        raise TypeError(expected("step", step, 'an integer, "last" or "best"'))
    if step not in paths:
        raise FileNotFoundError(
            f"No checkpoint for step {step} found in {directory}. Available steps: "
            f"{format_list(paths)}."
        )
    return int(step)


def _best_step(directory: Path, paths: dict[int, Path]) -> int:
    headers = {step: _metadata_of(step, paths) for step in in_order_of_writing(paths)}
    rule = next((a["keep_best"] for a in reversed(headers.values()) if a["keep_best"]), None)
    best = best_of(headers, rule) if rule else None
    if best is None:
        unmonitored = "they were saved without Checkpoint(monitor=...)"
        why = f"all lack the metric {rule[0]!r}, or it is NaN" if rule else unmonitored
        raise ValueError(
            f"Cannot tell which checkpoint in {directory} is the best: {why}. Available steps: "
            f"{format_list(paths)}."
        )
    return best


def _metadata_of(step: int, paths: dict[int, Path]) -> dict[str, Any]:
    with _readable(step, paths):
        return files.read_metadata(paths[step])


@contextlib.contextmanager
def _readable(step: int, paths: dict[int, Path]) -> Iterator[None]:
    """Adds to an error which checkpoint is damaged, and which others exist."""
    try:
        yield
    except Exception as error:
        others = [other for other in paths if other != step]
        raise ValueError(
            f"Could not read the checkpoint for step {step}, {paths[step]}: {shorten(error)}. "
            f"Other steps: {format_list(others)}."
        ) from error
