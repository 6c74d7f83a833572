"""`load_checkpoint`: reads a checkpoint into NumPy arrays, or says which others can be read."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mirror._src.training.checkpoints import files, layout
from mirror._src.training.checkpoints.host_copies import KeyData
from mirror._src.training.checkpoints.messages import in_short, in_words
from mirror._src.utils.errors import describe


class LoadedCheckpoint(NamedTuple):
    """What `load_checkpoint` read."""

    step: int
    arrays: dict[str, np.ndarray | KeyData]
    position: dict[str, Any]
    metrics: dict[str, float]


def load_checkpoint(
    directory: str | os.PathLike[str], step: int | str = "last"
) -> LoadedCheckpoint:
    """Reads a checkpoint, all of it, into NumPy arrays; it needs no devices.

    Args:
        directory: where a `CheckpointStore` wrote.
        step: a number; `"last"`, the one written last; or `"best"`, by the metric that `keep_best`
            named last.

    Raises:
        FileNotFoundError: no directory, no checkpoint of mirror in it, or none of this step.
        NotADirectoryError: a file.
        TypeError: `step` is something else.
        ValueError: the checkpoint is damaged, or none is the best.

    >>> trainer.save("ckpt")
    >>> mirror.load_checkpoint("ckpt").arrays["model.kernel"].shape
    (2, 1)
    """
    directory = layout.absolute(directory)
    found = _found_to_load(directory)
    step = _chosen(directory, found, step)
    with _readable(directory, step, found):
        about = layout.read_about(found[step])
        arrays = files.read_arrays(found[step] / "arrays", about["arrays"])
    return LoadedCheckpoint(step, arrays, about["position"], about["metrics"])


def _found_to_load(directory: Path) -> dict[int, Path]:
    """The checkpoints there, or the error that says what is there instead."""
    needed = "Give the directory that checkpoints were saved to."
    if not directory.exists():
        raise FileNotFoundError(f"There is no directory {directory}. {needed}")
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file. {needed}")
    if (directory / layout.ABOUT).is_file():
        needed = f"It is a checkpoint itself: give {directory.parent} and step={directory.name}."
    found = layout.found_in(directory)
    if not found:
        there = sorted(path.name for path in directory.iterdir())
        raise FileNotFoundError(
            f"{directory} has no checkpoint of mirror; there is {in_words(there)}. {needed}"
        )
    return found


def _chosen(directory: Path, found: dict[int, Path], step: Any) -> int:
    """The step that is meant."""
    if isinstance(step, str) and step == "last":
        return layout.in_order_of_writing(found)[-1]
    if isinstance(step, str) and step == "best":
        return _chosen_as_best(directory, found)
    if isinstance(step, bool) or not isinstance(step, int | np.integer):
        raise TypeError(f'step={describe(step)}: give a number, "last" or "best".')
    if step not in found:
        raise FileNotFoundError(
            f"{directory} has no checkpoint of step {step}. Load another: {in_words(found)}."
        )
    return int(step)


def _chosen_as_best(directory: Path, found: dict[int, Path]) -> int:
    abouts = {}
    for step, path in found.items():
        with _readable(directory, step, found):
            abouts[step] = layout.read_about(path)
    rule = next((a["keep_best"] for a in reversed(abouts.values()) if a["keep_best"]), None)
    best = layout.best_of(abouts, rule) if rule else None
    if best is None:
        lack = f"none has the metric {rule[0]!r}" if rule else "they were saved without keep_best"
        raise ValueError(
            f"No checkpoint in {directory} is the best: {lack}. Load a step: {in_words(found)}."
        )
    return best


@contextlib.contextmanager
def _readable(directory: Path, step: int, found: dict[int, Path]) -> Iterator[None]:
    """Says of an error which checkpoint it is about, and which are left to try."""
    try:
        yield
    except Exception as error:
        others = [other for other in found if other != step]
        raise ValueError(
            f"The checkpoint of step {step} in {directory} cannot be read: "
            f"{in_short(error)}. Load another: {in_words(others)}."
        ) from error
