"""A directory of checkpoints: the names of the files, their order, and the best one.

The checkpoint for step 120 is the file `step-120.safetensors`, which gets this name when it is
complete and on the disk. After an interrupt or a power failure at any point, every file with such a
name can be loaded.
"""

import contextlib
import errno
import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mirror._src.training.checkpoints import files

Best: TypeAlias = tuple[str, Literal["min", "max"]]

LOCK = ".mirror.lock"
_NAME = re.compile(r"step-(0|[1-9][0-9]*)\.safetensors")
_LEFTOVER = re.compile(_NAME.pattern + re.escape(files.UNFINISHED))
_MOST_SHOWN = 12


def absolute(directory: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a local directory."""
    text = os.fspath(directory)
    if not isinstance(text, str) or not text or "://" in text or "\0" in text:
        raise ValueError(f"`directory` must be the path of a local directory, got {text!r}.")
    path = Path(text).expanduser()
    try:
        return path.resolve()
    except RuntimeError:  # in Python 3.11 and 3.12, for a link to itself; opening it fails
        return path.absolute()


def path_of(directory: Path, step: int) -> Path:
    """Returns the path of the checkpoint for a step."""
    return directory / f"step-{step}.safetensors"


def step_of(path: Path) -> int | None:
    """Returns the step of a checkpoint by its name, or None for another file."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match and path.is_file() else None


def checkpoints_in(directory: Path) -> dict[int, Path]:
    """Returns the checkpoints by step, in order. A directory that does not exist has none."""
    try:
        paths = {step_of(path): path for path in directory.iterdir()}
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # ELOOP: a link to itself
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
        return int(files.read_about(path)["written"])
    except Exception:  # loading the checkpoint reports that it is damaged
        return path.stat().st_mtime_ns


def best_of(abouts: Mapping[int, Mapping[str, Any]], rule: Best) -> int | None:
    """Returns the step with the best value of the metric: the last of equals, and never NaN."""
    metric, mode = rule
    sign = -1 if mode == "min" else 1
    values = {step: about["metrics"].get(metric, math.nan) for step, about in abouts.items()}
    ranked = [(sign * value, step) for step, value in values.items() if not math.isnan(value)]
    return max(ranked)[1] if ranked else None


def in_short(error: BaseException) -> str:
    """Returns the text of an error, for the middle of a sentence."""
    text = getattr(error, "strerror", None) or str(error)
    return f"{text or type(error).__name__:.300}".rstrip(".")


def in_words(names: Iterable[Any]) -> str:
    """Returns a list such as `1, 2, 3`, with the last twelve names at most."""
    texts = [str(name) for name in names]
    shown = ", ".join(texts[-_MOST_SHOWN:])
    if len(texts) > _MOST_SHOWN:
        return f"{len(texts) - _MOST_SHOWN} others, {shown}"
    return shown or "none"
